"""The plan of a batch, as a pure function of what is known: how many requests draft, and how deep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outpace.core.stats import PlanEstimates

_LEAST_GAIN = 0.01  # share of the time that drafting must save, since the best of several estimates is too good


class BatchState(NamedTuple):
    """The running requests of an engine before a round."""

    requests: int
    readers: int  # requests whose texts the draft model has read
    behind: int  # tokens of these texts that were written since
    unread: int  # tokens of all other texts
    tokens_left: float  # expected in the rest of all answers


class Estimates(NamedTuple):
    """What the planner knows of passes, and of one source that runs a model. Times in seconds."""

    plain: float  # a round of plain decoding
    pass_seconds: Callable[[int], float]  # a pass with drafts, by rows
    step_seconds: Callable[[int], float]  # a draft step, by nodes
    excess: Callable[[int], float]  # what a round with this many draft steps takes beyond its pass and its steps
    acceptance: Callable[[int], float]  # chance that a token of this level is accepted after one of the level above
    reading: Callable[[int], float]  # texts of this many tokens
    capture: Callable[[int, int], float]  # graphs that do not exist yet, by requests that draft and by levels

    def at(self, batch: BatchState, levels: int, drafting: int) -> PlanEstimates:
        """Return the values for a plan of this many levels."""
        depth = max(levels, 1)
        return PlanEstimates(
            batch.requests,
            levels,
            tuple(map(self.acceptance, range(depth))),
            self.plain,
            self.pass_seconds(batch.requests + drafting * depth),
            self.step_seconds(drafting),
            self.excess(depth),
            self.reading(batch.behind + batch.unread),
        )


class BatchPlan(NamedTuple):
    """How many requests draft together, how deep, and the tokens per second to expect; 0 levels: plain decoding."""

    levels: int
    drafting: int
    rate: float


def plan_batch(batch: BatchState, max_levels: int, estimates: Estimates) -> BatchPlan:
    """Return the plan by which the rest of all answers takes the least time.

    With k of n requests drafting L levels, their W remaining tokens take W / rate + reading + captures, where the rate
    is (n + k (a1 + a1 a2 + ... + a1 ... aL)) / (T(n + k L) + L d(k) + excess(L)). Either all requests draft, or those
    whose texts are read already.
    """
    best = BatchPlan(0, 0, batch.requests / estimates.plain)
    shortest = (1.0 - _LEAST_GAIN) * batch.tokens_left / best.rate
    for drafting in {batch.readers, batch.requests} - {0}:
        reading = estimates.reading(batch.behind + (batch.unread if drafting > batch.readers else 0))
        step, tokens, chance = estimates.step_seconds(drafting), float(batch.requests), 1.0
        for levels in range(1, max_levels + 1):
            chance *= estimates.acceptance(levels - 1)
            tokens += drafting * chance
            seconds = estimates.pass_seconds(batch.requests + drafting * levels) + levels * step
            seconds = max(seconds + estimates.excess(levels), estimates.plain)
            total, rate = batch.tokens_left * seconds / tokens + reading, tokens / seconds
            most = tokens + drafting * chance * (max_levels - levels)  # that any number of levels can give
            if batch.tokens_left * seconds / most + reading >= shortest:
                break
            if total < shortest and (total := total + estimates.capture(drafting, levels)) < shortest:
                best, shortest = BatchPlan(levels, drafting, rate), (1.0 - _LEAST_GAIN) * total
    return best


def best_rows(chances: Sequence[float], extra: Sequence[float], price: float) -> tuple[int, float]:
    """Return how many rows pay, the root's included, and their chances minus their price.

    `chances` of the nodes fall; `extra` are the seconds of 1, 2, ... rows besides the root's.
    """
    best, best_worth, gain = 0, 0.0, 0.0
    for count, (chance, seconds) in enumerate(zip(chances, extra, strict=False), 1):
        gain += chance
        worth = gain - price * seconds
        if worth > best_worth:
            best, best_worth = count, worth
    return best + 1, best_worth


def best_width(gains: Sequence[float], price: float, seconds: Callable[[int], float]) -> int:
    """Return the width (1, 2, 4, ...) at which a level gains most above the price of its time; 0 if no width gains.

    `gains`: the tokens that a level adds below the likeliest 1, 2, ... parents; `seconds` of a draft step by its width.
    """
    best, best_gain, width = 0, 0.0, 1
    while width <= len(gains):
        above = gains[width - 1] - price * seconds(width)
        if above > best_gain:
            best, best_gain = width, above
        width *= 2
    return best
