"""Files that are no model, or not one that outpace reads: one sentence with the cause and what to do."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from files import model_folder, write_gguf
from safetensors.torch import load_file, save_file

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files import hub
from outpace.models.files.checkpoint import INDEX, SINGLE, Checkpoint
from outpace.models.files.find import locate
from outpace.models.load import load_draft, load_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 98\n"
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
ORIGINAL = "name the original checkpoint or a GGUF file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def place(folder: Path, files: dict[str, str | bytes | None]) -> None:
    """Write files; None removes one."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


POINTERS: list[tuple[str, str, str]] = [
    *((name, POINTER, "is a git-lfs pointer.*: run `git lfs pull`") for name in (SINGLE, "config.json")),
    *((name, POINTER, "is a git-lfs pointer") for name in ("tokenizer.json", "tokenizer_config.json", "mine.gguf")),
    (SINGLE, "<!DOCTYPE html><html>Sign in</html>", "is a web page in place of the file"),
    ("mine.gguf", "\n<html>Access denied</html>", "is a web page in place of the file"),
    ("tokenizer.json", "", "is empty: download it again"),
    ("mine.gguf", "tjgg", "is in GGML, the format before GGUF"),
]


@pytest.mark.parametrize(("name", "content", "words"), POINTERS, ids=range(len(POINTERS)))
@pytest.mark.parametrize("runtime", ["auto", "transformers"])
def test_what_lies_in_the_place_of_a_download(folder: Path, name: str, content: str, words: str, runtime: str) -> None:
    place(folder, {name: content})
    with pytest.raises(UserError, match=rf"{name} .*{words}"):
        load_model(folder / name if name.endswith(".gguf") else folder, runtime=runtime)


def test_a_pointer_that_no_text_needs_is_no_error(folder: Path) -> None:
    place(folder, {"consolidated.safetensors": POINTER, "optimizer.bin": POINTER})
    load_model(folder)


FOLDERS: list[tuple[dict[str, str | bytes | None], str]] = [
    ({"adapter_config.json": ADAPTER, "config.json": None}, r"no config.json; it holds an adapter .*\(owner/base\)"),
    (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
        "adapter and no model: merge it into its model",
    ),
    ({"adapter_config.json": "{", "adapters.safetensors": ""}, "adapter and no model: merge it into its model, and"),
    ({"pytorch_model.bin": ""}, "pickled weights only .pytorch_model.bin.*save the model as safetensors"),
    ({"config.json": None, "consolidated.00.pth": ""}, "no config.json; it holds pickled weights only"),
    ({"onnx/model.onnx": ""}, f"weights for ONNX .onnx/model.onnx., which outpace does not read: {ORIGINAL}"),
    ({"openvino_model.xml": "", "openvino_model.bin": ""}, "weights for OpenVINO .openvino_model.xml."),
    ({"flax_model.msgpack": ""}, "weights for Flax"),
    ({"model-00001-of-00002.safetensors": "x"}, f"must be named {SINGLE}, or be listed in {INDEX}, and model-00001"),
    ({"config.json": None, "model_index.json": "{}"}, "it holds a diffusion model"),
    ({"config.json": None, "inner/config.json": "{}"}, "name the folder of the model itself, .*inner"),
    ({"config.json": '{"_class_name": "UNet2DConditionModel"}'}, r"a part of a diffusion model \(UNet2DCond"),
    ({INDEX: '{"weight_map": {"a": "part.safetensors"}}'}, f"part.safetensors does not exist, although {INDEX} names"),
]


@pytest.mark.parametrize(("files", "words"), FOLDERS, ids=range(len(FOLDERS)))
def test_a_folder_with_other_contents(folder: Path, files: dict[str, str | bytes | None], words: str) -> None:
    target = load_model(write_gguf(folder.parent / "target.gguf"))
    place(folder, {SINGLE: None, **files})
    for load in (load_model, partial(load_draft, target=target)):
        with pytest.raises(UserError, match=words) as caught:
            load(folder)
        assert "\n" not in str(caught.value)


def test_files_of_a_repository() -> None:
    for listed, words in (
        (["adapter_config.json", "adapter_model.safetensors"], "it holds an adapter and no model"),
        (["model_index.json", "unet/config.json"], "it holds a diffusion model"),
        (["config.json", "onnx/model.onnx"], "it holds weights for ONNX"),
    ):
        with pytest.raises(UserError, match=f"owner/name holds neither .*{words}"):
            hub.choose_files(hub.HubName("owner/name"), listed)


QUANTISED: list[tuple[str, dict[str, Any], str]] = [
    ("quantization", {"group_size": 64, "bits": 4}, f"by MLX .group_size 64, bits 4.*only MLX reads: {ORIGINAL}"),
    *(
        ("quantization_config", {"quant_method": "gptq", "bits": bits, "group_size": 128}, f"with bits {bits}, supp")
        for bits in (2, 3, 8)
    ),
    *(
        ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 64, name: form}, f"{name} '{form}'")
        for name, form in (("version", "gemv"), ("version", "gemv_fast"), ("format", "llm-awq"), ("version", "marlin"))
    ),
    ("quantization_config", {"quant_method": "auto-round", "bits": 4}, "'auto-round'"),
    ("quantization_config", {"quant_method": "exl3", "bits": 4.0}, "'exl3'"),
    ("quantization_config", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
]


@pytest.mark.parametrize(("field", "value", "words"), QUANTISED, ids=range(len(QUANTISED)))
def test_quantised_folders(folder: Path, field: str, value: dict[str, Any], words: str) -> None:
    """The reason is named by our own runtimes, and where transformers cannot load the files either."""
    tensors = load_file(folder / SINGLE)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    said = rf"model is quantised .*{words}"
    with pytest.raises(UserError, match=said) as caught:
        load_model(folder, runtime="native")
    assert ORIGINAL in str(caught.value)
    if isinstance(caught.value, UnsupportedModel):
        said += ".*(cannot be loaded by transformers|lacks 1 of the model's weights)"
    with pytest.raises(UserError, match=said):
        load_model(folder)


def test_an_embedding_model(folder: Path) -> None:
    modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    place(folder, {"modules.json": json.dumps(modules)})
    with pytest.raises(UserError, match=r"is an embedding model .modules.json names a pooling layer"):
        load_model(folder)


def test_a_missing_tokenizer(folder: Path) -> None:
    place(folder, {"tokenizer.json": None})
    with pytest.raises(UserError, match=r"no tokenizer.json; copy the files of the original model's tokenizer there"):
        load_model(folder)
    place(folder, {"tokenizer.model": ""})
    with pytest.raises(UserError, match=r"no tokenizer.json; `AutoTokenizer"):
        load_model(folder)


GGUFS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"general.type": "mmproj"}, {}, "'mmproj' .a projector for images or sound.; name the model's own file"),
    ({"general.type": "imatrix"}, {}, "'imatrix' .an importance matrix"),
    ({}, {"tensors": {}}, "holds a vocabulary and no tensors; name the model's own file"),
    (
        {"split.count": 2, "split.no": 1},
        {},
        "is part 2 of 2: name the first one, .*00001-of-00002.gguf, which is missi",
    ),
    ({}, {"architecture": "jina-bert-v2"}, r"is an encoder \(jina-bert-v2\)"),
    ({}, {"architecture": "flux"}, "'flux'.*nor does the installed package gguf know a language model of that name"),
    ({}, {"architecture": "eagle3"}, "is a trained head .eagle3., which drafts for another model: name it as draft"),
]


@pytest.mark.parametrize(("metadata", "options", "words"), GGUFS, ids=range(len(GGUFS)))
def test_gguf_files_of_other_kinds(tmp_path: Path, metadata: Any, options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_model(write_gguf(tmp_path / "a-00002-of-00002.gguf", metadata, **options))


# Files under other names, which are taken


@pytest.mark.parametrize("name", ["sha256-0123abcd", "model.bin", "qwen", "A.GGUF"])
@pytest.mark.parametrize("runtime", ["native", "llama"])
def test_a_gguf_file_of_any_name(tmp_path: Path, name: str, runtime: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf").rename(tmp_path / name)
    assert load_model(path, runtime=runtime).files() == path


def manifest(root: Path, **digests: str) -> Path:
    path = root / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": d} for kind, d in digests.items()]
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return path


def test_a_manifest_of_ollama(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = write_gguf(tmp_path / "tiny.gguf").rename(tmp_path / "blobs" / "sha256-12ab")
    found = manifest(tmp_path, template="sha256:99", model="sha256:12ab")
    assert locate(str(found)) == blob
    assert load_model(found).files() == blob
    refused: list[tuple[dict[str, str], str]] = [
        ({"model": "sha256:77"}, "blobs/sha256-77, which is missing"),
        ({"model": "../../../etc/passwd"}, "blobs/passwd, which is missing"),
        ({"model": "sha256:12ab", "adapter": "sha256:5"}, "names an adapter of Ollama"),
        ({"template": "sha256:12ab"}, "names no GGUF file of Ollama"),
    ]
    for layers, words in refused:
        with pytest.raises(UserError, match=words):
            locate(str(manifest(tmp_path, **layers)))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_of_a_folder_names_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not a GGUF file; name its folder, {folder}"):
        load_model(folder / name)


def test_the_draft_of_a_target_may_be_a_blob(tmp_path: Path) -> None:
    target = load_model(write_gguf(tmp_path / "tiny.gguf"))
    draft = write_gguf(tmp_path / "draft.gguf").rename(tmp_path / "sha256-77")
    assert load_draft(draft, target).model.vocab_size == target.model.vocab_size


def test_of_two_shards_with_the_same_tensor_the_index_decides(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors, folder / "a.safetensors", {"format": "pt"})
    save_file({name: tensors[name] * 2}, folder / "b.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    for shard, factor in (("a", 1.0), ("b", 2.0)):
        places = dict.fromkeys(tensors, "a.safetensors") | {name: f"{shard}.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with Checkpoint.open(folder) as checkpoint:
            assert torch.equal(checkpoint.tensor(name), tensors[name] * factor)
