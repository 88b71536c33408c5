"""Model folders, their config.json, and how a model is found: everything that is wrong is named in one sentence."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from files import CONFIG, split_weights, weights, write_checkpoint
from safetensors.torch import load_file, save_file

from outpace.core.errors import UserError
from outpace.models.files.cache import new_folder
from outpace.models.files.checkpoint import INDEX, SINGLE, Checkpoint
from outpace.models.files.reading import read_json
from outpace.models.llama.config import llama_config as llama
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.load import load_model


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in weights(**changes).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", CONFIG, tensors())
    return tmp_path / "model"


def check(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.check_shapes(llama.tensor_shapes(llama.from_dict(checkpoint.config)))


def test_a_config_that_is_wrong_is_named(folder: Path) -> None:
    fields = {name: value for name, value in CONFIG.items() if name != "vocab_size"}
    (folder / "config.json").write_text(json.dumps(fields))
    for dtype in ("int8", "float32"):
        with pytest.raises(UserError, match=f"{folder}: vocab_size is missing"):
            load_model(str(folder), dtype=dtype)


def test_config() -> None:
    config = llama.from_dict(CONFIG)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (50000.0, 1e-5, True)
    plain = {name: value for name, value in CONFIG.items() if name not in ("num_key_value_heads", "rope_theta")}
    assert llama.from_dict(plain).num_kv_heads == 4
    assert llama.from_dict(plain).rope_theta == 10000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_parameters": None, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 7, "partial_rotary_factor": 1.0, "hidden_act": "silu", "quantization_config": None},
        {"rope_theta": 7.0, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"rope_theta": 7.0, "model_type": "mistral", "architectures": None, "sliding_window": 128},
        {"rope_theta": 7.0, "model_type": None, "layer_types": ["full_attention"] * 2},
    ],
)
def test_the_same_config_in_other_words(changes: dict[str, Any]) -> None:
    assert llama.from_dict(CONFIG | changes) == llama.from_dict(CONFIG | {"rope_theta": 7.0})


REFUSED: dict[str, list[Any]] = {
    "model_type": ["gemma3", 3],
    "architectures": ["LlamaForCausalLM"],
    "rope_parameters": [
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": -2.0},
        {"full_attention": {"rope_type": "default"}},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        "default",
    ],
    "partial_rotary_factor": [0.5],
    "use_qk_norm": [True],
    "quantization_config": [{"quant_method": "gptq"}],
    "num_local_experts": [8],
    "vocab_size": [-1, 2.5, True, 2**40],
    "hidden_size": [None, 65],
    "intermediate_size": ["96"],
    "num_hidden_layers": [0],
    "num_key_value_heads": [3],
    "head_dim": [15],
    "rms_norm_eps": [0, float("nan")],
    "rope_theta": [-1.0, float("inf")],
    "max_position_embeddings": [0],
    "tie_word_embeddings": ["yes"],
    "attention_bias": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
def test_refused_configs(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=field):
        llama.from_dict(CONFIG | {field: value})


def test_sharded(folder: Path) -> None:
    split_weights(folder)
    check(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), value) for name, value in tensors().items())


def test_damaged_shards(folder: Path) -> None:
    shards = split_weights(folder)
    index = folder / INDEX
    for changed in ({}, None, {"a": 1}, {"a": "../model.safetensors"}, shards | {"a": "part-0.safetensors"}):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(UserError, match=r"weight_map|holds no tensor"):
            Checkpoint.open(folder)
    index.write_text(json.dumps({"weight_map": shards}))
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"part-1\.safetensors does not exist"):
        Checkpoint.open(folder)


def test_truncated_anywhere(folder: Path) -> None:
    file = folder / SINGLE
    whole = file.read_bytes()
    for size in [*range(0, 64, 5), *range(64, len(whole), len(whole) // 40), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model\.safetensors is not a whole"):
            Checkpoint.open(folder)


@pytest.mark.parametrize(
    "changes",
    [
        *({"shape": [2**40]}, {"shape": [-1]}, {"dtype": "F7"}, {"data_offsets": [0, 2**50]}),
        *({"data_offsets": [256, 0]}, None),
    ],
)
def test_inconsistent_headers(folder: Path, changes: dict[str, Any] | None) -> None:
    file, name = folder / SINGLE, "model.norm.weight"
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    entry = header.pop(name)
    head = json.dumps(header if changes is None else header | {name: entry | changes}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + whole[8 + length :])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        check(folder)


NARROW = r" has type .*, allowed are BF16, F16, F32, F64; weights of 8 bits.*--runtime transformers"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values[1:], " has shape"),
        (lambda values: values.to(torch.int8), NARROW),
        (lambda values: values.to(torch.float8_e4m3fn), NARROW),
        (None, ""),
    ],
)
def test_wrong_shapes_and_types(tmp_path: Path, change: Any, words: str) -> None:
    changed, name = tensors(), "model.layers.1.mlp.up_proj.weight"
    values = changed.pop(name)
    write_checkpoint(tmp_path / "model", CONFIG, changed | ({name: change(values)} if change else {}))
    with pytest.raises(UserError, match=f"{name}'{words}"):
        check(tmp_path / "model")


def test_the_first_of_two_writers_stays(tmp_path: Path) -> None:
    with new_folder(tmp_path / "model") as late:
        (late / "name").write_text("late")
        with new_folder(tmp_path / "model") as early:
            (early / "name").write_text("early")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "name").read_text() == "early"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xef\xbb\xbf{}", b"[" * 100_000, b"null", b"\xff\xfe{}", b'{"a": "\\ud83d"}']
)
def test_read_json(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(file) == {"a": "😀"}
    file.write_bytes(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_json(file)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("quantization_config", {"quant_method": "awq"}, "quantization_config 'awq'"),
        ("quantization_config", {"load_in_4bit": True}, "quantization_config None"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ("quantization_config", ["x"], "quantization_config"),
    ],
)
def test_quantised_checkpoints_name_the_other_runtime(folder: Path, field: str, value: Any, words: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    with pytest.raises(UserError, match=f"{words}.*--runtime transformers"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_that_are_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    changed = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    changed["model.norm.weight"][5] = value
    write_checkpoint(tmp_path / "model", CONFIG, changed)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.tensor("model.embed_tokens.weight").dtype == dtype
        with pytest.raises(UserError, match=r"model\.norm\.weight' holds values that are not finite"):
            checkpoint.tensor("model.norm.weight")


def test_folders_without_safetensors(folder: Path) -> None:
    (folder / SINGLE).unlink()
    for name, words in (
        ("pytorch_model.bin", r"pickled weights only \(pytorch_model\.bin\).*nothing is executed from a file"),
        ("adapter_config.json", "an adapter and no model.*--runtime transformers"),
        ("a.gguf", r"name its GGUF file itself, .*a\.gguf"),
    ):
        (folder / name).write_bytes(b"")
        with pytest.raises(UserError, match=words):
            Checkpoint.open(folder)


def test_more_layers_than_tensors(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2**31 - 1}))
    with pytest.raises(UserError, match="num_hidden_layers is 2147483647, but the weight files hold 20 tensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_what_is_no_file(folder: Path, name: str) -> None:
    file = folder / name
    for make, words in (
        (Path.mkdir, "is not a file"),
        (os.mkfifo, "is not a file"),
        (lambda file: file.symlink_to("/dev/zero"), "is not a file"),
        (lambda file: file.symlink_to(file.name), "cannot be read"),
        (lambda file: file.symlink_to("none"), "does not exist"),
    ):
        file.rmdir() if file.is_dir() else file.unlink()
        make(file)
        with pytest.raises(UserError, match=rf"{name} {words}"):
            Checkpoint.open(folder)


def test_a_json_file_of_a_terabyte(folder: Path) -> None:
    with (folder / "config.json").open("wb") as stream:
        stream.truncate(2**40)  # a sparse file takes no space
    with pytest.raises(UserError, match="has 1099511627776 bytes, at most"):
        Checkpoint.open(folder)


def test_missing_files(folder: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        Checkpoint.open(folder / "none")
    for name, words in ((SINGLE, "only safetensors"), ("config.json", r"config\.json does not exist")):
        (folder / name).unlink()
        with pytest.raises(UserError, match=words):
            Checkpoint.open(folder)


def test_damage_in_one_of_several_files_names_it(folder: Path) -> None:
    """The kernels read several tensors into one matrix."""
    bad = "model.layers.0.self_attn.v_proj.weight"
    file = split_weights(folder)[bad]
    held = load_file(folder / file)
    held[bad][1, 2] = torch.nan
    save_file(held, folder / file)
    with Checkpoint.open(folder) as found, pytest.raises(UserError, match=f"{file} is damaged: tensor '{bad}'"):
        NativeLlama.from_tensors(llama.from_dict(found.config), found.weight)
