"""The forward of a Llama-family model on a CPU: weights in int8 or as a file has them,
token trees, the same bits for every batch.

Buffers in, buffers out; nothing here knows torch or the engine. `emulation` is the arithmetic in numpy.
"""

from outpace_kernels._native import (
    ARITHMETIC,
    FLOATS,
    FORMATS,
    GROUP,
    KV_DTYPES,
    LANES,
    MAX_DEPTH,
    Heads,
    Layer,
    Matrix,
    Model,
    Room,
    Store,
    blocks_of_words,
    instruction_sets,
    rank,
    round_to_q4_1,
)

__all__ = [
    "ARITHMETIC",
    "FLOATS",
    "FORMATS",
    "GROUP",
    "KV_DTYPES",
    "LANES",
    "MAX_DEPTH",
    "Heads",
    "Layer",
    "Matrix",
    "Model",
    "Room",
    "Store",
    "blocks_of_words",
    "instruction_sets",
    "rank",
    "round_to_q4_1",
]
