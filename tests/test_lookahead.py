"""Lookahead decoding: the window against the iteration written out, the pool, probes that are never accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from doubles import QuickToy, decode, make_request, write
from light import grown

from outpace.core.drafting import TargetFeedback
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._composite import SharedTree
from outpace.drafters.lookahead import LookaheadDrafter, Options
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine.engine import EngineOptions
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)
WIDE = EngineOptions(nodes=64, rows=512)


def request(prompt: Sequence[int]) -> Request:
    return Request(tuple(prompt), Greedy(), 50)


def says(text: Sequence[int]) -> int:
    """What a target that knows the last three tokens says next."""
    return (7 * text[-1] + 3 * (text[-2] if len(text) > 1 else 0) + (text[-3] if len(text) > 2 else 0) + 1) % 11


def judged(tree: TokenTree, text: Sequence[int], rows: int) -> TargetFeedback:
    """What the drafter is shown of the first nodes of a tree behind a text."""
    found = [says([*text[:-1], *(tree.tokens[node] for node in tree.path(end))]) for end in range(rows)]
    return TargetFeedback(tree.ids[:rows], tree.tokens[:rows], np.array(found)[:, None])


def play(
    drafter: LookaheadDrafter, text: list[int], rounds: int, rows: int = 1000
) -> list[tuple[list[list[int]], Any]]:
    """Rounds in which nothing is accepted; the columns after each, and the pool's n-grams."""
    state, found = drafter.open(request(text)), []
    for number in range(rounds):
        tree = TokenTree(text[-1], 1000 * number, 1000 * number + 1)
        drafter.grow([state], [tree])
        token = says(text)
        seen = judged(tree, text, min(rows, len(tree)))
        text = [*text, token]
        root = TokenTree(token, 1000 * number + 1000, 1000 * number + 1001)
        drafter.observe(state, Observation([tree.ids[0]], [token], root, seen))
        pool = {(lead, *rest) for lead in range(16) for rest in state.pool.followers(lead)}
        found.append(([list(column) for column in state.columns], pool))
    return found


@pytest.fixture
def without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool takes no n-grams of prompt and answer."""
    monkeypatch.setattr(LookaheadDrafter, "_read", lambda *parts: None)


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize(("window", "ngram"), [(4, 3), (7, 5), (1, 2), (3, 4)])
def test_the_window_is_the_jacobi_iteration(window: int, ngram: int) -> None:
    """Each column's next guess is what the target says behind the chain of first guesses and the column."""
    text = [random.Random(0).randrange(11) for _ in range(20)]
    drafter = LookaheadDrafter(Options(window=window, ngram=ngram, guesses=256))
    columns = [list(column) for column in drafter.open(request(text)).columns]
    pool: set[tuple[int, ...]] = set()
    for mine, held in play(drafter, text, 12):
        firsts = [column[0] for column in columns]
        before = [[*text, *firsts[:place]] for place in range(window)]
        for place, column in enumerate(columns):
            column.append(says([*before[place], *column]))
            pool.add(tuple(column))
            if len(column) == ngram:
                del column[0]
        text = [*text, says(text)]
        assert mine == columns
        assert held == pool


def test_columns_that_were_not_judged_whole_wait() -> None:
    text = [3, 1, 4, 1, 5]
    drafter = LookaheadDrafter(Options(window=3, ngram=4))
    start = [list(column) for column in drafter.open(request(text)).columns]
    ((columns, _),) = play(drafter, text, 1, rows=3)
    assert [len(column) for column in columns] == [2, 2, 1]
    assert columns[2] == start[2]


def test_accepted_tokens_move_the_window() -> None:
    drafter = LookaheadDrafter(Options(window=4, ngram=3))
    state = drafter.open(request([3, 1, 4, 1, 5]))
    kept = [list(column) for column in state.columns]
    drafter.observe(state, Observation([0, 1, 2], [7, 8, 9], TokenTree(9, 50, 51)))
    assert state.columns[:2] == kept[2:]
    assert len(state.columns) == 4


@pytest.mark.usefixtures("without_text")
def test_phrases_of_the_pool_are_candidates_and_the_window_is_not() -> None:
    drafter = LookaheadDrafter(Options(window=3, ngram=3, guesses=2))
    state = drafter.open(request([3, 1, 4]))
    for phrase in ((5, 6), (7, 8), (9, 9)):
        state.pool.learn(4, phrase)
    tree = TokenTree(4)
    assert grown(drafter, state, tree) == len(tree) - 1
    candidates = [node for node in range(1, len(tree)) if tree.roles[node] != Role.PROBE]
    assert [tree.tokens[node] for node in candidates] == [9, 9, 7, 8]
    assert len(tree) == 1 + 4 + 3
    assert grown(drafter, state, tree) == 0, "the window is there already"


@pytest.mark.usefixtures("without_text")
def test_a_probe_where_a_candidate_stands_is_that_candidate() -> None:
    drafter = LookaheadDrafter(Options(window=2, ngram=3))
    state = drafter.open(request([3, 1, 4]))
    state.columns = [[5, 6], [5, 6]]
    state.pool.learn(4, (5, 6))
    tree = TokenTree(4)
    drafter.grow([state], [tree])
    assert [(tree.tokens[n], tree.parents[n], tree.roles[n]) for n in range(1, len(tree))] == [
        (5, 0, Role.PRIMARY),
        (6, 1, Role.PRIMARY),
        (5, 1, Role.PROBE),
        (6, 3, Role.PROBE),
    ]
    assert state.probes == [tree.ids[1:3], tree.ids[3:5]]


def test_a_candidate_of_another_drafter_stands_beside_an_equal_probe() -> None:
    """Who grows behind the window must find its own node, and the target walks it."""
    target = QuickToy(16, 1, 0)
    asked = make_request((3, 1), max_tokens=60)
    parts = [LookaheadDrafter(Options()), NgramDrafter(NgramOptions())]
    outcome = decode([asked], "speculative", SharedTree(parts), target=target, engine=WIDE)
    alone = decode([asked], "speculative", NgramDrafter(NgramOptions()), target=target, engine=WIDE)
    assert outcome.texts == alone.texts == [write(target, asked)]
    assert len(outcome.steps[0]) <= len(alone.steps[0]) < 40


@pytest.mark.usefixtures("without_text")
def test_only_candidates_count_as_drafted() -> None:
    asked = make_request((3, 1, 4), max_tokens=30)
    outcome = decode([asked], "speculative", LookaheadDrafter(Options()), target=TARGET, engine=WIDE)
    first = outcome.steps[0][0]
    assert (first.drafted, first.depth_offered) == (0, 0)
    assert first.verified_rows == 1 + 7
    assert outcome.texts == [write(TARGET, asked)]


@pytest.mark.usefixtures("without_text")
def test_a_text_is_written_in_fewer_passes() -> None:
    target = QuickToy(16, 1, 0)
    asked = make_request((3,), "gumbel", 80, temperature=0.7)
    found = decode([asked], "speculative", LookaheadDrafter(Options()), target=target, engine=WIDE)
    assert found.texts == [write(target, asked)]
    assert found.figures.accepted > 8


def test_memory_and_work_are_bounded_over_many_tokens() -> None:
    chance, drafter = random.Random(0), LookaheadDrafter(Options(guesses=3))
    state = drafter.open(request([1, 2, 3]))
    for number in range(5000):
        tree = TokenTree(state.tokens[-1], 1000 * number, 1000 * number + 1)
        drafter.grow([state], [tree])
        assert len(tree) <= 1 + 7 * 4 + 3 * 4
        seen = TargetFeedback(tree.ids, tree.tokens, np.array([[chance.randrange(50)] for _ in tree.ids]))
        written = [chance.randrange(50) for _ in range(20)]
        root = TokenTree(written[-1], 1000 * number + 1000, 1000 * number + 1001)
        drafter.observe(state, Observation([tree.ids[0]], written, root, seen))
        assert len(state.pool) <= 50 * 3
        assert [len(state.columns), state.proposed] == [7, {}]
        assert all(len(column) < 5 for column in state.columns)
