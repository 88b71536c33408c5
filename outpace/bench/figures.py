"""Turns recorded answers into table rows: speeds, acceptance, and equality of the texts."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outpace.bench.contenders import PLAIN, baseline
from outpace.bench.method_runner import PeakMemory
from outpace.bench.store import Record, RecordKey
from outpace.core import stats

ALL = "all"


@dataclass(frozen=True)
class Divergence:
    """The first token at which a text differs from plain decoding's (a token is None where its text had ended)."""

    task: str
    prompt: str
    position: int
    plain_token: int | None
    token: int | None
    score_gap: float | None = None  # the target's logit of plain_token minus that of token


@dataclass(frozen=True)
class TableRow:
    """One row of the table: a method or peer on one task. Times are in seconds; None means unknown or not applicable.

    `tokens_per_second` and `speedup` are pooled: all tokens divided by the total decoding time (with `batch` > 1: by
    the time from the call to the end of the last answer). `quartiles` are taken over the prompts' medians.
    `reached_by_position` counts the rounds behind each rate of `acceptance_by_position`. `sources` lists (drafter,
    verified tokens, emitted tokens). `relaxed` is the share of tokens that the exact rule would have rejected;
    `accuracy` is taken over the `scored` answers.
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
    relaxed: float | None = None
    experts_per_pass: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    scored: int = 0
    peak_memory: PeakMemory | None = None

    @property
    def label(self) -> str:
        return self.method or self.peer or ""

    @property
    def is_peer(self) -> bool:
        return self.peer is not None


def quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the first quartile, the median and the third quartile; None without values."""
    return tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist()) if values else None


def table_rows(records: Iterable[Record], order: Sequence[str] = ()) -> list[TableRow]:
    """Build a row for each task, batch size and contender; the rows over all tasks come last.

    `order` is the contenders' order in the table; plain decoding always comes first.
    """
    latest = {record.key: record for record in records}
    tasks = [*dict.fromkeys(record.task for record in latest.values() if record.task != ALL), ALL]
    labels = dict.fromkeys([PLAIN, *order, *(record.label for record in latest.values())])
    rows = []
    for batch in sorted({record.batch for record in latest.values()}):
        measured = [record for record in latest.values() if record.batch == batch]
        for task, label in itertools.product(tasks, labels):
            own = [record for record in measured if record.label == label and task in (record.task, ALL)]
            if own and (task != ALL or len(tasks) != 2 or batch > 1):
                rows.append(_row(task, own, latest))
    return rows


def _row(task: str, records: Sequence[Record], latest: dict[RecordKey, Record]) -> TableRow:
    done = [record for record in records if record.failed is None]
    first = records[0]
    pairs = [
        (base, record) for record in done if (base := latest.get(record.key._replace(label=baseline(record.label))))
    ]
    pairs = [(base, record) for base, record in pairs if base.failed is None]
    base_speed, own_speed = (_pooled_speed([pair[side] for pair in pairs]) for side in (0, 1))
    plain, own = (_prompt_medians(pair[side] for pair in pairs) for side in (0, 1))
    speedups = [own[prompt] / plain[prompt] for prompt in own if prompt in plain]
    texts = _compare_texts(done, latest)
    different = [divergence for divergence in texts if divergence is not None]
    failures = [record.failed for record in records if record.failed is not None]
    positions = stats.merge_positions(record.positions for record in done)
    return TableRow(
        task=task,
        method=None if first.is_peer else first.label,
        peer=first.label if first.is_peer else None,
        batch=first.batch,
        precision=first.precision,
        tokens_per_second=_pooled_speed(done),
        quartiles=quartiles(list(_prompt_medians(done).values())),
        speedup=own_speed / base_speed if own_speed is not None and base_speed else None,
        speedup_quartiles=quartiles(speedups),
        worst_speedup=min(speedups, default=None),
        acceptance_by_position=stats.rates(positions),
        reached_by_position=tuple(reached for reached, _ in positions),
        equal_text=None if not texts else not different,
        compared=len(texts),
        different=len(different),
        divergence=different[0] if different else None,
        prompts=len({(record.task, record.prompt) for record in done}),
        tokens=sum(len(text) for record in done for _, text in record.written),
        failed=len(failures),
        reason=failures[0] if failures else None,
        **_drafting(done),
        **_latencies(done),
        **_quality(done),
    )


def _pooled_speed(records: Sequence[Record]) -> float | None:
    timed = [record for record in records if record.speed is not None]
    return sum(r.decoded for r in timed) / sum(r.decode_seconds for r in timed) if timed else None


def _prompt_medians(records: Iterable[Record]) -> dict[tuple[str, str], float]:
    """Return each prompt's median speed over its repetitions."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        if record.speed is not None:
            found[record.task, record.prompt].append(record.speed)
    return {prompt: median(speeds) for prompt, speeds in found.items()}


def _drafting(done: Sequence[Record]) -> dict[str, Any]:
    """Count drafted and accepted tokens; None where an engine does not report them or drafts nothing."""
    single = [record for record in done if record.counts]
    rounds, emitted = sum(len(r.counts) for r in single), sum(sum(r.counts) for r in single)
    is_reported = bool(single) and all(record.drafted is not None for record in single)
    drafted, accepted = (sum(getattr(record, name) or 0 for record in single) for name in ("drafted", "accepted"))
    hits, queries = sum(r.hits for r in single), sum(r.hits + r.misses for r in single)
    verified, written = Counter[str](), Counter[str]()
    for name, num_verified, num_written in (source for record in single for source in record.sources):
        verified[name] += num_verified
        written[name] += num_written
    return {
        "mean_accepted_length": emitted / rounds if rounds else None,
        "drafted": drafted if is_reported else None,
        "accepted": accepted if is_reported else None,
        "draft_acceptance": accepted / drafted if is_reported and drafted else None,
        "hit_rate": hits / queries if queries else None,
        "experts_per_pass": sum((r.experts or 0.0) * len(r.counts) for r in single) / rounds or None
        if rounds
        else None,
        "sources": tuple((name, verified[name], written[name]) for name in sorted(verified)),
    }


def _quality(done: Sequence[Record]) -> dict[str, Any]:
    """Summarise the judged quality of the texts; None where it was not judged."""
    lossy = [record for record in done if record.relaxed is not None]
    tokens = sum(len(record.tokens) for record in lossy)
    judged = [record for record in done if record.surprise is not None and record.tokens]
    nats = sum(record.surprise or 0.0 for record in judged)
    scored = [record.correct for record in done if record.correct is not None]
    return {
        "relaxed": sum(record.relaxed or 0 for record in lossy) / tokens if tokens else None,
        "perplexity": math.exp(nats / sum(len(record.tokens) for record in judged)) if judged else None,
        "accuracy": sum(scored) / len(scored) if scored else None,
        "scored": len(scored),
    }


def _latencies(done: Sequence[Record]) -> dict[str, Any]:
    """Return the median time to the first token, and quantiles of the time between two rounds' arrivals."""
    single = [record for record in done if record.arrivals]
    gaps = [later - one for record in single for one, later in itertools.pairwise(record.arrivals)]
    return {
        "time_to_first_token": median(record.first_token for record in single) if single else None,
        "inter_token_p50": float(np.quantile(gaps, 0.5)) if gaps else None,
        "inter_token_p99": float(np.quantile(gaps, 0.99)) if gaps else None,
    }


def _compare_texts(done: Sequence[Record], latest: dict[RecordKey, Record]) -> list[Divergence | None]:
    """Compare each answer with plain decoding's unbatched one of the same precision; None: the texts are equal."""
    found: list[Divergence | None] = []
    for record in done:
        for (task, prompt), text in record.written:
            base = latest.get(RecordKey(baseline(record.label), task, prompt, record.round, 1))
            if base and base.failed is None and base.precision == record.precision:
                found.append(first_divergence(task, prompt, base.tokens, text))
    return found


def first_divergence(task: str, prompt: str, plain: Sequence[int], text: Sequence[int]) -> Divergence | None:
    """Return the first difference between a text and plain decoding's; None where they are equal."""
    for position, (one, other) in enumerate(itertools.zip_longest(plain, text)):
        if one != other:
            return Divergence(task, prompt, position, one, other)
    return None
