"""Mistakes in reading model files, each with the test that must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from mutation_checks import Original
from part_mutations import Mistakes, mutations, nothing, returning

from outpace.models.files import checkpoint, find, four_bits, recommended_sampling, tokenizer_folder
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf import config as gguf_config
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.runtimes import Loaded

BITS, LABELS, OTHERS = "test_four_bits.py::test_", "test_labels.py::test_", "test_gguf_others.py::test_"
WRONG, FOLDER = "test_wrong_files.py::test_", "test_tokenizer_folder.py::test_"


def single_group(pack_blocks: Original, kind: str, scheme: Any, parts: dict[str, Any], where: str) -> Any:
    scales = np.broadcast_to(parts["scales"][:1], parts["scales"].shape)
    return pack_blocks(kind, scheme, parts | {"scales": scales}, where)


def no_zeros(pack_blocks: Original, kind: Any, scheme: Any, parts: Any, where: Any) -> Any:
    return pack_blocks(kind, scheme, parts | {"qzeros": 0 * parts["qzeros"]}, where)


def unpermuted_groups(read_groups: Original, scheme: Any, stored: Any, inputs: int, where: str) -> Any:
    return read_groups(scheme, None, inputs, where)


def names_as_they_are(language_model_names: Original, stored: Any, drops_others: Any = False) -> Any:
    return {name: name for name in stored}


def whatever_else_there_is(read_config: Original, self: Checkpoint) -> Any:
    config = from_dict(self.config)
    self.check_shapes(tensor_shapes(config))
    return config


def without_names(named_tokens: Original, settings: Any) -> Any:
    return named_tokens({key: value for key, value in settings.items() if key != tokenizer_folder.NAMED})


def without_ollama(own_metadata: Original, header: Any, prefix: str) -> Any:
    given = header.metadata.items()
    return {key.removeprefix(prefix): value for key, value in given if key.startswith(prefix)}


def unchecked(checked: Original, file: Any, given: Any, names: Any) -> Any:
    return {name: given[key] for name, key in names.items() if given.get(key) is not None}


def any_output(has: Original, self: Checkpoint) -> bool:
    return checkpoint.OUTPUT_NAME in self.names()


RECOMMENDED = "test_recommended_sampling.py::test_"
FILE_MISTAKES: Mistakes = {
    RECOMMENDED + "wrong_values_are_named": [("sampling: unchecked", recommended_sampling, "_checked", unchecked)],
    RECOMMENDED + "a_server_takes_what_the_files_recommend": [
        ("sampling: not taken from files", Loaded, "recommended_sampling", lambda read, self, source: {})
    ],
    RECOMMENDED + "generate_and_chat_take_what_the_files_recommend": [
        ("sampling: no choice", Loaded, "recommended_sampling", lambda read, self, source: read(self, "auto"))
    ],
    BITS + "blocks_hold_what_the_folder_means": [
        ("four bits: a row has one scale", four_bits, "pack_blocks", single_group),
        ("four bits: zeros are left out", four_bits, "pack_blocks", no_zeros),
        ("four bits: 64 share a scale of 32", four_bits, "block_format", returning("U4_64")),
    ],
    BITS + "groups_in_another_order_have_no_blocks": [
        ("four bits: act-order is ignored", four_bits, "read_groups", unpermuted_groups)
    ],
    BITS + "zero_points_that_contradict_the_config": [
        ("four bits: zero points may contradict the config", four_bits, "_check_middle", nothing)
    ],
    LABELS + "logits_are_those_of_transformers": [
        ("labels: an output layer of its own is ignored", Checkpoint, "_has_other_output", returning(False)),
        ("labels: an output layer that is the embedding is noted", Checkpoint, "_has_other_output", any_output),
    ],
    LABELS + "both_values_are_named": [
        ("labels: tensors that no model uses are ignored", Checkpoint, "read_config", whatever_else_there_is)
    ],
    LABELS + "a_language_model_under_any_prefix": [
        ("names: no prefix but model.", checkpoint, "language_model_names", names_as_they_are)
    ],
    LABELS + "quantised_weights_that_the_config_does_not_mention": [
        ("quantised weights without a word in the config", Checkpoint, "_other_parts", returning(""))
    ],
    WRONG + "what_lies_in_the_place_of_a_download": [
        ("downloads: pointers are read", find, "check_downloaded", nothing)
    ],
    WRONG + "a_folder_with_other_contents": [
        ("folders: their other contents are not described", checkpoint, "other_contents", nothing)
    ],
    WRONG + "a_manifest_of_ollama": [("Ollama: its manifests are not read", find, "_ollama_blob", nothing)],
    OTHERS + "fields_that_ollama_names_otherwise_or_leaves_out": [
        ("Ollama: its names of fields are unknown", gguf_config, "_own_metadata", without_ollama)
    ],
    OTHERS + "tokens_without_an_embedding_row_are_cut_if_they_were_added": [
        ("Ollama: a vision model's tokens stay", gguf_tokenizer, "cut_vocabulary", lambda cut, metadata, rows: metadata)
    ],
    FOLDER + "special_tokens_of_a_model_have_names": [
        ("tokenizers: names of special tokens are ignored", tokenizer_folder, "named_tokens", without_names)
    ],
    FOLDER + "a_space_before_a_text": [
        ("tokenizers: add_prefix_space is ignored", tokenizer_folder, "set_prefix_space", nothing),
        ("tokenizers: a space for any class", tokenizer_folder, "_tokenizer_class", returning("GPT2Tokenizer")),
    ],
}
FILE_MUTATIONS = mutations(FILE_MISTAKES)
