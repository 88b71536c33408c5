"""Mistakes in reading model files, each with the test that must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.files import four_bits, recommended_sampling
from outpace.models.runtimes import Loaded

BLOCKS = "test_four_bits.py::test_blocks_hold_what_the_folder_means"


def single_group(pack_blocks: Original) -> Original:
    def mutated(kind: str, scheme: Any, parts: dict[str, Any], where: str) -> Any:
        scales = np.broadcast_to(parts["scales"][:1], parts["scales"].shape)
        return pack_blocks(kind, scheme, parts | {"scales": scales}, where)

    return mutated


def no_zeros(pack_blocks: Original) -> Original:
    return lambda kind, scheme, parts, where: pack_blocks(kind, scheme, parts | {"qzeros": 0 * parts["qzeros"]}, where)


def unpermuted_groups(read_groups: Original) -> Original:
    def mutated(scheme: Any, stored: Any, inputs: int, where: str) -> Any:
        return read_groups(scheme, None, inputs, where)

    return mutated


def unchecked(checked: Original) -> Original:
    return lambda file, given, names: {name: given[key] for name, key in names.items() if given.get(key) is not None}


RECOMMENDED = "test_recommended_sampling.py::test_"
FILE_MUTATIONS: list[Mutation] = [
    mutation(
        "sampling: unchecked", recommended_sampling, "_checked", unchecked, f"{RECOMMENDED}wrong_values_are_named"
    ),
    mutation(
        "sampling: what files recommend is not taken",
        Loaded,
        "recommended_sampling",
        lambda read: lambda self, source: {},
        f"{RECOMMENDED}a_server_takes_what_the_files_recommend",
    ),
    mutation(
        "sampling: --generation-config is ignored",
        Loaded,
        "recommended_sampling",
        lambda read: lambda self, source: read(self, "auto"),
        f"{RECOMMENDED}generate_and_chat_take_what_the_files_recommend",
    ),
    mutation("four bits: a row has one scale", four_bits, "pack_blocks", single_group, BLOCKS),
    mutation("four bits: zeros are left out", four_bits, "pack_blocks", no_zeros, BLOCKS),
    mutation("four bits: 64 share a scale of 32", four_bits, "block_format", lambda f: lambda *_: "U4_64", BLOCKS),
    mutation(
        "four bits: act-order is ignored",
        four_bits,
        "read_groups",
        unpermuted_groups,
        "test_four_bits.py::test_groups_in_another_order_have_no_blocks",
    ),
]
