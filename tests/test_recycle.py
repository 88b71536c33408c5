"""Token recycling: the table holds what the target held likeliest when it judged a token last, and drafts from it."""

from __future__ import annotations

from typing import Any

from doubles import QuickToy, decode, make_request, write

from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters.recycle import Options, RecycleDrafter
from outpace.engine.engine import EngineOptions
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)
WIDE = EngineOptions(nodes=64, rows=256)


class Followed(RecycleDrafter):
    """Keeps what it was shown, in order."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.shown: list[tuple[int, list[int]]] = []

    def observe(self, state: Any, seen: Observation) -> None:
        super().observe(state, seen)
        assert seen.seen is not None
        assert seen.seen.top is not None
        self.shown += zip(seen.seen.tokens, seen.seen.top.tolist(), strict=True)


def test_the_table_is_the_last_judgement_of_each_token() -> None:
    drafter = Followed(Options(branches=4))
    asked = [make_request(prompt, max_tokens=30) for prompt in ((3, 1, 4), (2, 7), (3, 1, 4, 1))]
    outcome = decode(asked, "speculative", drafter, target=TARGET, engine=WIDE)
    assert outcome.texts == [write(TARGET, request) for request in asked]
    last = dict(drafter.shown)
    assert {token: list(best) for token, best in drafter._tables.shared.items()} == last
    assert all(len(best) == 4 for best in last.values())
    assert len(last) <= TARGET.vocab_size
    assert outcome.figures.accepted > 0


def test_an_order_one_target_is_known_after_one_look() -> None:
    """Its successors depend on the token alone: whatever was judged once is drafted right."""
    target = QuickToy(16, 1, 0)
    asked = make_request((3,), max_tokens=60)
    drafter = RecycleDrafter(Options())
    first, again = (decode([asked], "speculative", drafter, target=target, engine=WIDE) for _ in range(2))
    assert again.texts == first.texts == [write(target, asked)]
    assert len(again.steps[0]) < 60 / 4


def test_the_likeliest_are_offered_first() -> None:
    drafter = RecycleDrafter(Options(offered=3))
    drafter._tables.shared.update({1: [2, 3, 4], 2: [5, 6, 7]})
    tree = TokenTree(1)
    drafter.grow([drafter.open(Request((1,), Greedy(), 9))], [tree])
    assert tree.tokens[1:] == [2, 3, 4]
