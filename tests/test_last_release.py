"""Files that release 0.1 wrote still serve: caches, packed drafts, traces, benches and distillations are read, profiles
are read or ignored.

`release_0_1/` holds what that release's own code left behind for the tiny models of `files` and `distill_files`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_files import prompts_file, target_folder
from files import write_gguf

from outpace.api.llm import LLM
from outpace.bench.method_runner import MethodRunner
from outpace.bench.store import Store, read_records, read_settings
from outpace.cli.main import main
from outpace.distill.shards import read_shards
from outpace.models.files.gguf.source import convert
from outpace.models.files.packed import whole
from outpace.models.load import load_model
from outpace.planning import profile
from outpace.simulate import trace

RECORDED = Path(__file__).parent / "release_0_1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder and a cache of its own; the number of threads is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The line of JSON of a command that succeeds."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    shown = capsys.readouterr()
    assert not end.value.code, shown.err
    found: dict[str, Any] = json.loads(shown.out.splitlines()[-1])
    return found


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_a_converted_model_is_found_in_the_cache(place: Path) -> None:
    """Today's conversion has the name and the bits of the old one: whoever has that converts nothing."""
    known = json.loads((RECORDED / "cache.json").read_text())["converted"]
    file = write_gguf(place / "tiny.gguf")
    os.utime(file, ns=(10**18, 10**18))
    made = convert(file, place / "cache")
    assert (made.name, digests(made)) == (known["name"], known["files"])


def test_a_packed_draft_is_made_whole(place: Path) -> None:
    """The same bits; the copy that 0.1 made of it is named otherwise, and goes."""
    target = target_folder(place / "target")
    former = place / "cache" / "packed-2df4050a129adb16-v1"
    former.mkdir(parents=True)
    made = whole(RECORDED / "packed", target, place / "cache")
    assert digests(made) == json.loads((RECORDED / "cache.json").read_text())["whole draft"]
    assert not former.exists()


def test_a_trace_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    found = trace.load(RECORDED / "pair.trace")
    assert (found.target, found.tokens, found.ranks, found.acceptance()) == ("tiny.gguf", 18, 32, 1.0)
    assert [answer.task for answer in found.answers] == ["one", "two", "two"]
    shown = run(capsys, "simulate", "--trace", RECORDED / "pair.trace", "--methods", "card", "--ratio", "4")
    assert [row["method"] for row in shown["rows"]] == ["autoregressive", "card"]
    assert all(row["tokens"] == 18 for row in shown["rows"])


def test_a_bench_goes_on_with_what_is_there(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(place / "tiny.gguf")
    shutil.copytree(RECORDED / "bench", place / "bench")
    before = (place / "bench" / "answers.jsonl").read_bytes()
    measure, asked = MethodRunner.answer, []

    def answer(self: MethodRunner, prompt: Any, max_tokens: int) -> Any:
        asked.append(self.name)
        return measure(self, prompt, max_tokens)

    monkeypatch.setattr(MethodRunner, "answer", answer)
    models = ("--target", "tiny.gguf", "--draft", "tiny.gguf", "--runtime", "llama", "--dtype", "float32")
    tasks = ("--threads", 1, "--tasks", "bench/prompts.jsonl", "--max-tokens", 6, "--batch", "1,2", "--out", "bench")
    shown = run(capsys, "bench", *models, *tasks, "--methods", "card:worker=inline")
    assert asked == [], "all of it is there"
    assert (place / "bench" / "answers.jsonl").read_bytes() == before
    known = json.loads((RECORDED / "bench" / "rows.json").read_text())
    assert len(shown["rows"]) == len(known)
    for row, old in zip(shown["rows"], known, strict=True):
        for name in old.keys() - {"commit", "processor"}:
            assert row[name] == (pytest.approx(old[name]) if isinstance(old[name], float | list) else old[name]), name
    run(capsys, "bench", *models, *tasks, "--methods", "card:worker=inline,speculative")
    assert set(asked) == {"speculative"}
    texts = {(one.label, one.task, one.prompt, one.batch): one.tokens for one in read_records(place / "bench")}
    for (label, *rest), tokens in texts.items():
        assert tokens == texts[("autoregressive", *rest)], label


def test_a_bench_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(RECORDED / "bench")
    assert Store(None, settings).settings == settings
    for one in (RECORDED / "bench", RECORDED / "bench" / "rows.json"):
        found = run(capsys, "bench", "--compare", one, RECORDED / "bench")
        assert {row["ratio"] for row in found["rows"]} == {1.0}


def test_the_text_of_a_distillation_goes_on(place: Path) -> None:
    folder = shutil.copytree(RECORDED / "distill", place / "run")
    (shard,) = read_shards(folder / "text")
    asked = prompts_file(place / "asked.jsonl", 40)
    arguments = ["--target", target_folder(place / "target"), "--prompts", asked, "--answer-tokens", 6, "--rows", 4]
    with pytest.raises(SystemExit) as end:
        main(["distill", *map(str, arguments), "--tokens", "120", "--out", str(folder), "--stage", "text"])
    assert not end.value.code
    first, second = read_shards(folder / "text")
    assert first.tokens.tolist() == shard.tokens.tolist()
    assert not set(first.jobs.tolist()) & set(second.jobs.tolist()), "no prompt is answered twice"
    assert len(first.top_ids) + len(second.top_ids) >= 120
    assert len(json.loads((folder / "run.json").read_text())["commands"]) == 2


def test_the_training_of_a_distillation_goes_on(place: Path) -> None:
    folder = shutil.copytree(RECORDED / "distill", place / "run")
    before = [json.loads(line) for line in (folder / "training" / "curve.jsonl").read_text().splitlines()]
    asked = prompts_file(place / "asked.jsonl", 40)
    shape = ["--layers", "1", "--hidden", "8", "--vocab", "20", "--length", "32", "--tokens", "40", "--epochs", "6"]
    arguments = ["--target", target_folder(place / "target"), "--prompts", asked, "--answer-tokens", 6, "--rows", 4]
    with pytest.raises(SystemExit) as end:
        main(["distill", *map(str, arguments), *shape, "--out", str(folder), "--stage", "train"])
    assert not end.value.code
    after = [json.loads(line) for line in (folder / "training" / "curve.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before
    assert after[-1]["step"] > before[-1]["step"]
    assert (folder / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize("is_about_this", [False, True])
def test_a_profile_is_read_or_ignored(place: Path, is_about_this: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "cache_folder", lambda: place / "cache")
    model = load_model(write_gguf(place / "tiny.gguf"), runtime="llama", dtype="float32")
    about = profile.subject(model, model)
    old = json.loads((RECORDED / "profile.json").read_text())
    path = profile.path_of(about)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(old | ({"about": about} if is_about_this else {})))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = profile.read(about)
    assert found is not None or [f"the profile {path} is ignored" in str(one.message) for one in said] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with LLM(model, model, drafter="model+ngram") as llm:
            fast = llm.generate(["hello world 12 hello"], max_tokens=20)
            plain = llm.generate(["hello world 12 hello"], max_tokens=20, plain=True)
    assert fast[0].tokens == plain[0].tokens
