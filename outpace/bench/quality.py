"""Judges texts after the measurement: their likelihood under the target, and whether the answers are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outpace.api.scoring import PROGRAM, is_right
from outpace.bench.contenders import baseline, is_lossy
from outpace.bench.figures import TableRow
from outpace.bench.run import Bench
from outpace.bench.store import Record, RecordKey
from outpace.bench.tasks import TaskPrompt
from outpace.core.logits import host_array, log_softmax, token_scores
from outpace.models.base import read_text

Progress = Callable[[str, int, int], None]


def score_quality(bench: Bench, progress: Progress, runs_tests: bool = False) -> None:
    """Judge all stored answers that are not judged yet; with `runs_tests`, also run programs against their tests."""
    has_lossy = any(is_lossy(contender) for contender in bench.options.methods)
    found = [record for record in bench.store.records.values() if record.batch == 1 and record.failed is None]
    found = [record for record in found if (record.task, record.prompt) in bench.by_name]
    known: dict[tuple[Any, ...], float] = {}
    for done, record in enumerate(found):
        prompt = bench.by_name[record.task, record.prompt]
        progress(f"judging {record.task} {record.prompt}: {record.label}", done, len(found))
        judged = replace(record, correct=_is_correct(bench, record, prompt, runs_tests))
        if has_lossy and record.surprise is None:
            key = (prompt, record.tokens)
            if key not in known:
                known[key] = surprise(bench.models.target.model, bench.encode(prompt), record.tokens)
            judged = replace(judged, surprise=known[key])
        if judged != record:
            bench.store.add(judged)
    progress("done", len(found), len(found))


def _is_correct(bench: Bench, record: Record, prompt: TaskPrompt, runs_tests: bool) -> bool | None:
    reference = prompt.reference
    if record.correct is not None or reference is None or (reference.kind == PROGRAM and not runs_tests):
        return record.correct
    tokenizer = bench.models.tokenizer
    text = tokenizer.decode([token for token in record.tokens if token not in tokenizer.stop_ids])
    return is_right(reference, text, runs_tests)


def surprise(model: Any, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Return -log p(text | prompt) in nats, at temperature 1 and without filters."""
    whole, total = [*prompt, *text], 0.0
    for start, held in read_text(model, whole[:-1], len(prompt) - 1):
        logits = host_array(held.to_dense())
        following = whole[start + 1 : start + 1 + len(logits)]
        total -= sum(token_scores(log_softmax(logits.astype(np.float64)), following))
    return total


def score_gap(model: Any, text: Sequence[int], tokens: tuple[int, int]) -> float:
    """Return the target's logit of the first token minus that of the second, as continuations of `text`."""
    ((_, held),) = read_text(model, text, len(text) - 1)
    first, second = (float(host_array(held.to_dense())[-1, token]) for token in tokens)
    return first - second


def with_score_gaps(rows: Sequence[TableRow], bench: Bench) -> list[TableRow]:
    """Add the target's score gap to each divergence at which both texts have a token."""
    completed = []
    for row in rows:
        found = row.divergence
        if found and None not in (found.plain_token, found.token) and (found.task, found.prompt) in bench.by_name:
            plain = bench.store.records.get(RecordKey(baseline(row.label), found.task, found.prompt, 0, 1))
            before = plain.tokens[: found.position] if plain else ()
            text = [*bench.encode(bench.by_name[found.task, found.prompt]), *before]
            gap = score_gap(bench.models.target.model, text, (found.plain_token, found.token))  # type: ignore[arg-type]
            row = replace(row, divergence=replace(found, score_gap=round(gap, 5)))
        completed.append(row)
    return completed
