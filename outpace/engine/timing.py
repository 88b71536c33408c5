"""What the engine tells the planner of costs: what a round took and gave, and what is expected before it was timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.core.carried import Carried
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, Part
from outpace.planning.cost_model import CostModel


def expect_steps(costs: CostModel, target: Model, drafters: Iterable[Drafter]) -> None:
    """Passes over few rows are bound by memory: until a draft's step is timed, it is held to cost such a share of the
    target's pass as its weights are of the target's."""
    whole = target.weight_bytes
    if not whole:
        return
    for drafter in drafters:
        for source in drafter.sources:
            own = drafter.weight_bytes(source)
            if own:
                costs.expect(source, own / whole, drafter.reads_at_most(source))


def note_round(
    costs: CostModel,
    chunks: Sequence[tuple[TokenSequence, Part]],
    trees: Sequence[tuple[TokenSequence, TokenTree]],
    drafting: float,
    seconds: float,
    passes: int,
) -> None:
    """Remembers what a round cost and gave: one of trees alone, or of prompts alone; or that many plain ones together.
    An answer's first round finds other things in the caches; it counts where no other was timed."""
    if chunks:
        if not trees:
            costs.read(sum(len(part.tokens) for _, part in chunks), seconds)
        return
    rows = tokens = 0
    is_first = False
    for run, _ in trees:
        steps = run.history.steps
        if not steps or (run.ask is not None and run.finish_reason is None):  # it asks for another pass
            return
        rows, tokens = rows + steps[-1].verified_rows, tokens + steps[-1].emitted
        is_first = is_first or len(steps) == 1
    if trees and not (is_first and costs.knows(rows, 1)):
        for number in range(passes):
            costs.round(len(trees), rows, tokens, seconds / passes, drafting / passes, is_first=number == 0)


def note_carried(
    costs: CostModel,
    asking: Sequence[TokenSequence],
    done: Sequence[Sequence[Carried]],
    before: Sequence[int],
    seconds: float,
) -> None:
    """The same of rounds that were carried out together in so many seconds: to each its share of what was none of
    theirs. `before`: how many steps each request had then. What follows a round in which a request ended before its
    last one is not noted."""
    share = (seconds - sum(row[0].seconds for row in done)) / len(done)
    noted = 0
    for number, row in enumerate(done):
        rows = tokens = 0
        for run, carried, first in zip(asking, row, before, strict=True):
            steps = run.history.steps
            if run.error is not None or first + number >= len(steps):
                return
            rows, tokens = rows + len(carried.picks), tokens + steps[first + number].emitted
        if 0 in before and not number and costs.knows(rows, 1):
            continue
        drafting = row[0].copy_seconds + sum(forward.seconds for forward in row[0].forwards)
        costs.round(len(asking), rows, tokens, row[0].seconds + share, drafting, is_first=not noted)
        noted += 1
