"""transformers' assisted generation: a draft model proposes, with the settings that transformers ships.

Gante, "Assisted Generation: a new direction toward low-latency text generation", Hugging Face blog, 2023.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._generate import Generate, load
from outpace.bench.peers._rounds import check_draft

NAME = "transformers_assisted"


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's and the draft's weights; UserError without a draft or without transformers.

    A draft that writes a part of the vocabulary only runs with its whole output layer here: transformers does not know
    of the smaller one.
    """
    draft = check_draft(NAME, settings)
    return Generate(NAME, settings, assistant_model=load(NAME, draft))
