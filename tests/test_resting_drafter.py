"""A drafter that is not asked in a round is told of it when it is asked again, or at the end: nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from doubles import QuickToy, collect_warnings, make_request

from outpace.core.needs import Needs
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Drafter, DraftState, Observation, Request, Verify
from outpace.core.types import Draft as Ask
from outpace.decoders import autoregressive
from outpace.decoders.base import Coroutine, Place
from outpace.engine.engine import Engine

TARGET = QuickToy(16, 3, 0)
EVERY, LENGTH = 4, 23


def now_and_then(place: Place, options: Any) -> Coroutine:
    """Asks for drafts in one round of four."""
    tree, rounds = TokenTree(place.last_token), 0
    while True:
        if rounds % EVERY == 0:
            yield Ask(tree)
        rounds += 1
        picks = yield Verify(tree)
        tree = yield Commit(tree, place.request.rule.walk(tree, picks))


DECODER: Any = SimpleNamespace(decode=now_and_then, NEEDS="drafter", __name__="now_and_then")


class Noting(Drafter):
    """Proposes the token 1, and notes all that it is told, and what the text was when it was asked."""

    runs_model = False

    def __init__(self, needs: Needs | None = None) -> None:
        self.seen: list[Observation] = []
        self.texts: list[list[int]] = []
        self.roots: list[int] = []
        self.closed: list[int] = []
        self.needs = needs or self.needs

    def open(self, request: Request) -> DraftState:
        return DraftState(request, list(request.prompt))

    def grow(self, states: Any, trees: Any) -> list[int]:
        self.texts.append(list(states[0].tokens))
        self.roots.append(trees[0].ids[0])
        return [int(tree.add(0, 1, 0.0) is not None) for tree in trees]

    def observe(self, state: Any, seen: Observation) -> None:
        self.seen.append(seen)
        state.tokens += seen.tokens

    def close(self, state: Any) -> None:
        self.closed = list(state.tokens)


def write(decoder: Any, drafter: Drafter | None = None) -> list[int]:
    """The prompt and its answer."""
    request = make_request((3, 1, 4), max_tokens=LENGTH)
    with Engine(TARGET, drafter) as engine:
        run = engine.submit(request, decoder, None)
        while run.finish_reason is None:
            engine.step()
    return [*request.prompt, *run.tokens]


def answer(drafter: Drafter) -> list[int]:
    """The text, which is that of plain decoding."""
    text = write(DECODER, drafter)
    assert text == write(autoregressive)
    return text


def test_all_that_was_written_is_told_before_the_next_question_and_at_the_end() -> None:
    drafter = Noting()
    text = answer(drafter)
    for known in drafter.texts:
        assert known == text[: len(known)]
    assert drafter.closed == text[: len(drafter.closed)]
    assert len(drafter.closed) >= len(text) - 2, "the last round is nobody's business"
    assert len(drafter.texts) > 3
    assert len(drafter.seen) <= 2 * len(drafter.texts), "the rounds between two questions are told together"


def test_each_token_is_told_behind_its_node() -> None:
    drafter = Noting()
    answer(drafter)
    for seen in drafter.seen:
        assert len(seen.path) == len(seen.tokens)
    ids = [node for seen in drafter.seen for node in seen.path]
    assert len(set(ids)) == len(ids)
    assert set(drafter.roots) <= {*ids, drafter.seen[-1].tree.ids[0]}, "what follows each root is told"


def test_one_that_needs_what_passes_give_is_told_of_each_round() -> None:
    drafter = Noting(Needs(top=2))
    answer(drafter)
    assert len(drafter.seen) > 2 * len(drafter.texts)
    assert all(seen.seen is not None for seen in drafter.seen)


@pytest.mark.parametrize("first", [1, 3])
def test_one_that_fails_when_it_is_told_is_given_up_before_it_is_asked(first: int) -> None:
    class Failing(Noting):
        def observe(self, state: Any, seen: Observation) -> None:
            super().observe(state, seen)
            if len(self.seen) == first:
                raise RuntimeError("no more")

    drafter = Failing()
    _, messages = collect_warnings(lambda: answer(drafter))
    assert messages == ["the drafter failed (RuntimeError: no more); going on without it"]
    assert len(drafter.seen) == first, "it is not told or asked again"
