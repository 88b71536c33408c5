"""Traces: recorded rows equal a slow computation, a file returns what was saved, a torn one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doubles import QuickToy, make_request, write
from safetensors.numpy import load_file, save_file

from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.types import Row
from outpace.models.load import Loaded
from outpace.simulate.trace import FORMAT, RecordOptions, Trace, load, record

TARGET, DRAFT = QuickToy(16, 3, 5), QuickToy(16, 3, 5, 0.6)
LONG = [number * 7 % 16 for number in range(300)]  # more than a forward of the draft takes
PROMPTS = [[1, 2, 3], LONG, [4]]


def loaded(model: Any, name: str) -> Loaded:
    return Loaded(model, SimpleNamespace(stop_ids=frozenset()), name)


def recorded(sampling: Sampling = GREEDY) -> Trace:
    options = RecordOptions(max_tokens=20, ranks=5, sampling=sampling, seed=7)
    tasks = ["a", "b", "a"]
    return record(loaded(TARGET, "/somewhere/target"), loaded(DRAFT, "a/draft"), PROMPTS, options, tasks=tasks)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded()


@pytest.mark.parametrize(("rule", "sampling"), [("greedy", GREEDY), ("gumbel", Sampling(0.8))])
def test_tokens_are_the_targets_and_rows_the_drafts(rule: str, sampling: Sampling) -> None:
    """Rows of sampled texts include the noise that target and draft share."""
    trace = recorded(sampling)
    assert (trace.target, trace.draft, trace.vocab_size, trace.ranks) == ("target", "a/draft", 16, 5)
    for prompt, answer in zip(PROMPTS, trace.answers, strict=True):
        request = make_request(prompt, max_tokens=20, rule=rule, sampling=sampling, seed=7)
        assert list(answer.tokens) == write(TARGET, request)
        text = [*prompt, *answer.tokens]
        for place in range(20):
            before = text[: len(prompt) + place]
            ranks = request.rule.rank(DRAFT._row(before)[None].float(), [Row(request, before)])[0]
            best = torch.topk(ranks, 5)
            assert answer.draft_tokens[place].tolist() == best.indices.tolist()
            np.testing.assert_allclose(answer.draft_logprobs[place], best.values, atol=1e-5)
            log_p = torch.log_softmax(TARGET._row(before), -1)[answer.tokens[place]]
            assert answer.target_logprobs[place] == pytest.approx(float(log_p), abs=1e-5)


def test_filters_are_refused() -> None:
    with pytest.raises(UserError, match="without top-k, top-p and min-p"):
        RecordOptions(sampling=Sampling(0.8, top_k=3))


def test_a_file_returns_what_was_saved(trace: Trace, tmp_path: Path) -> None:
    trace = replace(trace, temperature=0.8)
    trace.save(tmp_path / "a.trace")
    again = load(tmp_path / "a.trace")
    assert replace(again, answers=()) == replace(trace, answers=())
    for mine, other in zip(trace.answers, again.answers, strict=True):
        assert (mine.prompt, mine.tokens, mine.task) == (other.prompt, other.tokens, other.task)
        for name in ("target_logprobs", "draft_tokens", "draft_logprobs"):
            assert np.array_equal(getattr(mine, name), getattr(other, name))
    assert [file.name for file in tmp_path.iterdir()] == ["a.trace"]
    with pytest.raises(UserError, match="cannot be written"):
        trace.save(tmp_path / "a.trace" / "b.trace")
    with pytest.raises(UserError, match="there is no file"):
        load(tmp_path / "b.trace")


def test_a_draft_with_few_tokens_or_a_short_context(tmp_path: Path) -> None:
    options = RecordOptions(max_tokens=8, ranks=32)
    found = record(loaded(TARGET, "t"), loaded(QuickToy(12, 3, 5), "d"), [[15, 14]], options)
    assert found.ranks == 12
    short = QuickToy(16, 3, 5)
    short.max_positions = 9
    with pytest.raises(UserError, match="does not fit the draft's context of 9"):
        record(loaded(TARGET, "t"), loaded(short, "d"), [[1, 2]], options)
    with pytest.raises(UserError, match="no prompts"):
        record(loaded(TARGET, "t"), loaded(DRAFT, "d"), [], options)


def rewritten(trace: Trace, file: Path, about: dict[str, str] | None = None, **arrays: Any) -> Path:
    """Write the trace's file with some tensors (None: left out) and some of the manifest replaced."""
    trace.save(file)
    tensors: dict[str, Any] = {**load_file(file), **arrays}
    manifest = {"format": FORMAT, "version": "1", "target": "t", "draft": "d", "ranks": "5", "vocab_size": "16"}
    manifest |= {"tasks": '["a", "b", "a"]'} | (about or {})
    save_file({name: array for name, array in tensors.items() if array is not None}, file, metadata=manifest)
    return file


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": np.zeros(60, np.int64)}, "tokens is missing or of another type"),
        ({"tokens": np.full(60, 16, np.int32)}, "beyond the vocabulary of 16"),
        ({"starts": np.array([0, 20, 40, 61])}, "starts does not cut the 60 tokens"),
        ({"starts": np.array([0, 60])}, "more answers than prompts"),
        ({"starts": np.zeros(0, np.int64)}, "starts does not cut"),
        ({"draft_tokens": np.zeros((59, 5), np.int32)}, "are not those of 60 tokens"),
        ({"draft_logprobs": np.full((60, 5), np.nan, np.float32)}, "fall from rank to rank"),
        ({"draft_logprobs": np.tile(np.arange(5, dtype=np.float32), (60, 1))}, "fall from rank to rank"),
        ({"about": {"tasks": '["a"]'}}, "does not name the tasks of 3 answers"),
        ({"about": {"tasks": "["}}, "its manifest"),
        ({"about": {"vocab_size": "many"}}, "its manifest"),
        ({"about": {"version": "2"}}, "of version 2"),
        ({"about": {"format": "pictures"}}, "is not a trace"),
    ],
)
def test_a_damaged_file_is_refused(trace: Trace, tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    assert load(rewritten(trace, tmp_path / "a.trace")).tokens == 60
    with pytest.raises(UserError, match=said):
        load(rewritten(trace, tmp_path / "a.trace", **arrays))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_torn_file(trace: Trace, tmp_path: Path, share: float) -> None:
    file = tmp_path / "a.trace"
    trace.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="cannot be read as a trace"):
        load(file)
