"""`outpace distill`, stage text: what the target is asked, what it writes, and what is kept of it."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distill_files import prompts_file, target_folder

from outpace.core.errors import UserError
from outpace.distill import prompts
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.prompts import is_held_out
from outpace.distill.shards import MANIFEST, Shard, TextFolder, read_shard, read_shards
from outpace.distill.text import TEMPERATURES, TextPlan, write_text
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer
from outpace.models.text.tokenizer import Tokenizer

SMALL = WriterOptions(rows=7, max_tokens=12, top=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def jobs(count: int, temperature: float = 0.0) -> list[AnswerJob]:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 20, count).tolist()
    return [
        AnswerJob(n, tuple(random.integers(3, 260, length).tolist()), temperature) for n, length in enumerate(lengths)
    ]


def write(target: Path, folder: Path, asked: Path, tokens: int, **options: int) -> TextFolder:
    settings = WriterOptions(**{"rows": 6, "max_tokens": 10, "top": 4, **options})
    plan = TextPlan([str(asked)], settings, tokens=tokens)
    return write_text(target, "tiny", folder, plan, lambda figures: None)


def test_shards_hold_what_was_written(tmp_path: Path) -> None:
    answers = [
        WrittenAnswer(
            job, np.arange(3 + n, dtype=np.int32), np.zeros((3 + n, 4), np.int32), np.zeros((3 + n, 4), np.float16)
        )
        for n, job in enumerate(jobs(3))
    ]
    TextFolder(tmp_path, {"target": "tiny", "top": 4}).add(answers)
    (shard,) = read_shards(tmp_path)
    for n, answer in enumerate(answers):
        text = shard.tokens[shard.starts[n] : shard.starts[n + 1]].tolist()
        assert text == [*answer.job.prompt, *answer.tokens.tolist()]
    assert shard.jobs.tolist() == [0, 1, 2]
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["tokens"] == 12
    assert [entry["answers"] for entry in manifest["shards"]] == [3]


def test_a_run_goes_on_with_the_prompts_that_are_left(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 40)
    first = write(target, tmp_path / "text", asked, 60)
    before = {file: (tmp_path / "text" / file).stat().st_mtime_ns for file in first.shards}
    second = write(target, tmp_path / "text", asked, 300)
    assert second.tokens >= 300
    assert len(second.shards) == len(first.shards) + 1
    assert all((tmp_path / "text" / file).stat().st_mtime_ns == time for file, time in before.items())
    numbers = [number for shard in read_shards(tmp_path / "text") for number in shard.jobs.tolist()]
    assert len(numbers) == len(set(numbers))


def test_every_prompt_meets_every_temperature(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 4)
    write(target, tmp_path / "text", asked, 400, max_tokens=10)
    shards = list(read_shards(tmp_path / "text"))
    found: dict[bytes, list[float]] = {}
    for shard in shards:
        for n, length in enumerate(shard.prompts.tolist()):
            text = shard.tokens[shard.starts[n] : shard.starts[n] + length].tobytes()
            found.setdefault(text, []).append(float(shard.temperatures[n]))
    for temperatures in found.values():
        assert np.allclose(np.unique(temperatures), TEMPERATURES)


def test_a_temperature_that_stands_twice_has_twice_the_share(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 6)
    plan = TextPlan([str(asked)], WriterOptions(rows=6, max_tokens=10, top=4), 600)
    write_text(target, "tiny", tmp_path / "text", replace(plan, temperatures=(0.0, 0.0, 0.7)), lambda figures: None)
    found = np.concatenate([shard.temperatures for shard in read_shards(tmp_path / "text")])
    greedy = float((found == 0).mean())
    assert 0.5 < greedy < 0.85
    assert np.allclose(np.unique(found), [0.0, 0.7])
    with pytest.raises(UserError, match="temperatures is empty"):
        replace(plan, temperatures=())


def test_a_torn_shard_is_dropped_and_said(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 40)
    store = write(target, tmp_path / "text", asked, 60)
    (name,) = store.shards
    file = tmp_path / "text" / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="is not a whole shard"):
        read_shard(file)
    said: list[dict[str, float]] = []
    plan = TextPlan([str(asked)], SMALL, tokens=60)
    after = write_text(target, "tiny", tmp_path / "text", plan, said.append)
    assert said[0] == {"dropped": 1}
    assert after.tokens >= 60


def test_an_interrupted_run_keeps_what_is_finished(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 40)

    def interrupt(figures: dict[str, float]) -> None:
        if figures["tokens"] > 50:
            raise KeyboardInterrupt

    plan = TextPlan([str(asked)], SMALL, tokens=5000)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "tiny", tmp_path / "text", plan, interrupt)
    assert sum(len(shard.top_ids) for shard in read_shards(tmp_path / "text")) > 50


def test_a_full_disk_leaves_the_finished_shards(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 40)
    first = write(target, tmp_path / "text", asked, 60)

    def full(shard: Shard, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("outpace.distill.shards._save", full)
    with pytest.raises(UserError, match=r"No space left on device.*1 finished shards stay good"):
        write(target, tmp_path / "text", asked, 200)
    monkeypatch.undo()
    assert TextFolder(tmp_path / "text", {}).tokens == first.tokens
    assert not list((tmp_path / "text").glob(".*"))


def test_another_targets_text_is_refused(target: Path, tmp_path: Path) -> None:
    write(target, tmp_path, prompts_file(tmp_path / "asked.jsonl", 9), 20)
    with pytest.raises(UserError, match="holds text with target 'tiny', not 'other'"):
        TextFolder(tmp_path, {"target": "other", "top": 4})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"turns": ["Hello"]}\n{"turns": ["Hel', "line 2 is not JSON.*the file seems torn"),
        (b'{"turns": ["Hello"]}\n\n{"turns": ["Hi"]}\n', "line 2 is empty"),
        (b'{"turns": ["Hello"]}\n{"prompt": "Hi"}\n', "line 2 must be a JSON object"),
        (b'{"turns": []}\n', "line 1 must be"),
        (b'{"turns": [" "]}\n', "line 1 must be"),
        (b'["Hello"]\n', "line 1 must be"),
        (b'{"turns": ["\xff"]}\n', "line 1 is not JSON"),
        (b"[" * 100000 + b"\n", "line 1 is not JSON"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prompts.collect([str(file)])


def test_a_missing_prompt_file_and_a_hub_set_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        prompts.collect([str(tmp_path / "none.jsonl")])
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="hub:someone/some needs `pip install datasets`"):
        prompts.collect(["hub:someone/some"])


def test_the_built_in_prompts() -> None:
    texts = prompts.collect([prompts.BUILT_IN])
    assert len(texts) > 3000
    assert texts == prompts.collect([prompts.BUILT_IN])
    assert all(len(text.strip()) > 4 for text in texts)
    assert not [text for text in texts if "{" in text.replace("{1:", "").replace("{'a'", "")]
    share = sum(map(is_held_out, texts)) / len(texts)
    assert 0.01 < share < 0.03


def test_held_out_answers_are_kept_apart(target: Path, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 150)
    write(target, tmp_path / "text", asked, 1200)
    train, held_out = read_samples(tmp_path / "text", 64)
    tokenizer = Tokenizer.from_folder(target)
    apart = {text for text in prompts.collect([str(asked)]) if is_held_out(text)}
    encoded = {tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in apart}
    assert {tuple(sample.tokens[: sample.prompt].tolist()) for sample in held_out} <= encoded
    assert not {tuple(sample.tokens[: sample.prompt].tolist()) for sample in train} & encoded
    assert held_out


def test_frequent_tokens(target: Path, tmp_path: Path) -> None:
    write(target, tmp_path / "text", prompts_file(tmp_path / "asked.jsonl", 30), 200)
    train, _ = read_samples(tmp_path / "text", 64)
    ids = frequent_tokens(train, 272, 40, always=[2])
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == 40
    assert 2 in ids.tolist()
    written = np.concatenate([sample.tokens[sample.prompt :] for sample in train])
    assert np.isin(written, ids.numpy()).mean() > 0.5
