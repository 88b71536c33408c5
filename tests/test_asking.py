"""How often `auto` queries lookup drafters, on a simulated clock: rarely after failures, at once where text repeats."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from doubles import make_request
from test_planner import place_of

from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Draft, DraftSource, Verify
from outpace.decoders.auto import Auto
from outpace.planning import sources
from outpace.planning.cost_model import CostModel
from outpace.planning.sources import BatchRows

COPIES = DraftSource("ngram", False, is_calibrated=True)
PASS, ROW, ASK = 3.3, 0.5, 0.22  # seconds of a pass over one row, of each further row, and of a query
LONGEST, COPIED = 3, 8


class CopyRun:
    """Writes one text with `auto` and a drafter that copies the tokens after an earlier occurrence of the last ones."""

    def __init__(self, text: Sequence[int], chances: Sequence[float] = (0.3, 0.6, 0.9)) -> None:
        """`chances`: the probability that a copied token is right after a match of 1, 2 or 3 tokens."""
        self.text, self.chances = list(text), chances
        self.seconds = 0.0
        self.queries: list[int] = []  # tokens written before each query

    def run(self) -> float:
        """Write the text and return the speedup over plain decoding."""
        costs, written = CostModel(), [self.text[0]]
        place = place_of(make_request((1,)), 16, costs, (COPIES,))
        place.committed = written
        coroutine = Auto().decode(place, Auto.Options())
        ask, drafting = coroutine.send(None), 0.0
        while len(written) < len(self.text):
            if isinstance(ask, Draft):
                self.queries.append(len(written))
                drafting += ASK
                costs.record_draft(ask.source, ASK, 1)
                ask.tree.current_source = ask.source.name
                ask = coroutine.send(self.grow(ask.tree, written))
                continue
            assert isinstance(ask, Verify)
            rows, start = len(ask.tree), len(written)
            picks = [self.text[min(start + ask.tree.depth(node), len(self.text) - 1)] for node in range(rows)]
            ask = coroutine.send(picks)
            assert isinstance(ask, Commit)
            emitted = len(ask.verdict.path)
            seconds = PASS + ROW * (rows - 1) + drafting
            costs.record_round(1, rows, emitted, seconds, drafting)
            costs.begin_round(None)
            BatchRows.of([place])
            written += self.text[start : start + emitted]
            self.seconds, drafting = self.seconds + seconds, 0.0
            ask = coroutine.send(TokenTree(written[-1]))
        return (len(self.text) - 1) * PASS / self.seconds

    def grow(self, tree: TokenTree, written: Sequence[int]) -> int:
        """Add one branch, copied after the longest match."""
        for length in range(LONGEST, 0, -1):
            last = written[-length:]
            places = [n for n in range(length, len(written)) if list(written[n - length : n]) == list(last)]
            if places and len(last) == length:
                node, score = 0, 0.0
                for token in written[places[-1] : places[-1] + COPIED]:
                    score += math.log(self.chances[min(length, LONGEST) - 1])
                    node = tree.add(node, token, score) or 0
                    length += 1
                return len(tree) - 1
        return 0


def new_text(tokens: int, kinds: int, seed: int = 0) -> list[int]:
    """Return random tokens: each occurs repeatedly, and none predicts the next."""
    chance = random.Random(seed)
    return [chance.randrange(kinds) for _ in range(tokens)]


def test_rejected_copies_are_queried_less_and_less_often() -> None:
    run = CopyRun(new_text(1200, 200), (0.05, 0.05, 0.05))
    ratio = run.run()
    waits = [later - one for one, later in itertools.pairwise(run.queries)]
    assert ratio > 0.99
    assert max(waits) > 32
    assert sum(place > 400 for place in run.queries) < 800 / 32
    assert sum(waits[-5:]) > sum(waits[:5])


@pytest.mark.parametrize("new", [100, 300, 900])
def test_a_repetition_is_copied_at_once(new: int) -> None:
    """After a long text without accepted copies the whole text repeats: it is copied after four tokens."""
    text = new_text(new, 200)
    run = CopyRun(text + text)
    run.run()
    assert next(place for place in run.queries if place >= new + 2) <= new + sources._REPEATED + 1
    assert sum(place < new for place in run.queries) < new / 4


def test_repetitions_without_accepted_copies_are_not_queried_each_time() -> None:
    """The same five tokens follow every five new ones, and the text after them is new each time."""
    phrase, text = [1, 2, 3, 4, 5], []
    for token in new_text(200, 1000):
        text += [*phrase, *new_text(5, 1000, token)]
    run = CopyRun(text, (0.05, 0.05, 0.05))
    assert run.run() > 0.985
    assert sum(place > 1000 for place in run.queries) < 1000 / 25
