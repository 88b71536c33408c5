"""Mistakes in reading model files, each with the test that must fail."""

from __future__ import annotations

from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.files import four_bits

BLOCKS = "test_four_bits.py::test_blocks_hold_what_the_folder_means"


def single_group(pack_blocks_numpy: Original) -> Original:
    return lambda kind, matrix: pack_blocks_numpy(kind, matrix._replace(groups=0 * matrix.groups))


def no_zeros(pack_blocks_numpy: Original) -> Original:
    return lambda kind, matrix: pack_blocks_numpy(kind, matrix._replace(zeros=0 * matrix.zeros))


def unpermuted_groups(read_groups: Original) -> Original:
    def mutated(scheme: Any, stored: Any, inputs: int, where: str) -> Any:
        return read_groups(scheme, None, inputs, where)

    return mutated


FILE_MUTATIONS: list[Mutation] = [
    mutation("four bits: a row has one scale", four_bits, "pack_blocks_numpy", single_group, BLOCKS),
    mutation("four bits: zeros are left out", four_bits, "pack_blocks_numpy", no_zeros, BLOCKS),
    mutation("four bits: 64 share a scale of 32", four_bits, "block_format", lambda f: lambda *_: "U4_64", BLOCKS),
    mutation(
        "four bits: act-order is ignored",
        four_bits,
        "read_groups",
        unpermuted_groups,
        "test_four_bits.py::test_groups_in_another_order_have_no_blocks",
    ),
]
