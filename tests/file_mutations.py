"""Mistakes in reading a model's files: each must fail a test of the suite, named here."""

from __future__ import annotations

from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.files import four_bits

BLOCKS = "test_four_bits.py::test_blocks_hold_what_the_folder_means"


def one_group(by_numpy: Original) -> Original:
    return lambda kind, matrix: by_numpy(kind, matrix._replace(groups=0 * matrix.groups))


def no_zeros(by_numpy: Original) -> Original:
    return lambda kind, matrix: by_numpy(kind, matrix._replace(zeros=0 * matrix.zeros))


def own_order(read_groups: Original) -> Original:
    def mutated(scheme: Any, said: Any, inputs: int, where: str) -> Any:
        return read_groups(scheme, None, inputs, where)

    return mutated


FILE_MUTATIONS: list[Mutation] = [
    mutation("four bits: a row has one scale", four_bits, "by_numpy", one_group, BLOCKS),
    mutation("four bits: zeros are left out", four_bits, "by_numpy", no_zeros, BLOCKS),
    mutation("four bits: 64 share a scale of 32", four_bits, "kind_of", lambda f: lambda *_: "U4_64", BLOCKS),
    mutation(
        "four bits: act-order is the inputs' own order",
        four_bits,
        "read_groups",
        own_order,
        "test_four_bits.py::test_groups_in_another_order_have_no_blocks",
    ),
]
