"""llama.cpp with a draft model, through llama-cpp-python's interface for drafts.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, greedy.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._rounds import check_draft, require
from outpace.bench.peers.llama_cpp import INSTALL, LlamaCpp, open_llama
from outpace.models.files.gguf.writer import gguf_file

NAME = "llama_cpp_draft"
DRAFT_LENGTH = 2


def build(settings: PeerSettings) -> Peer:
    """Load both models' weights, converted once; UserError without a draft or without llama-cpp-python.

    A draft with a reduced vocabulary runs with its whole output layer.
    """
    require(NAME, "llama_cpp", INSTALL)
    draft = check_draft(NAME, settings)
    llama = open_llama(NAME, gguf_file(draft), settings, flash=True)

    def propose(text: np.ndarray) -> np.ndarray:
        return np.array(list(islice(llama.generate(text.tolist(), temp=0.0), DRAFT_LENGTH)), dtype=np.intc)

    return LlamaCpp(NAME, settings, propose, llama)
