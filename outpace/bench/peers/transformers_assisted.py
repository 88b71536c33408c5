"""transformers' assisted generation: a draft model proposes, with the settings that transformers ships.

Gante, "Assisted Generation: a new direction toward low-latency text generation", Hugging Face blog, 2023.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._rounds import check_draft
from outpace.bench.peers.transformers import Generate, load

NAME = "transformers_assisted"


def build(settings: PeerSettings) -> Peer:
    """Load target and draft; UserError without a draft or without transformers.

    A draft with a reduced vocabulary runs with its whole output layer: transformers does not know the reduced one.
    """
    draft = check_draft(NAME, settings)
    return Generate(NAME, settings, assistant_model=load(NAME, draft))
