"""transformers' prompt lookup: proposes what followed the last words when they stood in the text before.

Saxena, "Prompt Lookup Decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._generate import Generate

DRAFTED = 10  # tokens a round, what its documentation and the paper's code take


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's weights; UserError where transformers is not installed."""
    return Generate("transformers_lookup", settings, prompt_lookup_num_tokens=DRAFTED)
