"""llama.cpp (Q8_0) with llama-cpp-python's own prompt lookup.

Saxena, "Prompt Lookup Decoding", 2023, as llama-cpp-python's LlamaPromptLookupDecoding has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._rounds import need
from outpace.bench.peers.llama_cpp import INSTALL, LlamaCpp

NAME = "llama_cpp_lookup"
DRAFTED = 2  # tokens a round, what llama-cpp-python's documentation recommends on a CPU


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's weights, converted once; UserError where it is not installed."""
    need(NAME, "llama_cpp", INSTALL)
    return LlamaCpp(NAME, settings, "Q8_0", Lookup())


class Lookup:
    """Its prompt lookup, which has no memory."""

    def __init__(self) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._lookup: Any = LlamaPromptLookupDecoding(num_pred_tokens=DRAFTED)

    def propose(self, text: np.ndarray) -> np.ndarray:
        """What followed the text's last tokens where they stood before."""
        found: np.ndarray = self._lookup(text)
        return found

    def forget(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""
