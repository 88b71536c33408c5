"""After the measurement: how likely the target finds each text, where some are lossy, and whether each is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from outpace.bench.contenders import is_lossy
from outpace.bench.method_runner import CHUNK
from outpace.bench.run import Bench
from outpace.bench.scoring import PROGRAM, is_right
from outpace.bench.store import Record
from outpace.bench.tasks import TaskPrompt
from outpace.models.base import chain

Progress = Callable[[str, int, int], None]


def judge(bench: Bench, progress: Progress, runs_tests: bool = False) -> None:
    """Whatever is not judged yet, and keeps it. Nothing is timed. `runs_tests`: programs are run."""
    prompts = {(asked.task, asked.name): asked for asked in bench.asked}
    has_lossy = any(is_lossy(contender) for contender in bench.options.methods)
    found = [record for record in bench.store.records.values() if record.batch == 1 and record.failed is None]
    found = [record for record in found if (record.task, record.prompt) in prompts]
    known: dict[tuple[Any, ...], float] = {}
    for done, record in enumerate(found):
        asked = prompts[record.task, record.prompt]
        progress(f"judging {record.task} {record.prompt}: {record.label}", done, len(found))
        judged = replace(record, correct=_correct(bench, record, asked, runs_tests))
        if has_lossy and record.surprise is None:
            key = (asked, record.tokens)
            if key not in known:
                known[key] = surprise(bench.models.target.model, bench.prompt(asked), record.tokens)
            judged = replace(judged, surprise=known[key])
        if judged != record:
            bench.store.add(judged)
    progress("done", len(found), len(found))


def _correct(bench: Bench, record: Record, asked: TaskPrompt, runs_tests: bool) -> bool | None:
    reference = asked.reference
    if record.correct is not None or reference is None or (reference.kind == PROGRAM and not runs_tests):
        return record.correct
    tokenizer = bench.models.tokenizer
    text = tokenizer.decode([token for token in record.tokens if token not in tokenizer.stop_ids])
    return is_right(reference, text, runs_tests)


def surprise(model: Any, prompt: Sequence[int], text: Sequence[int]) -> float:
    """-log p of the text behind the prompt, in nats, by the model as it is: temperature 1, no filters."""
    whole, total = [*prompt, *text], 0.0
    session = model.open(len(whole), CHUNK)
    keep: Sequence[int] = ()
    for start in range(0, len(whole) - 1, CHUNK):
        part = whole[start : min(start + CHUNK, len(whole) - 1)]
        judged = [place for place in range(len(part)) if start + place >= len(prompt) - 1]
        rows = model.score([chain(session, part, judged, keep)])
        keep = range(len(part))
        if judged:
            following = torch.tensor([whole[start + place + 1] for place in judged])
            scores = torch.log_softmax(rows.double().cpu(), dim=-1)
            total -= float(scores.gather(1, following[:, None]).sum())
    return total
