"""A draft stored without its target's embeddings scores like the whole one, in every runtime that loads it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distill_files import pack, target_folder
from files import write_gguf
from safetensors.torch import load_file, save_file

import outpace
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.distill.draft_shape import DraftShape, draft_config
from outpace.distill.student import Student
from outpace.models.base import chain
from outpace.models.files import pairs
from outpace.models.files.find import is_packed, open_source, resolve
from outpace.models.files.reading import read_json
from outpace.models.load import load_draft, load_model

EMBEDDING = "model.embed_tokens.weight"


def draft_of(target: Path, out: Path, **changes: Any) -> Path:
    """An untrained draft of one layer that writes 100 tokens."""
    ids = torch.arange(0, 200, 2)
    shape = DraftShape("1", vocab=len(ids))
    config = draft_config(read_json(target / "config.json"), shape) | changes
    Student.new(target, shape, ids).save(out, config, target)
    (out / "README.md").write_text("a card\n")
    return out


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = target_folder(tmp_path / "target")
    if not request.param:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].flip(0).clone()}, folder / "model.safetensors")
        config = read_json(folder / "config.json") | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: Any) -> torch.Tensor:
    return torch.as_tensor(model.score([chain(model.open(8, 8), [5, 7, 9], range(3))]))


@pytest.mark.parametrize("options", [{"runtime": "llama"}, {"runtime": "native"}, {"dtype": "int8"}], ids=str)
def test_a_packed_draft_scores_as_the_whole_one(target: Path, tmp_path: Path, options: dict[str, str]) -> None:
    packed = pack(draft_of(target, tmp_path / "draft"), tmp_path / "packed")
    assert is_packed(packed)
    assert not is_packed(tmp_path / "draft")
    loaded = load_model(str(target), **options)
    plain, small = (load_draft(str(tmp_path / name), loaded, **options) for name in ("draft", "packed"))
    assert small.name == str(packed)
    assert torch.equal(logits(plain.model), logits(small.model))
    again = pickle.loads(pickle.dumps(small.again))()
    assert torch.equal(logits(plain.model), logits(again.model))


def test_the_embedding_of_a_gguf_target(tmp_path: Path) -> None:
    """The student is trained with the dequantised embedding."""
    file = write_gguf(tmp_path / "target.gguf", kind="Q4_1")
    folder = resolve(str(file))
    packed = pack(draft_of(folder, tmp_path / "draft"), tmp_path / "packed")
    trained = Student.new(folder, DraftShape("1"), None).tensors[EMBEDDING]
    with open_source(packed, file) as source:
        assert torch.equal(source.tensor(EMBEDDING), trained.bfloat16())
    with outpace.load(file, packed, method="speculative", drafter="model") as llm:
        fast, plain = (llm.stream("hello", max_tokens=12, plain=plain).finish() for plain in (False, True))
    assert fast.tokens == plain.tokens
    assert fast.figures.drafted > 0


@pytest.mark.parametrize("options", [{"worker": "process"}, {"runtime": "transformers"}], ids=str)
def test_it_drafts_in_another_process_and_for_any_runtime(tmp_path: Path, options: dict[str, str]) -> None:
    target = target_folder(tmp_path / "target")
    packed = pack(draft_of(target, tmp_path / "draft"), tmp_path / "packed")
    with outpace.load(target, packed, method="card", drafter="model", **options) as llm:
        fast, plain = (llm.stream("hello", max_tokens=12, plain=plain).finish() for plain in (False, True))
    assert fast.tokens == plain.tokens


def test_errors_name_what_does_not_fit(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target")
    packed = pack(draft_of(target, tmp_path / "draft"), tmp_path / "packed")
    for name, value in (("hidden_size", 32), ("vocab_size", 300)):
        other = tmp_path / name
        other.mkdir()
        (other / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes())
        (other / "config.json").write_text(json.dumps(read_json(target / "config.json") | {name: value}))
        with pytest.raises(UserError, match=rf"{packed} \({name} \d+\) .* {other} \({name} {value}\)"):
            open_source(packed, other)
    with pytest.raises(UserError, match=r"holds no tensor .*embed_tokens.* load this folder as its draft"):
        load_model(str(packed), runtime="llama")
    module = tiny.build("llama")
    loaded = load_model(module, tokenizer=load_model(str(target)).tokenizer)
    with pytest.raises(UserError, match=r"is an object of this process: name the target's files"):
        load_draft(str(packed), loaded)
    assert not is_packed("x" * 5000)
    assert not is_packed("a\0b")


@pytest.mark.parametrize("flag", ["--pack", "--unpack"])
def test_removed_flags_say_what_to_do_instead(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["distill", flag, "DRAFT"])
    assert left.value.code == 2
    assert f"{flag} was removed: " in capsys.readouterr().err


def test_the_shipped_draft_goes_with_the_shipped_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr("outpace.models.files.find.shipped_model", lambda: file)
    monkeypatch.setattr(pairs, "SHIPPED_FOLDER", tmp_path / "drafts")
    with outpace.load() as llm:
        assert llm.draft is None, "not there yet"
    folder = resolve(None)
    pack(draft_of(folder, tmp_path / "draft"), tmp_path / "drafts" / "smollm2-135m-instruct")
    for options in ({}, {"draft": "auto"}, {"drafter": "model+ngram"}, {"method": "speculative"}):
        with outpace.load(**options) as llm:
            assert llm.draft is not None, options
            assert llm.draft.name == str(tmp_path / "drafts" / "smollm2-135m-instruct")
    without = ({"draft": "none"}, {"drafter": "ngram"}, {"method": "autoregressive"}, {"target": str(file)})
    for options in without:
        with outpace.load(**options) as llm:
            assert llm.draft is None, options
