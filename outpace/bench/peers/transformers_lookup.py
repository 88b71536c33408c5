"""transformers' prompt lookup: proposes the tokens that followed an earlier occurrence of the last words.

Saxena, "Prompt Lookup Decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers.transformers import Generate

DRAFT_LENGTH = 10  # as in transformers' documentation and the paper's code


def build(settings: PeerSettings) -> Peer:
    """Load the target; UserError if transformers is not installed."""
    return Generate("transformers_lookup", settings, prompt_lookup_num_tokens=DRAFT_LENGTH)
