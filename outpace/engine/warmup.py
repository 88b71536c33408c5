"""What rounds of some sizes and a draft's step take, timed before the first request: the planner's first choices are
then no trials at the expense of whoever asked.

Our own. A short text of no interest is written by real rounds, plain ones and with drafts, of which the engine notes
the times as it does of any.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf
from typing import Any

from outpace.core import setups
from outpace.core.carried import Carried, PassTimes, Plan
from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY
from outpace.core.tree import TokenTree
from outpace.core.types import CarryOut, Commit, Draft, Request, Verify
from outpace.decoders.base import Coroutine, RequestContext
from outpace.engine.build import find_rule
from outpace.engine.engine import Engine
from outpace.planning.planner import note_forward

NEEDS = "drafter"
SECONDS = 0.2  # after which no further round begins
_ROWS = (1, 1, 4, 4, 8, 8, 2, 2, 1, 1, 1)  # of the rounds; what tells most first, and caches are cold in the first few
_LAYERS = 2  # that a draft model grows in a round of several rows


@dataclass(frozen=True)
class Options:
    """None."""


def warm_up(engine: Engine, prompt: Sequence[int], seconds: float = SECONDS) -> None:
    """Writes a text below `prompt` (token ids, at least one) for its times, which `engine.costs` then knows; nothing
    else stays. Ends after so many seconds at the latest, but for the round under way, and those in which a pass is
    captured, which every number of rows has once. What goes wrong is for the first request to tell."""
    request = Request(tuple(prompt), find_rule("auto", GREEDY), max_tokens=sum(_ROWS), nodes=max(_ROWS))
    try:
        run = engine.submit(request, sys.modules[__name__], Options())
    except UserError:  # no memory for even so short a text
        return
    run.storage.is_broken = True  # its keys and values are nothing to start from
    drafters = engine.drafting.drafters
    learnt = {name: drafter.state_dict() for name, drafter in drafters.items()}
    end = time.perf_counter() + seconds
    while run.finish_reason is None and len(run.history.steps) < len(_ROWS) and time.perf_counter() < end:
        began, before = time.perf_counter(), setups.count
        engine.step()
        if setups.count > before:  # it has no time of its own: a later one of as many rows is to have one
            end += time.perf_counter() - began
    engine.abort(run)
    engine.sweep()
    engine.costs.forget_rates()
    for name, drafter in drafters.items():  # those that did not fail
        if learnt[name] is not None:
            drafter.load_state_dict(learnt[name])  # below one word alone a draft's chances come true too seldom


def decode(place: RequestContext, options: Options) -> Coroutine:
    """Rounds of `_ROWS` rows each, again and again, which accept what is right."""
    tree, has_read = TokenTree(place.last_token), False
    for rows in cycle(_ROWS):
        rows = min(rows, place.budget)
        done = None if place.carries is None else (yield CarryOut(tree, _plan(rows, has_read)))
        if done:
            tree = yield from _commit(tree, done[0], place)
            has_read = has_read or rows > 1
            continue
        if rows > 1:
            yield from _grow(tree, place, has_read)
            has_read = True
            _fill(tree, rows)
            tree = tree.copy(range(rows))
        picks = yield Verify(tree)
        tree = yield Commit(tree, place.request.rule.walk(tree, picks))


def _plan(rows: int, has_read: bool) -> Plan:
    """A round of so many rows, if the draft proposes as many: rows cost nothing."""
    times, free = PassTimes((0.0,) * (rows + 1), rows, ()), -inf
    layers = _LAYERS if rows > 1 else 0
    return Plan(1, has_read, layers, 0, 0.0, 0.0, 1.0, 0.0, free, 0.0, (1.0,), (), (1.0,), times, most=rows)


def _commit(tree: TokenTree, carried: Carried, place: RequestContext) -> Generator[Any, Any, TokenTree]:
    """A round that was carried out, with its layers timed, but where one reads the plain rounds' text; the next
    round's root."""
    for source in place.sources:
        for forward in carried.forwards if source.runs_model else ():
            note_forward(place.costs, source, forward, 1)
    tree = carried.onto(tree, "", "")
    root: TokenTree = yield Commit(tree, place.request.rule.walk(tree, carried.picks))
    return root


def _grow(tree: TokenTree, place: RequestContext, has_read: bool) -> Generator[Any, Any, None]:
    """Layers of the draft models, timed, but where one reads the plain rounds' text."""
    for source in place.sources:
        for layer in range(_LAYERS if source.runs_model else 0):
            if not layer and not has_read:
                place.costs.reads(source)
            if (yield Draft(tree, source)):
                place.costs.stepped(source, 1)


def _fill(tree: TokenTree, rows: int) -> None:
    """Nodes of any tokens, until there are so many."""
    token = 0
    while len(tree) < rows:
        tree.add(len(tree) - 1, token, tree.scores[-1])
        token += 1
