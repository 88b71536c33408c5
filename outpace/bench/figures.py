"""From kept answers to the rows of the report: medians and spread, what was accepted, and whether the text is equal."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outpace.bench.contenders import PLAIN
from outpace.bench.predicted import predicted
from outpace.bench.store import Key, Record
from outpace.core import stats

ALL = "all"


@dataclass(frozen=True)
class Divergence:
    """Where a text first left plain decoding's: the token's place in the answer, the two tokens (None: it ended)."""

    task: str
    prompt: str
    position: int
    plain_token: int | None
    token: int | None
    score_gap: float | None = None  # how much higher the target scores plain decoding's token (logits)


@dataclass(frozen=True)
class TableRow:
    """One row of the table: a contender on one task. Seconds; None where there is nothing to say.

    `tokens_per_second` and `speedup` are pooled: all tokens over all time, decoding only (with `batch` > 1: all answers
    of a group over the time from the call to the last one's end). `quartiles` are of the prompts' own medians.
    `reached_by_position`: the rounds behind each rate of `acceptance_by_position`; () where they are not told.
    `sources`: of each drafter its name, its tokens that were judged, and those that were written.
    `relaxed`: the share of the tokens that the exact rule would have rejected; `perplexity` by the target, `accuracy`
    of the `scored` answers: where they were judged. What theory says (`bench/predicted.py`) stands beside.
    """

    task: str
    method: str | None
    peer: str | None
    batch: int
    precision: str
    tokens_per_second: float | None
    quartiles: tuple[float, float, float] | None
    speedup: float | None
    speedup_quartiles: tuple[float, float, float] | None
    worst_speedup: float | None
    mean_accepted_length: float | None
    draft_acceptance: float | None
    hit_rate: float | None
    acceptance_by_position: tuple[float, ...]
    reached_by_position: tuple[int, ...]
    time_to_first_token: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None
    equal_text: bool | None
    compared: int
    different: int
    divergence: Divergence | None
    prompts: int
    tokens: int
    drafted: int | None
    accepted: int | None
    failed: int
    reason: str | None
    sources: tuple[tuple[str, int, int], ...] = ()
    predicted_length: float | None = None
    constant_length: float | None = None
    predicted_speedup: float | None = None
    relaxed: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    scored: int = 0

    @property
    def label(self) -> str:
        return self.method or self.peer or ""

    @property
    def is_peer(self) -> bool:
        return self.peer is not None


def quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """First quartile, median, third quartile; None of nothing."""
    if not values:
        return None
    first, middle, third = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return first, middle, third


def table_rows(records: Iterable[Record], order: Sequence[str] = ()) -> list[TableRow]:
    """A row for each task, batch and contender, the tasks in the order met, and all of them together last.

    `order`: the contenders as they were asked for; plain decoding always comes first.
    """
    latest = {record.key: record for record in records}
    place = {label: number for number, label in enumerate([PLAIN, *order])}
    groups: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    tasks = {task: number for number, task in enumerate(dict.fromkeys(r.task for r in latest.values()))} | {ALL: 9**9}
    for record in latest.values():
        groups[record.batch, record.task, record.label].append(record)
        if record.task != ALL:
            groups[record.batch, ALL, record.label].append(record)
    several = len(tasks) > 2
    chosen = [group for group in groups if several or group[0] > 1 or group[1] != ALL]
    chosen.sort(key=lambda group: (group[0], tasks[group[1]], place.get(group[2], len(place))))
    return [_row(task, groups[batch, task, label], latest) for batch, task, label in chosen]


def _row(task: str, records: Sequence[Record], latest: dict[Key, Record]) -> TableRow:
    done = [record for record in records if record.failed is None]
    first = records[0]
    against = [(base, record) for record in done if (base := latest.get(record.key._replace(label=PLAIN)))]
    against = [(base, record) for base, record in against if base.failed is None]
    speeds = _speedups(against)
    texts = _texts(done, latest)
    different = [found for found in texts if found is not None]
    failures = [record.failed for record in records if record.failed is not None]
    return TableRow(
        task=task,
        method=None if first.is_peer else first.label,
        peer=first.label if first.is_peer else None,
        batch=first.batch,
        precision=first.precision,
        tokens_per_second=_pooled(done),
        quartiles=quartiles(list(_by_prompt([(record, speed(record)) for record in done]).values())),
        speedup=_ratio(_pooled([record for _, record in against]), _pooled([base for base, _ in against])),
        speedup_quartiles=quartiles(speeds),
        worst_speedup=min(speeds, default=None),
        **_drafting(done),
        **_waiting(done),
        equal_text=None if not texts else not different,
        compared=len(texts),
        different=len(different),
        divergence=different[0] if different else None,
        prompts=len({(record.task, record.prompt) for record in done}),
        tokens=sum(len(text) for record in done for text in (record.texts or (record.tokens,))),
        failed=len(failures),
        reason=failures[0] if failures else None,
        **predicted(done, against),
        **_judged(done),
    )


def speed(record: Record) -> float | None:
    """Tokens a second of one answer, decoding only; of a batch all its tokens over all its time. None of one round."""
    if record.batch > 1:
        return sum(map(len, record.texts)) / record.seconds if record.seconds > 0 else None
    return record.decoded / record.decode_seconds if record.decode_seconds > 0 and record.decoded else None


def _pooled(records: Sequence[Record]) -> float | None:
    timed = [record for record in records if speed(record) is not None]
    if not timed:
        return None
    if timed[0].batch > 1:
        return sum(len(text) for r in timed for text in r.texts) / sum(record.seconds for record in timed)
    return sum(record.decoded for record in timed) / sum(record.decode_seconds for record in timed)


def _by_prompt(values: Iterable[tuple[Record, float | None]]) -> dict[tuple[str, str], float]:
    """Each prompt's median over its rounds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record, value in values:
        if value is not None:
            found[record.task, record.prompt].append(value)
    return {prompt: median(each) for prompt, each in found.items()}


def _speedups(against: Sequence[tuple[Record, Record]]) -> list[float]:
    """Each prompt's speedup: the ratio of its median speeds."""
    plain = _by_prompt((base, speed(base)) for base, _ in against)
    ours = _by_prompt((record, speed(record)) for _, record in against)
    return [ours[prompt] / plain[prompt] for prompt in ours if prompt in plain]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _drafting(done: Sequence[Record]) -> dict[str, Any]:
    """What was drafted and accepted; None where an engine does not tell or drafts nothing."""
    alone = [record for record in done if record.counts]
    rounds, emitted = sum(len(r.counts) for r in alone), sum(sum(r.counts) for r in alone)
    drafted, accepted = ([getattr(r, name) for r in alone] for name in ("drafted", "accepted"))
    told = bool(drafted) and None not in drafted
    hits, asked = sum(r.hits for r in alone), sum(r.hits + r.misses for r in alone)
    rates = [record.hit_rate for record in alone if record.hit_rate is not None]
    mean = sum(rates) / len(rates) if rates else None
    return {
        "mean_accepted_length": emitted / rounds if rounds else None,
        "drafted": sum(drafted) if told else None,
        "accepted": sum(accepted) if told and None not in accepted else None,
        "draft_acceptance": sum(accepted) / sum(drafted) if told and sum(drafted) and None not in accepted else None,
        "hit_rate": hits / asked if asked else mean,
        "sources": _by_source(alone),
        **_by_position(alone),
    }


def _judged(done: Sequence[Record]) -> dict[str, Any]:
    """What the texts are worth; None where that was not judged."""
    told = [record for record in done if record.relaxed is not None]
    tokens = sum(len(record.tokens) for record in told)
    known = [record for record in done if record.surprise is not None and record.tokens]
    nats = sum(record.surprise or 0.0 for record in known)
    scored = [record.correct for record in done if record.correct is not None]
    return {
        "relaxed": sum(record.relaxed or 0 for record in told) / tokens if tokens else None,
        "perplexity": math.exp(nats / sum(len(record.tokens) for record in known)) if known else None,
        "accuracy": sum(scored) / len(scored) if scored else None,
        "scored": len(scored),
    }


def _by_position(done: Sequence[Record]) -> dict[str, tuple[Any, ...]]:
    """That the i-th drafted token is accepted once those before it were: by counts where they are told, else a mean."""
    if any(record.positions for record in done):
        all_of_them = stats.merge_positions(record.positions for record in done)
        rates, rounds = stats.rates(all_of_them), tuple(reached for reached, _ in all_of_them)
    else:
        told = [[r for r in c if r is not None] for c in itertools.zip_longest(*(r.by_position for r in done))]
        rates, rounds = tuple(sum(column) / len(column) for column in told), ()
    return {"acceptance_by_position": rates, "reached_by_position": rounds}


def _by_source(done: Sequence[Record]) -> tuple[tuple[str, int, int], ...]:
    found: dict[str, tuple[int, int]] = {}
    for name, judged, written in (source for record in done for source in record.sources):
        before = found.get(name, (0, 0))
        found[name] = before[0] + judged, before[1] + written
    return tuple((name, *counts) for name, counts in sorted(found.items()))


def _waiting(done: Sequence[Record]) -> dict[str, Any]:
    """Time to the first token (median), and between two rounds' arrivals."""
    alone = [record for record in done if record.arrivals]
    gaps = [later - one for record in alone for one, later in itertools.pairwise(record.arrivals)]
    return {
        "time_to_first_token": median(record.first_token for record in alone) if alone else None,
        "inter_token_p50": float(np.quantile(gaps, 0.5)) if gaps else None,
        "inter_token_p99": float(np.quantile(gaps, 0.99)) if gaps else None,
    }


def _texts(done: Sequence[Record], latest: dict[Key, Record]) -> list[Divergence | None]:
    """Each answer held against plain decoding alone, where that is there in the same precision; None: equal."""
    found: list[Divergence | None] = []
    for record in done:
        pairs = (
            zip(record.prompts, record.texts, strict=True)
            if record.batch > 1
            else [((record.task, record.prompt), record.tokens)]
        )
        for (task, prompt), text in pairs:
            base = latest.get(Key(PLAIN, task, prompt, record.round, 1))
            if base and base.failed is None and base.precision == record.precision:
                found.append(diverge(task, prompt, base.tokens, text))
    return found


def diverge(task: str, prompt: str, plain: Sequence[int], text: Sequence[int]) -> Divergence | None:
    """The first place where a text differs from plain decoding's; None where they are equal."""
    for position, (one, other) in enumerate(itertools.zip_longest(plain, text)):
        if one != other:
            return Divergence(task, prompt, position, one, other)
    return None
