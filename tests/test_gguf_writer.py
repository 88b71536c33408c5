"""Files written for llama.cpp: weights and tokenizer read back, files are written once and atomically, and what
llama.cpp cannot read is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import model_folder, write_gguf

from outpace.core.errors import UserError
from outpace.models.files.cache import cache_folder
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf import writer
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.files.gguf.writer import read_fields
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["llama", "qwen2", "qwen3", "untied"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    families = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    changes: dict[str, Any] = {"tie_word_embeddings": request.param != "untied"}
    if request.param in families:
        changes |= {"model_type": request.param, "architectures": [families[request.param]], "head_dim": 16}
    return model_folder(tmp_path, request.param, **changes)


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("Q8_0", 1 / 127), ("Q4_1", 1 / 7)])
def test_a_file_reads_back(any_folder: Path, kind: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    file = writer.gguf_file(any_folder, kind)
    assert writer.main_kind(file) == kind
    monkeypatch.setattr(gguf_tokenizer, "special_ids", lambda *_: {})  # it has no tokenizer
    with Checkpoint.open(any_folder) as checkpoint, GgufCheckpoint(file) as source:
        config = from_dict(source.config)
        assert config == replace(from_dict(checkpoint.config), attention_bias=config.attention_bias)
        assert source.names() == sorted(tensor_shapes(from_dict(checkpoint.config)))
        for name in source.names():
            value = checkpoint.tensor(name)
            assert (source.tensor(name) - value).abs().max() <= error * value.abs().max(), name


TEXTS = ("hello world 12 hello", "<|im_start|>hell or<|im_end|>", "é\n  12\t")


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "tekken", "gpt-4o", "default", "gpt-2"])
@pytest.mark.parametrize("of_file", [True, False])
def test_a_tokenizer_reads_back(pre: str, of_file: bool, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": pre == "llama-bpe"}
    origin = write_gguf(tmp_path / "origin.gguf", fields)
    folder = resolve(str(origin), cache=tmp_path / "cache")
    rows = 300  # more than there are tokens
    found = read_fields(origin if of_file else folder, rows)
    assert len(found["tokenizer.ggml.tokens"]) == len(set(found["tokenizer.ggml.tokens"])) == rows
    assert found["tokenizer.ggml.pre"] == pre
    file = write_gguf(
        tmp_path / "written.gguf", {key: None for key in open_gguf(origin).metadata if "tok" in key} | found
    )
    built = gguf_tokenizer.build(file, open_gguf(file).metadata)
    expected = gguf_tokenizer.build(origin, open_gguf(origin).metadata)
    for text in TEXTS:
        assert built.tokenizer.encode(text).ids == expected.tokenizer.encode(text).ids
    assert built.settings == expected.settings
    assert built.special_ids == expected.special_ids


def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "target")
    file = folder / "tokenizer.json"
    file.write_text(re.sub(r'("individual_digits": ?)true', r"\1false", file.read_text()))
    with pytest.raises(UserError, match=r"name the target as a \.gguf file"):
        read_fields(folder, 272)
    with pytest.raises(UserError, match="has 272 tokens, the embedding has 100 rows"):
        read_fields(write_gguf(tmp_path / "own.gguf"), 100)


def test_a_file_is_written_once_for_the_same_weights_and_type(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "target")
    first = writer.gguf_file(folder, "Q8_0")
    time = first.stat().st_mtime_ns
    assert writer.gguf_file(folder, "Q8_0") == first
    assert first.stat().st_mtime_ns == time
    assert writer.gguf_file(model_folder(tmp_path, "other", seed=5), "Q8_0") != first
    assert writer.gguf_file(folder, "Q4_1") != first
    assert len(list(first.parent.iterdir())) == 3


def test_a_file_that_fails_half_way_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path, "target")
    left = 3

    def array(self: Checkpoint, name: str) -> np.ndarray:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(28, "No space left on device")
        return read_array(self, name)

    read_array = Checkpoint.array
    monkeypatch.setattr(Checkpoint, "array", array)
    with pytest.raises(UserError, match="cannot be written \\(No space left"):
        writer.gguf_file(folder, "Q8_0")
    assert list((cache_folder() / "gguf").iterdir()) == []
    monkeypatch.setattr(Checkpoint, "array", read_array)
    assert writer.main_kind(writer.gguf_file(folder, "Q8_0")) == "Q8_0"


def test_the_users_file_is_used_if_it_has_that_type(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "own.gguf", kind="Q8_0")
    assert writer.gguf_file(file, "Q8_0") == writer.gguf_file(file) == file
    assert writer.gguf_file(file, "Q4_1") != file


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16},
    ],
)
def test_an_architecture_that_llama_cpp_computes_differently_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"cannot be written for llama\.cpp, allowed are llama"):
        writer.gguf_file(model_folder(tmp_path, "scaled", **changes), "Q8_0")
