"""ggml's common types by number: the package `gguf`, which takes a while to import, is needed for others only."""

from __future__ import annotations

from outpace.models.llama.weight_sources import Q4_1, BlockFormat

COMMON = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: Q4_1,
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    20: BlockFormat("IQ4_NL", 32, 18),
    30: BlockFormat("BF16", 1, 2),
}


def type_of(kind: int) -> BlockFormat:
    """The type of that number; ValueError or KeyError where there is none."""
    if kind in COMMON:
        return COMMON[kind]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found = GGMLQuantizationType(kind)
    return BlockFormat(found.name, *GGML_QUANT_SIZES[found])
