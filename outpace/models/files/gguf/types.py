"""ggml's common types by number: the package `gguf`, which takes a while to import, is needed for others only."""

from __future__ import annotations

from outpace.models.llama.stored import Q4_1, Type

COMMON = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Q4_1,
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    20: Type("IQ4_NL", 32, 18),
    30: Type("BF16", 1, 2),
}


def type_of(kind: int) -> Type:
    """The type of that number; ValueError or KeyError where there is none."""
    if kind in COMMON:
        return COMMON[kind]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found = GGMLQuantizationType(kind)
    return Type(found.name, *GGML_QUANT_SIZES[found])
