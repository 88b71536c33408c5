"""`outpace distill`, stage text: what the target is asked, what it writes, and what is kept of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distill_files import prompts_file, settings
from distill_files import target as target

from outpace.core.errors import UserError
from outpace.distill import prompts
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.options import TEMPERATURES
from outpace.distill.prompts import is_held_out
from outpace.distill.shards import TextFolder, read_shard, read_shards
from outpace.distill.text import write_text
from outpace.distill.writer import WriterOptions
from outpace.models.text.tokenizer import Tokenizer


@pytest.fixture
def write(target: Path, tmp_path: Path) -> Callable[..., TextFolder]:
    """Write until there are `tokens`, from a file of `count` prompts, to the folder `text`."""

    def run(
        count: int, tokens: int, progress: Callable[[dict[str, float]], None] = lambda figures: None, **changes: Any
    ) -> TextFolder:
        asked = [str(prompts_file(tmp_path / f"{count}.jsonl", count))]
        writer = WriterOptions(rows=6, max_tokens=10, top=4)
        return write_text(
            target, settings(target, tmp_path, prompts=asked, tokens=tokens, writer=writer, **changes), None, progress
        )

    return run


def test_a_run_continues_with_the_remaining_prompts(write: Callable[..., TextFolder]) -> None:
    first = write(40, 60)
    before = {file: (first.folder / file).stat().st_mtime_ns for file in first.shards}
    second = write(40, 300)
    assert second.tokens >= 300
    assert len(second.shards) == len(first.shards) + 1
    assert all((first.folder / file).stat().st_mtime_ns == time for file, time in before.items())
    numbers = [number for shard in read_shards(first.folder) for number in shard.jobs.tolist()]
    assert len(numbers) == len(set(numbers))


def test_every_prompt_is_answered_at_every_temperature(write: Callable[..., TextFolder]) -> None:
    found: dict[bytes, list[float]] = {}
    for shard in read_shards(write(4, 400).folder):
        for n, length in enumerate(shard.prompts.tolist()):
            text = shard.tokens[shard.starts[n] : shard.starts[n] + length].tobytes()
            found.setdefault(text, []).append(float(shard.temperatures[n]))
    for temperatures in found.values():
        assert np.allclose(np.unique(temperatures), TEMPERATURES)


def test_a_torn_shard_is_dropped_and_reported(write: Callable[..., TextFolder]) -> None:
    store = write(40, 60)
    (name,) = store.shards
    file = store.folder / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="is not a whole shard"):
        read_shard(file)
    reports: list[dict[str, float]] = []
    assert write(40, 60, reports.append).tokens >= 60
    assert reports[0] == {"dropped": 1}


def test_an_interrupted_run_keeps_finished_answers(write: Callable[..., TextFolder], tmp_path: Path) -> None:
    def interrupt(figures: dict[str, float]) -> None:
        if figures["tokens"] > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(40, 5000, interrupt)
    assert sum(len(shard.top_ids) for shard in read_shards(tmp_path / "text")) > 50


def test_a_full_disk_leaves_the_finished_shards(
    write: Callable[..., TextFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(40, 60)

    def full(tensors: dict[str, np.ndarray], file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*1 finished shards stay good"):
        write(40, 200)
    monkeypatch.undo()
    assert TextFolder(first.folder, {}).tokens == first.tokens
    assert not list(first.folder.glob(".*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"turns": ["Hello"]}\n{"turns": ["Hel', "line 2 is not JSON.*the file seems torn"),
        (b'{"turns": ["Hello"]}\n{"prompt": "Hi"}\n', "line 2 must be a JSON object"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prompts.collect([str(file)])


def test_a_hub_data_set_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_held_out_answers_are_not_trained_on(write: Callable[..., TextFolder], target: Path, tmp_path: Path) -> None:
    train, held_out = read_samples(write(150, 1200).folder, 64)
    tokenizer = Tokenizer.from_folder(target)
    texts = {text for text in prompts.collect([str(tmp_path / "150.jsonl")]) if is_held_out(text)}
    encoded = {tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in texts}
    assert {tuple(sample.tokens[: sample.prompt].tolist()) for sample in held_out} <= encoded
    assert not {tuple(sample.tokens[: sample.prompt].tolist()) for sample in train} & encoded
    assert held_out
    ids = frequent_tokens(train, 272, 60, always=[2])
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == 60
    assert 2 in ids.tolist()
    written = np.concatenate([sample.tokens[sample.prompt :] for sample in train])
    assert np.isin(written, ids.numpy()).mean() > 0.5
