"""Random traffic through an engine whose keys and values are few: texts, budget and room stay what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from doubles import QuickToy, make_drafter, make_request, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machines import DEAR_DEPTHS, SEARCH
from mutations import MUTATIONS
from test_memory import GIB, check

from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.types import Request
from outpace.decoders import Autoregressive, Card, Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TARGET = QuickToy(16, 3, 0)
STEM = tuple((7 * place * place + place) % 16 for place in range(90))
NODES, CHUNK, TREE = 6, 8, 16
REQUESTS = st.tuples(
    st.integers(1, len(STEM)), st.lists(st.integers(0, 15), max_size=4), st.integers(1, 150), st.booleans()
)
KEYS = st.sampled_from([None, "a"])


@cache
def plain(request: Request) -> list[int]:
    return write(TARGET, request)


class MemoryMachine(RuleBasedStateMachine):
    """Requests that begin alike come, wait, write, pause, are called off, and come again with what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[Request, TokenSequence]] = []

    @initialize(slots=st.sampled_from([250, 500, 900]), batch=st.integers(1, 4), beside=st.booleans())
    def start(self, slots: int, batch: int, beside: bool) -> None:
        """Drafts are grown alternately with the target or in parallel."""
        budget = slots * TARGET.token_bytes / GIB
        options = EngineOptions(nodes=NODES, rows=40, chunk=CHUNK, batch=batch, kv_memory=budget)
        self.slots = slots
        drafter = make_drafter("both", TARGET, width=2, tree_nodes=TREE)
        self.method = Card if beside else Speculative
        self.engine = Engine(TARGET, None if beside else drafter, InlineWorker(drafter) if beside else None, options)

    @rule(wish=REQUESTS, seed=st.integers(0, 3), key=KEYS)
    def submit(self, wish: tuple[int, list[int], int, bool], seed: int, key: str | None) -> None:
        length, tail, max_tokens, is_drafted = wish
        self.ask((*STEM[:length], *tail), max_tokens, seed, is_drafted, key)

    @precondition(lambda self: any(run.finish_reason for _, run in self.runs))
    @rule(which=st.integers(0, 1 << 16), tail=st.lists(st.integers(0, 15), min_size=1, max_size=3))
    def go_on_with_what_was_written(self, which: int, tail: Sequence[int]) -> None:
        over = [(request, run) for request, run in self.runs if run.finish_reason]
        request, run = over[which % len(over)]
        self.ask((*request.prompt, *run.tokens, *tail), 5, which % 4, False, request.cache_salt)

    def ask(self, prompt: Sequence[int], max_tokens: int, seed: int, is_drafted: bool, key: str | None) -> None:
        """Taken where it could run alone, refused where it could not."""
        request = make_request(prompt, "gumbel", max_tokens, temperature=1.0, seed=seed, cache_salt=key)
        decoder = self.method if is_drafted else Autoregressive
        most = len(prompt) + max_tokens + NODES
        if most + (int((most + TREE) * 1.25) + 64) * is_drafted > self.slots:
            with pytest.raises(UserError, match="GiB of keys and values"):
                self.engine.submit(request, decoder, decoder.Options())
        else:
            self.runs.append((request, self.engine.submit(request, decoder, decoder.Options())))

    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            check(self.engine)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 1 << 16))
    def abort(self, which: int) -> None:
        self.engine.abort(self.runs[which % len(self.runs)][1])

    @invariant()
    def every_text_begins_as_plain_decodings(self) -> None:
        for request, run in self.runs:
            assert run.error is None
            assert run.tokens == plain(request)[: len(run.tokens)]

    def teardown(self) -> None:
        """All that were not called off end, whole, and nothing is held for them."""
        most = 10 + 3 * sum(len(request.prompt) + request.max_tokens for request, _ in self.runs)
        for _ in range(most):
            if all(run.finish_reason for _, run in self.runs):
                break
            self.engine.step()
        for request, run in self.runs:
            assert run.finish_reason in ("length", "abort")
            assert run.finish_reason == "abort" or run.tokens == plain(request)
        self.engine.sweep()
        check(self.engine)
        assert not self.engine.running
        assert not self.engine.waiting
        self.engine.close()


@pytest.mark.parametrize("depth", DEAR_DEPTHS)
def test_any_traffic_keeps_texts_and_budget(depth: settings) -> None:
    run_state_machine_as_test(MemoryMachine, settings=depth)


@pytest.mark.parametrize("name", ["reuse: a prefix copied one token too far", "reuse: what an end cut off is kept"])
def test_a_mistake_is_found(name: str) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    with mutation.applied(), pytest.raises((AssertionError, ValueError, UserError)):
        run_state_machine_as_test(MemoryMachine, settings=SEARCH)
