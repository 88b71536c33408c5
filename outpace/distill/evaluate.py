"""Evaluates a draft (stage judge): acceptance on held-out prompts by real decoding, and the times of both models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from outpace.api.llm import LLM
from outpace.core import registry, theory
from outpace.core.options import CheckedOptions, whole
from outpace.core.stats import Positions, RunStats, merge_stats, rates
from outpace.distill.progress_display import Progress
from outpace.models.base import chain
from outpace.models.heads.head import Head, HeadSession
from outpace.models.load import Loaded
from outpace.models.options import FILE

POSITIONS = 8  # length of the chain that measures acceptance by position
CHAIN, TREE, TREE_WIDTH, TREE_DEPTH = 4, 16, 4, 6
TEMPERATURES = (0.0, 0.8)
TIMED = 9  # passes, whose median counts
MIN_ROUNDS = 10  # rounds that must reach a position for its acceptance to be reported
UNEVEN = 1.5  # ratio of median to minimum above which times count as disturbed
CONTEXT = 200  # tokens before a timed pass
PLAIN, TRAINED, STEERED_DRAFT = "plain decoding", "the trained draft", "the trained draft with steering"
COMPARED, TOKENS = 6, 96  # prompts of the comparison by speed, and most tokens of each answer


@dataclass(frozen=True)
class EvaluationOptions(CheckedOptions):
    """The first `prompts` of each task are answered with at most `max_tokens` each."""

    prompts: int = whole(20, 1)
    max_tokens: int = whole(128, 2)
    seed: int = whole(0, 0, 2**63 - 1)


@dataclass(frozen=True)
class Acceptance:
    """The acceptance on one task at one temperature. `chain` and `tree` are mean accepted lengths."""

    task: str
    temperature: float
    chain: float
    tree: float
    by_position: tuple[float, ...]  # acceptance rate of the i-th token of a chain, given that those before it were
    tokens: int
    prompts: int = 0


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of a draft step of one row or block, and of target passes by rows, on this machine."""

    draft_step: float
    passes: Mapping[int, float]
    is_disturbed: bool = False  # by other work on this machine, so that the times are unreliable
    drafts_blocks: bool = False  # whether one draft step drafts a whole chain

    @property
    def cost(self) -> float:
        """The cost ratio c: draft step over target pass."""
        return self.draft_step / self.passes[1]


@dataclass(frozen=True)
class Evaluation:
    """All figures of one draft."""

    target: str
    draft: str
    rows: tuple[Acceptance, ...]
    speed: ModelTimes
    predicted: Mapping[int, float] = field(default_factory=dict)  # speedup at temperature 0, by draft length
    where: str = ""  # runtime and threads
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)  # of plain decoding and by draft, if compared

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost": self.speed.cost}


def evaluate(
    target: Loaded, draft: Loaded, tasks: Mapping[str, Sequence[str]], options: EvaluationOptions, progress: Progress
) -> Evaluation:
    """Decode every task's prompts (texts; chat messages if the target has a template) and time both models."""
    rows: list[Acceptance] = []
    total = len(tasks) * len(TEMPERATURES)
    for task, prompts in tasks.items():
        for temperature in TEMPERATURES:
            rows.append(_measure_acceptance(target, draft, task, prompts[: options.prompts], temperature, options))
            progress({"judged": len(rows) / total, "chain": rows[-1].chain, "tree": rows[-1].tree})
    speed = _time_models(target.model, draft.model)
    where = [
        "native kernels" if target.model.instruction_set else "torch",
        f"target: {_weights(target)}",
        f"draft: {_weights(draft)}",
        f"threads {torch.get_num_threads()}",
    ]
    return Evaluation(target.name, draft.name, tuple(rows), speed, predicted_speedups(rows, speed), ", ".join(where))


def _weights(loaded: Loaded) -> str:
    return "the file's own weights" if loaded.precision == FILE else f"weights in {loaded.precision}"


def predicted_speedups(rows: Sequence[Acceptance], speed: ModelTimes) -> dict[int, float]:
    """Return the speedup E / (gamma c + v) for every draft length gamma.

    E is 1 plus the sum of the products of the greedy acceptance by position, and v = t_p(gamma + 1) / t_p(1).
    """
    greedy = [row.by_position for row in rows if row.temperature == 0]
    columns = ([rate for rate in column if rate is not None] for column in zip_longest(*greedy))
    means = [statistics.fmean(column) for column in columns]
    chances = [*means, *[0.0] * POSITIONS]
    return {
        length: theory.speedup(
            theory.expected_tokens_by_position(chances[:length]),
            1 if speed.drafts_blocks else length,
            speed.cost,
            speed.passes[length + 1] / speed.passes[1],
        )
        for length in range(1, POSITIONS + 1 if greedy else 1)
    }


def _measure_acceptance(
    target: Loaded,
    draft: Loaded,
    task: str,
    prompts: Sequence[str],
    temperature: float,
    options: EvaluationOptions,
) -> Acceptance:
    encoded = [target.tokenizer.encode_prompt(text) for text in prompts]
    has_floor = hasattr(registry.find("drafters", draft.drafter).Options, "floor")

    def decode(nodes: int, width: int, depth: int) -> RunStats:
        # the last round of an answer may draft past its end, which counts too
        shape: dict[str, Any] = {"nodes": nodes + 1, "width": width, "draft_length": depth}
        shape |= {"floor": 0.0} if has_floor else {}
        with LLM(target, draft, method="speculative", drafter=draft.drafter, batch=4, **shape) as llm:
            results = llm.generate(encoded, max_tokens=options.max_tokens, temperature=temperature, seed=options.seed)
        return merge_stats([result.figures for result in results])

    long, chain_stats = (decode(length, 1, length) for length in (POSITIONS, CHAIN))
    tree = decode(TREE, TREE_WIDTH, TREE_DEPTH)
    return Acceptance(
        task,
        temperature,
        round(chain_stats.mean_accepted_length, 3),
        round(tree.mean_accepted_length, 3),
        reliable_rates(long.positions),
        long.emitted,
        len(prompts),
    )


def reliable_rates(positions: Positions) -> tuple[float, ...]:
    """Return the acceptance rates by position, as far as MIN_ROUNDS rounds reached the position."""
    return tuple(round(rate, 4) for rate in rates([each for each in positions if each[0] >= MIN_ROUNDS]))


def _time_models(target: Any, draft: Any) -> ModelTimes:
    """Return median times of draft steps (averaged over chains of CHAIN) and target passes.

    The measurements alternate, so that a disturbance affects all of them.
    """
    counts, drafter = range(1, POSITIONS + 2), draft.drafter if isinstance(draft, Head) else "model"
    step = _timed_block(draft) if drafter == "block" else _timed_pass(draft, 1)
    passes = [lambda: statistics.fmean(step() for _ in range(CHAIN)), *(_timed_pass(target, count) for count in counts)]
    times = list(zip(*([timed() for timed in passes] for _ in range(TIMED)), strict=True))
    draft_step, *rest = (statistics.median(column) for column in times)
    is_disturbed = any(statistics.median(column) > UNEVEN * min(column) for column in times)
    return ModelTimes(
        draft_step, dict(zip(counts, rest, strict=True)), is_disturbed, drafter in ("block", "specformer")
    )


def _timed_block(model: Any) -> Callable[[], float]:
    """Return a function that times the drafting of one block, as a chain, after CONTEXT tokens."""
    head, context = model.spec, min(CONTEXT, model.max_positions // 2)
    session = model.open(context + head.block, context + head.block)
    session.add_features(model.fuse(torch.ones(len(head.taps), context, head.target_width)))
    model.read_features([session])

    def timed() -> float:
        started = time.perf_counter()
        draft = model.draft([session], [1])
        rows = [draft.layer(0, depth, [[1] * (depth + 1)]) for depth in range(head.num_drafted)]
        float(rows[-1].values[-1, -1])  # waits for the device
        return time.perf_counter() - started

    return timed


def _timed_pass(model: Any, rows: int) -> Callable[[], float]:
    """Return a function that times one pass of `rows` rows after CONTEXT tokens."""
    context = min(CONTEXT, model.max_positions // 2)
    session = model.open(context + 1, max(rows, context) + 1)
    if isinstance(session, HeadSession):
        read = context + rows * CHAIN * TIMED
        session.add_features(model.fuse(torch.ones(len(model.spec.taps), read, model.spec.target_width)))
    model.score_sparse([chain(session, [1] * context)])
    keep = list(range(context))

    def timed() -> float:
        nonlocal keep
        started = time.perf_counter()
        held = model.score_sparse([chain(session, [1] * rows, range(rows), keep)])
        float(held.values[-1, -1])  # waits for the device
        keep = []
        return time.perf_counter() - started

    return timed


def tokens_per_second(
    target: Loaded, drafts: Mapping[str, Loaded], prompts: Sequence[str], seed: int = 0
) -> dict[str, float]:
    """Return the tokens/s of plain decoding and of `--method auto` with each draft: one request at a time, greedy, with
    prefill.

    The methods take turns at each prompt, after an untimed answer to the first prompt.
    """
    encoded = [target.tokenizer.encode_prompt(text) for text in prompts[:COMPARED]]
    shared: dict[str, Any] = {"batch": 1, "reuse": False}
    with ExitStack() as stack:
        llms = {PLAIN: stack.enter_context(LLM(target, None, method="autoregressive", **shared))}
        for name, draft in drafts.items():
            llms[name] = stack.enter_context(LLM(target, draft, profile=False, **shared))
        written, spent = dict.fromkeys(llms, 0), dict.fromkeys(llms, 0.0)
        for number, prompt in enumerate([encoded[0], *encoded]):
            for name, llm in llms.items():
                began = time.perf_counter()
                [result] = llm.generate([prompt], max_tokens=TOKENS, temperature=0.0, seed=seed)
                if number:
                    spent[name] += time.perf_counter() - began
                    written[name] += len(result.tokens)
    return {name: round(written[name] / spent[name], 2) for name in llms}


def verdict(speeds: Mapping[str, float], draft: str) -> str:
    """Return one line that says which draft to use. `draft`: path of the trained one."""
    listed = ", ".join(f"{name} {speed:.4g}" for name, speed in speeds.items())
    best = max(speeds, key=speeds.__getitem__)
    ours = dict.fromkeys((TRAINED, STEERED_DRAFT), f"use --draft {draft}")
    advice = {PLAIN: "use no draft", **ours}.get(best, f"keep {best}")
    return f"tokens/s by --method auto on held-out prompts: {listed}; {advice}"
