"""llama.cpp with 4-bit weights (Q4_1): greedy, by llama-cpp-python; for the shipped model, the same file.

llama.cpp, https://github.com/ggml-org/llama.cpp; its quantisation Q4_1 has a scale and a minimum for every 32 weights.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers.llama_cpp import LlamaCpp


def build(settings: PeerSettings) -> Peer:
    """Load the target's file, or its weights converted once; UserError if llama-cpp-python is not installed."""
    return LlamaCpp("llama_cpp_q4", settings, "Q4_1")
