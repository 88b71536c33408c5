"""Warm-up: times rounds of some sizes and the draft step before the first request, so that the planner's first choices
are not experiments at that request's expense.

Our own. A short text of no interest is written by real rounds, plain ones and with drafts, and the engine records their
times like any others.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from itertools import cycle
from typing import Any

from outpace.core.errors import UserError
from outpace.core.options import MethodOptions
from outpace.core.sampling import GREEDY
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Draft, Request, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext
from outpace.engine.build import find_rule
from outpace.engine.engine import Engine

SECONDS = 0.2  # after this time no further round begins
# Rows of each round, the most informative first. Caches are cold in the first few, and a round that follows one of the
# other kind, plain or with drafts, is not timed.
_ROWS = (1, 1, 4, 4, 4, 8, 8, 2, 2, 1, 1, 1)
_LEVELS = 2  # that a draft model grows in a round of several rows


def warm_up(engine: Engine, prompt: Sequence[int], seconds: float = SECONDS) -> None:
    """Write a text after `prompt` (token ids, at least one) so that `engine.costs` learns its times; nothing else
    stays.

    No round begins after `seconds`, not counting steps in which a pass is captured, which happens once for each number
    of rows. Errors are ignored: the first request reports them.
    """
    request = Request(tuple(prompt), find_rule("auto", GREEDY), max_tokens=sum(_ROWS), nodes=max(_ROWS))
    try:
        sequence = engine.submit(engine.target.complete(request), WarmUp, WarmUp.Options())
    except UserError:  # there is not even memory for so short a text
        return
    sequence.kv.is_broken = True  # keeps the text out of the prefix cache
    learnt = [drafter.capabilities.learnt for drafter in engine.drafting.drafters.values()]
    before = [(own, own.state_dict()) for own in learnt if own is not None]
    end = time.perf_counter() + seconds
    while sequence.finish_reason is None and len(sequence.history.steps) < len(_ROWS) and time.perf_counter() < end:
        began, num_captured = time.perf_counter(), _num_captures(engine)
        engine.step()
        if _num_captures(engine) > num_captured:  # its time does not count; a later round of as many rows will be timed
            end += time.perf_counter() - began
    engine.abort(sequence)
    engine.sweep()
    engine.costs.forget_rates()
    for own, known in before:
        own.load_state_dict(known)  # drafts are accepted less often than usual after a single word


def _num_captures(engine: Engine) -> int:
    return engine.target.num_captures + engine.drafting.num_captures


class WarmUp(Decoder):
    """Writes rounds of `_ROWS` rows each, in a cycle, with arbitrary drafts."""

    name = "warmup"

    def decode(self, context: RequestContext, options: MethodOptions) -> DecoderGenerator:
        tree = TokenTree(context.last_token)
        for rows in cycle(_ROWS):
            rows = min(rows, context.budget)
            if rows > 1:
                yield from _grow(tree, context)
                _fill(tree, rows)
                tree = tree.copy(range(rows))
            picks = yield Verify(tree)
            tree = yield Commit(tree, context.request.rule.walk(tree, picks))


def _grow(tree: TokenTree, context: RequestContext) -> Generator[Any, Any, None]:
    """Grow levels of the draft models."""
    for source in context.sources:
        for _ in range(_LEVELS if source.runs_model else 0):
            yield Draft(tree, source)


def _fill(tree: TokenTree, rows: int) -> None:
    """Add nodes with arbitrary tokens until the tree has `rows` nodes."""
    token = 0
    while len(tree) < rows:
        tree.add(len(tree) - 1, token, tree.scores[-1])
        token += 1
