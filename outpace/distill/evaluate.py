"""Stage judge: what a draft is worth to its target on prompts that it never saw, by real decoding and by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from outpace.api.llm import LLM
from outpace.core.errors import check_whole
from outpace.core.stats import Positions, RunStats, merge_stats, rates
from outpace.distill.progress import Progress
from outpace.models.base import chain
from outpace.models.load import Loaded
from outpace.models.options import FILE

POSITIONS = 8  # the chain by which acceptance by position is measured
CHAIN, TREE, TREE_WIDTH, TREE_DEPTH = 4, 16, 4, 6
TEMPERATURES = (0.0, 0.8)
TIMED = 9  # passes, of which the median counts
REACHED = 10  # rounds that must come to a position for its acceptance to be told
UNEVEN = 1.5  # a median so many times the minimum was disturbed
CONTEXT = 200  # tokens that stand before a timed pass


@dataclass(frozen=True)
class EvaluationOptions:
    """`prompts` of each task are answered, with at most `max_tokens` each."""

    prompts: int = 20
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("prompts", self.prompts, 1)
        check_whole("max_tokens", self.max_tokens, 2)
        check_whole("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class Acceptance:
    """One task at one temperature. Lengths are emitted tokens a target pass."""

    task: str
    temperature: float
    chain: float
    tree: float
    by_position: tuple[float, ...]  # that the i-th token of a chain is accepted, once those before it were
    tokens: int
    prompts: int = 0


@dataclass(frozen=True)
class Speed:
    """Seconds on this machine. `passes`: of the target, by rows; the draft's one step has one row."""

    draft_step: float
    passes: Mapping[int, float]
    is_disturbed: bool = False  # by other work on this machine, so that nothing follows from these times

    @property
    def cost(self) -> float:
        """Draft step over target pass: c."""
        return self.draft_step / self.passes[1]


@dataclass(frozen=True)
class Judgement:
    """All figures of one draft."""

    target: str
    draft: str
    rows: tuple[Acceptance, ...]
    speed: Speed
    predicted: Mapping[int, float] = field(default_factory=dict)  # speedup at temperature 0, by draft length
    where: str = ""  # runtime and threads

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "cost": self.speed.cost}


def judge(
    target: Loaded, draft: Loaded, tasks: Mapping[str, Sequence[str]], options: EvaluationOptions, progress: Progress
) -> Judgement:
    """Decodes every task's prompts (texts; chat messages where the target has a template) and times both models."""
    rows: list[Acceptance] = []
    total = len(tasks) * len(TEMPERATURES)
    for task, prompts in tasks.items():
        for temperature in TEMPERATURES:
            rows.append(_row(target, draft, task, prompts[: options.prompts], temperature, options))
            progress({"judged": len(rows) / total, "chain": rows[-1].chain, "tree": rows[-1].tree})
    speed = _speed(target.model, draft.model)
    kernels = "native kernels" if target.model.instruction_set else "torch"
    held = [
        "the file's own weights" if one.precision == FILE else f"weights in {one.precision}" for one in (target, draft)
    ]
    where = f"{kernels}, target: {held[0]}, draft: {held[1]}, threads {torch.get_num_threads()}"
    return Judgement(target.name, draft.name, tuple(rows), speed, predicted_speedups(rows, speed), where)


def predicted_speedups(rows: Sequence[Acceptance], speed: Speed) -> dict[int, float]:
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
    target: Loaded, draft: Loaded, task: str, prompts: Sequence[str], temperature: float, options: EvaluationOptions
) -> Acceptance:
    def decode(nodes: int, width: int, depth: int) -> RunStats:
        shape = {"nodes": nodes + 1, "width": width, "draft_length": depth}
        return _decode(target, draft, prompts, shape, temperature=temperature, options=options)

    long, chained = (decode(length, 1, length) for length in (POSITIONS, CHAIN))
    tree = decode(TREE, TREE_WIDTH, TREE_DEPTH)
    return Acceptance(
        task,
        temperature,
        round(chained.mean_accepted_length, 3),
        round(tree.mean_accepted_length, 3),
        _told(long.positions),
        long.emitted,
        len(prompts),
    )


def _told(positions: Positions) -> tuple[float, ...]:
    """The chance that the i-th token is accepted, given those before it; as far as REACHED rounds came."""
    return tuple(round(rate, 4) for rate in rates([each for each in positions if each[0] >= REACHED]))


def _decode(
    target: Loaded,
    draft: Loaded,
    prompts: Sequence[str],
    shape: Mapping[str, int],
    *,
    temperature: float,
    options: EvaluationOptions,
) -> RunStats:
    """All answers' rounds together. The last round of an answer offers what does not fit any more: it counts too."""
    with LLM(target, draft, method="speculative", drafter="model", batch=4, floor=0.0, **shape) as llm:  # type: ignore[arg-type]
        asked = [target.tokenizer.encode_prompt(text) for text in prompts]
        results = llm.generate(asked, max_tokens=options.max_tokens, temperature=temperature, seed=options.seed)
    return merge_stats([result.figures for result in results])


def _speed(target: Any, draft: Any) -> Speed:
    """Median times of the draft's step, as a share of a chain of CHAIN, and of the target's passes, taken in turn: what
    disturbs one disturbs all."""
    counts = range(1, POSITIONS + 2)
    step = _pass(draft, 1)
    passes = [lambda: statistics.fmean(step() for _ in range(CHAIN)), *(_pass(target, count) for count in counts)]
    times = list(zip(*([timed() for timed in passes] for _ in range(TIMED)), strict=True))
    draft_step, *rest = (statistics.median(column) for column in times)
    is_disturbed = any(statistics.median(column) > UNEVEN * min(column) for column in times)
    return Speed(draft_step, dict(zip(counts, rest, strict=True)), is_disturbed)


def _pass(model: Any, rows: int) -> Callable[[], float]:
    """Times one pass over so many rows behind CONTEXT tokens, each time anew."""
    context = min(CONTEXT, model.max_positions // 2)
    session = model.open(context + 1, max(rows, context) + 1)
    model.score([chain(session, [1] * context)])
    keep = list(range(context))

    def timed() -> float:
        nonlocal keep
        started = time.perf_counter()
        held = model.score_held([chain(session, [1] * rows, range(rows), keep)])
        float(held.values[-1, -1])  # waits for a device, whose time this is
        keep = []
        return time.perf_counter() - started

    return timed
