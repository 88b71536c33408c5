"""transformers' generate: greedy, float32, with its key-value cache.

Wolf et al., "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv:1910.03771.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._generate import Generate


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's weights; UserError where transformers is not installed."""
    return Generate("transformers", settings)
