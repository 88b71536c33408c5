"""Stage 3: what a draft is worth to its target on prompts that it never saw, by real decoding and by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outpace.assemble import Loaded
from outpace.core.errors import check_whole
from outpace.core.stats import Figures
from outpace.library import LLM
from outpace.models.base import chain

POSITIONS = 8  # the chain by which acceptance by position is measured
CHAIN, TREE, TREE_WIDTH = 4, 16, 4
TEMPERATURES = (0.0, 0.8)
TIMED = 9  # passes, of which the median counts
CONTEXT = 200  # tokens that stand before a timed pass

Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class JudgeOptions:
    """`prompts` of each task are answered, with at most `max_tokens` each."""

    prompts: int = 20
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("prompts", self.prompts, 1)
        check_whole("max_tokens", self.max_tokens, 2)


@dataclass(frozen=True)
class Row:
    """One task at one temperature. Lengths are emitted tokens a target pass."""

    task: str
    temperature: float
    chain: float
    tree: float
    by_position: tuple[float, ...]  # that the i-th token of a chain is accepted, once those before it were
    tokens: int


@dataclass(frozen=True)
class Speed:
    """Seconds on this machine. `passes`: of the target, by rows; the draft's one step has one row."""

    draft_step: float
    passes: Mapping[int, float]

    @property
    def cost(self) -> float:
        """Draft step over target pass: c."""
        return self.draft_step / self.passes[1]


@dataclass(frozen=True)
class Judgement:
    """All figures of one draft."""

    target: str
    draft: str
    rows: tuple[Row, ...]
    speed: Speed
    predicted: Mapping[int, float] = field(default_factory=dict)  # speedup at temperature 0, by draft length

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "cost": self.speed.cost}


def judge(
    target: Loaded, draft: Loaded, tasks: Mapping[str, Sequence[str]], options: JudgeOptions, report: Report
) -> Judgement:
    """Decodes every task's prompts (texts; chat messages where the target has a template) and times both models."""
    rows: list[Row] = []
    total = len(tasks) * len(TEMPERATURES)
    for task, prompts in tasks.items():
        for temperature in TEMPERATURES:
            rows.append(_row(target, draft, task, prompts[: options.prompts], temperature, options))
            report({"judged": len(rows) / total, "chain": rows[-1].chain, "tree": rows[-1].tree})
    speed = Speed(_seconds(draft.model, 1), {count: _seconds(target.model, count) for count in range(1, POSITIONS + 2)})
    return Judgement(target.name, draft.name, tuple(rows), speed, predicted_speedups(rows, speed))


def predicted_speedups(rows: Sequence[Row], speed: Speed) -> dict[int, float]:
    """E / (gamma c + v) for every draft length gamma, from greedy acceptance by position: 1 + sum of its products, and
    v = t_p(gamma + 1) / t_p(1)."""
    greedy = [row for row in rows if row.temperature == 0]
    if not greedy:
        return {}
    predicted, expected, reach = {}, 1.0, 1.0
    for length in range(1, POSITIONS + 1):
        rates = [row.by_position[length - 1] for row in greedy if len(row.by_position) >= length]
        reach *= statistics.fmean(rates) if rates else 0.0
        expected += reach
        predicted[length] = expected / (length * speed.cost + speed.passes[length + 1] / speed.passes[1])
    return predicted


def _row(
    target: Loaded, draft: Loaded, task: str, prompts: Sequence[str], temperature: float, options: JudgeOptions
) -> Row:
    def decode(nodes: int, width: int) -> Figures:
        return _decode(target, draft, prompts, nodes, width, temperature=temperature, options=options)

    long, chained = decode(POSITIONS + 1, 1), decode(CHAIN + 1, 1)
    tree = decode(TREE + 1, TREE_WIDTH)
    return Row(
        task,
        temperature,
        round(chained.mean_accepted_length, 3),
        round(tree.mean_accepted_length, 3),
        tuple(round(rate, 4) for rate in _conditional(long.acceptance_by_position)),
        long.emitted,
    )


def _conditional(reached: Sequence[float]) -> list[float]:
    """From the chance that at least i tokens are accepted to the chance of the i-th, given those before it."""
    before = [1.0, *reached]
    return [rate / last if last else 0.0 for last, rate in zip(before, reached, strict=False)]


def _decode(
    target: Loaded,
    draft: Loaded,
    prompts: Sequence[str],
    nodes: int,
    width: int,
    *,
    temperature: float,
    options: JudgeOptions,
) -> Figures:
    """All answers' rounds together. The last round of an answer offers what does not fit any more: it counts too."""
    with LLM(target, draft, method="speculative", drafter="model", nodes=nodes, batch=4, width=width, floor=0.0) as llm:
        asked = [_prompt(target, text) for text in prompts]
        results = llm.generate(asked, max_tokens=options.max_tokens, temperature=temperature, seed=options.seed)
    return _together([result.figures for result in results])


def _together(parts: Sequence[Figures]) -> Figures:
    """Sums of several answers' figures; rates by position are weighted by passes."""
    passes = sum(part.passes for part in parts)
    longest = max((len(part.acceptance_by_position) for part in parts), default=0)
    rates = []
    for place in range(longest):
        having = [part for part in parts if len(part.acceptance_by_position) > place]
        weight = sum(part.passes for part in having)
        rates.append(sum(part.acceptance_by_position[place] * part.passes for part in having) / weight)
    first = parts[0]
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("emitted", "drafted", "accepted", "draft_seconds", "target_seconds")
    }
    return Figures(
        **(vars(first) | sums | {"passes": passes, "acceptance_by_position": tuple(rates)}),
    )


def _prompt(target: Loaded, text: str) -> Any:
    """A chat message where the target has a template; else the text itself."""
    from outpace.distill.text import has_template

    return [{"role": "user", "content": text}] if has_template(target.tokenizer) else text


def _seconds(model: Any, rows: int) -> float:
    """The median time of one pass over so many rows behind CONTEXT tokens."""
    session = model.open(min(CONTEXT, model.max_positions // 2) + 1, max(rows, CONTEXT) + 1)
    prefix = [1] * min(CONTEXT, model.max_positions // 2)
    model.score([chain(session, prefix)])
    keep = list(range(len(prefix)))
    times = []
    for _ in range(TIMED):
        started = time.perf_counter()
        model.score([chain(session, [1] * rows, range(rows), keep)])
        times.append(time.perf_counter() - started)
        keep = []
    return statistics.median(times)
