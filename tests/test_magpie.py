"""Prompts that a target writes itself: where they begin, which are kept, and that a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distill_files import run_command, target_folder
from distill_files import target as target
from files import set_fields

from outpace.core.errors import UserError
from outpace.distill import text as writing
from outpace.distill.prompts import read_prompts
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer
from outpace.models.files.cache import exclusive_lock
from outpace.models.files.find import resolve
from outpace.models.text.tokenizer import Tokenizer

SMALL = WriterOptions(rows=8, max_tokens=12, top=4)


def write(target: Path, number: int, folder: Path) -> list[str]:
    said: list[float] = []
    file = writing.write_prompts(
        target, number, folder, SMALL, "cpu", lambda stage, figures: said.append(figures["prompts"])
    )
    assert said == sorted(said)
    return read_prompts(file)


class ScriptedWriter:
    """A writer with given answers, which records its jobs."""

    def __init__(self, texts: list[str], target: Path) -> None:
        self._texts, self._tokenizer, self.jobs = texts, Tokenizer.from_folder(target), list[AnswerJob]()

    def __call__(self, *arguments: Any) -> Iterator[WrittenAnswer]:
        jobs: Iterator[AnswerJob] = arguments[-1]
        end = min(self._tokenizer.stop_ids)
        for text, job in zip(self._texts, jobs, strict=False):
            self.jobs.append(job)
            is_cut = text.startswith("CUT")
            ids = [*self._tokenizer.continuation(text), *([] if is_cut else [end])]
            top = np.zeros((len(ids), 1))
            yield WrittenAnswer(job, np.array(ids), top, top)


def test_whole_messages_are_kept_once_each(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["hello world hello", "hello", "CUT hello world or well", "hello world hello", "well well or all he"]
    writer = ScriptedWriter(told, target)
    monkeypatch.setattr(writing, "write_answers", writer)
    kept = [told[0], told[4]]
    assert write(target, 2, tmp_path) == kept
    assert {job.temperature for job in writer.jobs} == {writing.TEMPERATURE}

    assert write(target, 2, tmp_path) == kept, "it has enough"
    more = ScriptedWriter([told[0], "12 worlds or 12 hells"], target)
    monkeypatch.setattr(writing, "write_answers", more)
    assert write(target, 3, tmp_path) == [*kept, "12 worlds or 12 hells"], "old prompts are not written again"
    assert not {job.number for job in more.jobs} & {job.number for job in writer.jobs}


def test_the_same_seed_writes_the_same(tmp_path: Path) -> None:
    """The shipped model's: whole messages of its own."""
    try:
        model = resolve(None)
    except UserError:
        pytest.skip("the shipped model is not installed")
    found = [write(model, 3, tmp_path / name) for name in ("one", "two")]
    assert found[0] == found[1]
    assert all(len(text) >= writing.MIN_CHARACTERS for text in found[0])
    assert len(set(found[0])) == 3


def test_a_target_without_messages_or_a_template_is_an_error(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MAX_TRIES", 5)
    monkeypatch.setattr(writing, "write_answers", ScriptedWriter(["CUT hello world or well"] * 20, target))
    with pytest.raises(UserError, match="of 5 messages that the target began, 0 ended as a user's message does"):
        write(target, 2, tmp_path)
    bare = target_folder(tmp_path / "bare")
    set_fields(bare, chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        write(bare, 2, tmp_path)


def test_prompts_begin_with_each_begin_in_rotation(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ScriptedWriter([" world or well he", " well or all or he"] * 2, target)
    monkeypatch.setattr(writing, "write_answers", writer)
    given = (SMALL, "cpu", lambda *_: None, ("hello", "lo"))
    found = read_prompts(writing.write_prompts(target, 2, tmp_path, *given))
    assert found == ["hello world or well he", "lo well or all or he"]
    tokenizer = Tokenizer.from_folder(target)
    heads = [tokenizer.decode(job.prompt) for job in writer.jobs[:2]]
    assert heads[0].endswith("hello")
    assert heads[1].endswith("lo")


def test_two_processes_at_the_same_prompts(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused before it reads what is there, for the first goes on writing."""
    monkeypatch.setattr(writing, "write_answers", ScriptedWriter(["hello world or well"] * 3, target))
    command = ["--target", target, "--out", tmp_path, "--write-prompts", 1]
    with exclusive_lock(tmp_path / "prompts.jsonl"):
        assert run_command(*command) == 2
        assert "another process is writing prompts in" in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "prompts.jsonl").exists()
    assert run_command(*command) == 0
    assert len(read_prompts(tmp_path / "prompts.jsonl")) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--write-prompts", "0"], "write_prompts is 0"),
        (["--write-prompts", "3", "--evaluate", "x"], "exclude one another"),
        (["--begin", "Write", "--tokens", "9"], "--begin is for --write-prompts"),
    ],
)
def test_bad_input_is_an_error(
    arguments: list[str], says: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--target", target, "--out", tmp_path / "out", *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())
