"""llama.cpp with 8-bit weights (Q8_0): greedy, by llama-cpp-python.

llama.cpp, https://github.com/ggml-org/llama.cpp; its quantisation Q8_0 has a scale for every 32 weights.
"""

from __future__ import annotations

from outpace.bench.peer import Peer, PeerSettings
from outpace.bench.peers._llama import LlamaCpp


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's weights, converted once; UserError where it is not installed."""
    return LlamaCpp("llama_cpp", settings, "Q8_0")
