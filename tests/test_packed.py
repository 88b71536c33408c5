"""A draft stored without its target's embeddings: the same bits on the way back, and in every runtime that loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distill_files import target_folder
from files import write_gguf
from safetensors.torch import load_file, save_file

import outpace
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.distill.kinds.standalone import VOCAB_FILE, DraftShape, draft_config, new_student, write_draft
from outpace.models.base import chain
from outpace.models.files import pairs
from outpace.models.files.find import resolve
from outpace.models.files.packed import complete_draft, is_packed, pack, unpack
from outpace.models.files.reading import read_json
from outpace.models.load import load_draft, load_model

EMBEDDING = "model.embed_tokens.weight"


def draft_of(target: Path, out: Path, **changes: Any) -> Path:
    """An untrained draft of one layer that writes 100 tokens."""
    ids = torch.arange(0, 200, 2)
    shape = DraftShape("1", vocab=len(ids))
    config = draft_config(read_json(target / "config.json"), shape) | changes
    write_draft(out, new_student(target, shape, ids), config, target)
    (out / "README.md").write_text("a card\n")
    return out


def packed_draft(folder: Path) -> tuple[Path, Path]:
    """A target and a draft, which is also packed."""
    target = target_folder(folder / "target")
    draft = draft_of(target, folder / "draft")
    pack(draft, target, folder / "packed")
    return target, draft


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = target_folder(tmp_path / "target")
    if not request.param:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].flip(0).clone()}, folder / "model.safetensors")
        config = read_json(folder / "config.json") | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_ways_give_the_same_bits(target: Path, tmp_path: Path) -> None:
    draft = draft_of(target, tmp_path / "draft")
    pack(draft, target, tmp_path / "packed")
    assert is_packed(tmp_path / "packed")
    assert not is_packed(draft)
    kept = load_file(tmp_path / "packed" / "model.safetensors")
    assert not {EMBEDDING, "lm_head.weight"} & set(kept)
    assert set(files_of(tmp_path / "packed")) == {"config.json", "model.safetensors", VOCAB_FILE, "README.md"}
    unpack(tmp_path / "packed", target, tmp_path / "whole")
    assert files_of(tmp_path / "whole") == files_of(draft)


@pytest.mark.parametrize("runtime", ["llama", "transformers"])
def test_a_packed_draft_scores_as_the_whole_one(target: Path, tmp_path: Path, cache: Path, runtime: str) -> None:
    draft = draft_of(target, tmp_path / "draft")
    pack(draft, target, tmp_path / "packed")
    loaded = load_model(str(target), runtime=runtime)
    plain, small = (load_draft(str(tmp_path / name), loaded, runtime=runtime) for name in ("draft", "packed"))
    assert small.name == str(tmp_path / "packed")
    rows = [model.score([chain(model.open(8, 8), [5, 7, 9], range(3))]) for model in (plain.model, small.model)]
    assert torch.equal(*rows)
    (made,) = (cache / "drafts").glob("[!.]*-v2")
    before = (made / "model.safetensors").stat().st_mtime_ns
    load_draft(tmp_path / "packed", loaded, runtime=runtime)
    assert (made / "model.safetensors").stat().st_mtime_ns == before, "made once"


def test_the_embedding_of_a_gguf_target(tmp_path: Path, cache: Path) -> None:
    """The student is trained with the dequantised embedding."""
    file = write_gguf(tmp_path / "target.gguf", kind="Q4_1")
    folder = resolve(str(file))
    draft = draft_of(folder, tmp_path / "draft")
    pack(draft, folder, tmp_path / "packed")
    made = complete_draft(tmp_path / "packed", folder)
    trained = new_student(folder, DraftShape("1"), None).tensors[EMBEDDING]
    assert torch.equal(load_file(made / "model.safetensors")[EMBEDDING], trained.bfloat16())
    with outpace.load(file, tmp_path / "packed", method="speculative", drafter="model") as llm:
        fast, plain = (llm.stream("hello", max_tokens=12, plain=plain).finish() for plain in (False, True))
    assert fast.tokens == plain.tokens
    assert fast.figures.drafted > 0


def test_another_process_drafts_with_it(tmp_path: Path, cache: Path) -> None:
    target, _ = packed_draft(tmp_path)
    with outpace.load(target, tmp_path / "packed", method="card", drafter="model", worker="process") as llm:
        fast, plain = (llm.stream("hello", max_tokens=12, plain=plain).finish() for plain in (False, True))
    assert fast.tokens == plain.tokens


def test_a_truncated_copy_in_the_cache_is_replaced(tmp_path: Path, cache: Path) -> None:
    target, _ = packed_draft(tmp_path)
    made = complete_draft(tmp_path / "packed", target)
    sound = files_of(made)
    (made / "model.safetensors").write_bytes(b"torn")
    assert complete_draft(tmp_path / "packed", target) == made
    assert files_of(made) == sound


def test_what_does_not_fit_names_both(tmp_path: Path) -> None:
    target, _ = packed_draft(tmp_path)
    for name, value in (("hidden_size", 32), ("vocab_size", 300)):
        other = tmp_path / name
        other.mkdir()
        (other / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes())
        (other / "config.json").write_text(json.dumps(read_json(target / "config.json") | {name: value}))
        with pytest.raises(UserError, match=rf"{tmp_path}/packed \({name} \d+\) .* {other} \({name} {value}\)"):
            unpack(tmp_path / "packed", other, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_other_embeddings_are_not_left_out(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target")
    draft = draft_of(target, tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    tensors[EMBEDDING][3, 4] += 1.0
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(UserError, match=r"embed_tokens\.weight of .* is not that of"):
        pack(draft, target, tmp_path / "packed")


def test_errors_of_packing(tmp_path: Path, cache: Path) -> None:
    target, draft = packed_draft(tmp_path)
    with pytest.raises(UserError, match="already exists"):
        pack(draft, target, tmp_path / "packed")
    with pytest.raises(UserError, match="is packed already"):
        pack(tmp_path / "packed", target, tmp_path / "twice")
    with pytest.raises(UserError, match="is not packed"):
        unpack(draft, target, tmp_path / "whole")
    with pytest.raises(UserError, match=r"holds no tensor .*embed_tokens.* load this folder as its draft"):
        load_model(str(tmp_path / "packed"), runtime="llama")
    module = tiny.build("llama")
    loaded = load_model(module, tokenizer=load_model(str(target)).tokenizer)
    with pytest.raises(UserError, match=r"is an object of this process: make the draft whole .*--unpack"):
        load_draft(str(tmp_path / "packed"), loaded)
    assert not is_packed("x" * 5000)
    assert not is_packed("a\0b")


def test_the_shipped_draft_goes_with_the_shipped_target(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr("outpace.models.files.find.shipped_model", lambda: file)
    monkeypatch.setattr(pairs, "SHIPPED_FOLDER", tmp_path / "drafts")
    with outpace.load() as llm:
        assert llm.draft is None, "not there yet"
    folder = resolve(None)
    pack(draft_of(folder, tmp_path / "draft"), folder, tmp_path / "drafts" / "smollm2-135m-instruct")
    for options in ({}, {"draft": "auto"}, {"drafter": "model+ngram"}, {"method": "speculative"}):
        with outpace.load(**options) as llm:
            assert llm.draft is not None, options
            assert llm.draft.name == str(tmp_path / "drafts" / "smollm2-135m-instruct")
    without = ({"draft": "none"}, {"drafter": "ngram"}, {"method": "autoregressive"}, {"target": str(file)})
    for options in without:
        with outpace.load(**options) as llm:
            assert llm.draft is None, options


def test_the_command_packs_and_unpacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder(tmp_path / "target")
    run = tmp_path / "run"
    draft = draft_of(target, run / "draft")
    (run / "training").mkdir()
    (run / "training" / "curve.jsonl").write_text("{}\n")
    (run / "judgement.json").write_text("{}\n")

    def command(*arguments: object) -> int:
        with pytest.raises(SystemExit) as left:
            main(["distill", "--target", str(target), *map(str, arguments)])
        return int(left.value.code or 0)

    assert command("--pack", run, "--out", tmp_path / "packed") == 0
    assert {"curve.jsonl", "judgement.json", "README.md"} < set(files_of(tmp_path / "packed"))
    assert command("--unpack", tmp_path / "packed", "--out", tmp_path / "whole") == 0
    assert {name: files_of(tmp_path / "whole")[name] for name in files_of(draft)} == files_of(draft)
    capsys.readouterr()
    assert command("--pack", run, "--out", tmp_path / "packed") == 2
    assert "already exists" in capsys.readouterr().err
    assert command("--pack", run, "--unpack", run) == 2
    assert "choose one" in capsys.readouterr().err
