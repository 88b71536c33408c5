"""The forward of a Llama-family model on a CPU: weights in int8 or as a file has them, token trees, the same bits for
every batch. Also `rank`, the best tokens of rows of logits, and `TokenTree`, the tree that a round drafts and verifies.

It takes and returns buffers and knows nothing of torch or the engine. `emulation` is the arithmetic in numpy.
"""

from outpace_kernels._native import (
    ARITHMETIC,
    FLOATS,
    FORMATS,
    GROUP,
    KV_DTYPES,
    LANES,
    MAX_DEPTH,
    Frontier,
    Heads,
    Layer,
    Matrix,
    Model,
    Room,
    Store,
    TokenTree,
    blocks_of_words,
    instruction_sets,
    left_open,
    log_chances,
    log_softmax_at,
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
    "Frontier",
    "Heads",
    "Layer",
    "Matrix",
    "Model",
    "Room",
    "Store",
    "TokenTree",
    "blocks_of_words",
    "instruction_sets",
    "left_open",
    "log_chances",
    "log_softmax_at",
    "rank",
    "round_to_q4_1",
]
