"""llama.cpp (Q8_0) with a draft model (Q8_0) behind llama-cpp-python's interface for drafts.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, greedy.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._gguf import gguf_file
from outpace.bench.peers._rounds import check_draft, need
from outpace.bench.peers.llama_cpp import INSTALL, LlamaCpp, ModelDrafts, open_llama

NAME = "llama_cpp_draft"
DRAFTED = 2  # tokens a round


def build(settings: PeerSettings) -> Peer:
    """The peer on both models' weights, converted once; UserError without a draft, or where it is not installed.

    A draft that writes a part of the vocabulary only runs with its whole output layer here.
    """
    need(NAME, "llama_cpp", INSTALL)
    draft = check_draft(NAME, settings)
    llama = open_llama(NAME, gguf_file(draft, "Q8_0"), settings, flash=True)
    return LlamaCpp(NAME, settings, "Q8_0", ModelDrafts(llama, DRAFTED))
