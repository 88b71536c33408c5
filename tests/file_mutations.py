"""Mistakes in reading model files, each with the test that must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing, returning

from outpace.models.files import checkpoint, find, four_bits, recommended_sampling, tokenizer_folder
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf import config as gguf_config
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.runtimes import Loaded

BLOCKS = "test_four_bits.py::test_blocks_hold_what_the_folder_means"
LABELS, OTHERS = "test_labels.py::test_", "test_gguf_others.py::test_"
WRONG, FOLDER = "test_wrong_files.py::test_", "test_tokenizer_folder.py::test_"


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


def names_as_they_are(language_model_names: Original) -> Original:
    return lambda stored, drops_others=False: {name: name for name in stored}


def whatever_else_there_is(read_config: Original) -> Original:
    def mutated(self: Checkpoint) -> Any:
        config = from_dict(self.config)
        self.check_shapes(tensor_shapes(config))
        return config

    return mutated


def without_names(named_tokens: Original) -> Original:
    def mutated(settings: Any) -> Any:
        return named_tokens({key: value for key, value in settings.items() if key != tokenizer_folder.NAMED})

    return mutated


def without_ollama(own_metadata: Original) -> Original:
    def mutated(header: Any, prefix: str) -> Any:
        given = header.metadata.items()
        return {key.removeprefix(prefix): value for key, value in given if key.startswith(prefix)}

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
    mutation(
        "four bits: zero points may contradict the config",
        four_bits,
        "_check_middle",
        nothing,
        "test_four_bits.py::test_zero_points_that_contradict_the_config",
    ),
    mutation(
        "labels: an output layer of its own is ignored",
        Checkpoint,
        "_has_other_output",
        returning(False),
        LABELS + "logits_are_those_of_transformers",
    ),
    mutation(
        "labels: an output layer that is the embedding is noted",
        Checkpoint,
        "_has_other_output",
        lambda has: lambda self: checkpoint.OUTPUT_NAME in self.names(),
        LABELS + "logits_are_those_of_transformers",
    ),
    mutation(
        "labels: tensors that no model uses are ignored",
        Checkpoint,
        "read_config",
        whatever_else_there_is,
        LABELS + "both_values_are_named",
    ),
    mutation(
        "names: no prefix but model.",
        checkpoint,
        "language_model_names",
        names_as_they_are,
        LABELS + "a_language_model_under_any_prefix",
    ),
    mutation(
        "quantised weights without a word in the config",
        Checkpoint,
        "_other_parts",
        returning(""),
        LABELS + "quantised_weights_that_the_config_does_not_mention",
    ),
    mutation(
        "downloads: pointers are read",
        find,
        "check_downloaded",
        nothing,
        WRONG + "what_lies_in_the_place_of_a_download",
    ),
    mutation(
        "folders: their other contents are not described",
        checkpoint,
        "other_contents",
        nothing,
        WRONG + "a_folder_with_other_contents",
    ),
    mutation("Ollama: its manifests are not read", find, "_ollama_blob", nothing, WRONG + "a_manifest_of_ollama"),
    mutation(
        "Ollama: its names of fields are unknown",
        gguf_config,
        "_own_metadata",
        without_ollama,
        OTHERS + "fields_that_ollama_names_otherwise_or_leaves_out",
    ),
    mutation(
        "Ollama: tokens of a vision model are kept",
        gguf_tokenizer,
        "cut_vocabulary",
        lambda cut: lambda metadata, rows: metadata,
        OTHERS + "tokens_without_an_embedding_row_are_cut_if_they_were_added",
    ),
    mutation(
        "tokenizers: names of special tokens are ignored",
        tokenizer_folder,
        "named_tokens",
        without_names,
        FOLDER + "special_tokens_of_a_model_have_names",
    ),
    mutation(
        "tokenizers: add_prefix_space is ignored",
        tokenizer_folder,
        "set_prefix_space",
        nothing,
        FOLDER + "a_space_before_a_text",
    ),
    mutation(
        "tokenizers: add_prefix_space counts for any class",
        tokenizer_folder,
        "_tokenizer_class",
        returning("GPT2Tokenizer"),
        FOLDER + "a_space_before_a_text",
    ),
]
