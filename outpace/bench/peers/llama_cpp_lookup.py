"""llama.cpp (Q8_0) with llama-cpp-python's own prompt lookup.

Saxena, "Prompt Lookup Decoding", 2023, as implemented by llama-cpp-python's LlamaPromptLookupDecoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._rounds import require
from outpace.bench.peers.llama_cpp import INSTALL, LlamaCpp

NAME = "llama_cpp_lookup"
DRAFT_LENGTH = 2  # as llama-cpp-python's documentation recommends on a CPU


def build(settings: PeerSettings) -> Peer:
    """Load the target's weights, converted once; UserError if llama-cpp-python is not installed."""
    require(NAME, "llama_cpp", INSTALL)
    return LlamaCpp(NAME, settings, "Q8_0", Lookup())


class Lookup:
    """llama-cpp-python's prompt lookup, which has no state."""

    def __init__(self) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._lookup: Any = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT_LENGTH)

    def propose(self, text: np.ndarray) -> np.ndarray:
        """Return the tokens that followed an earlier occurrence of the text's last tokens."""
        found: np.ndarray = self._lookup(text)
        return found

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is no memory to free."""
