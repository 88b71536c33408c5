"""llama.cpp with llama-cpp-python's own prompt lookup.

Saxena, "Prompt Lookup Decoding", 2023, as implemented by llama-cpp-python's LlamaPromptLookupDecoding.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._rounds import require
from outpace.bench.peers.llama_cpp import INSTALL, LlamaCpp

NAME = "llama_cpp_lookup"
DRAFT_LENGTH = 2  # as llama-cpp-python's documentation recommends on a CPU


def build(settings: PeerSettings) -> Peer:
    """Load the target's file, or its weights converted once; UserError if llama-cpp-python is not installed."""
    require(NAME, "llama_cpp", INSTALL)
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaCpp(NAME, settings, LlamaPromptLookupDecoding(num_pred_tokens=DRAFT_LENGTH))
