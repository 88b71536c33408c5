"""Random walks through all session operations, compared with a twin of two lists: committed tokens, and nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import reference
import torch
from doubles import QuickToy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machines import DEPTHS, SEARCH
from mutations import MUTATIONS
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Model, Part, chain
from outpace.models.llama.cuda.multi_step_runtime import ExactGraphLlama
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.torch.runtime import Llama

CAPACITY, ROOM, BLOCK, VOCAB = 10, 90, 6, 5
NUMBERS = st.integers(0, 1 << 16)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)


class Twin:
    """What a session must hold: `text` is committed, `nodes` are (token, parent), parents first."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.nodes: list[tuple[int, int]] = []

    def branch(self, node: int) -> list[int]:
        """The nodes from the root down to this one."""
        path = []
        while node != PREFIX:
            path.append(node)
            node = self.nodes[node][1]
        return path[::-1]

    def below(self, node: int) -> list[int]:
        """The nodes under this one, parents first."""
        return [other for other in range(len(self.nodes)) if node in self.branch(other)[:-1]]

    def words(self, node: int) -> tuple[int, ...]:
        """The text that ends with this node."""
        return (*self.text, *(self.nodes[other][0] for other in self.branch(node)))

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        self.text += [self.nodes[node][0] for node in path]
        places = {node: place for place, node in enumerate(live)}
        self.nodes = [(self.nodes[node][0], places.get(self.nodes[node][1], PREFIX)) for node in live]

    @property
    def room(self) -> int:
        return CAPACITY + ROOM - len(self.text) - len(self.nodes)


class SessionMachine(RuleBasedStateMachine):
    """Two sessions of one model, so that one may be a copy of the other and both travel in one forest."""

    made: ClassVar[
        tuple[Model, Callable[[tuple[int, ...]], Tensor]]
    ]  # the model, and its scores after a text read at once

    same: ClassVar[Callable[[Tensor, Tensor], bool]] = staticmethod(torch.equal)

    def __init__(self) -> None:
        super().__init__()
        self.model, self.fresh = self.made
        self.sessions: list[Any] = [self.open() for _ in range(2)]
        self.twins = [Twin(), Twin()]

    def open(self) -> Any:
        """A session that grows by few slots."""
        session = self.model.open(CAPACITY, ROOM)
        assert session.slots == 0, "slots are made as they are needed"
        session.block = BLOCK
        return session

    def part(self, which: int, tokens: Sequence[int], numbers: Sequence[int], keep: Sequence[int] | None) -> Part:
        """Nodes with any parents, as many as fit; `keep` was applied to the twin."""
        twin = self.twins[which]
        parents = []
        for token, number in list(zip(tokens, numbers, strict=False))[: twin.room]:
            parents.append(number % (len(twin.nodes) + 1) - 1)  # PREFIX or any node
            twin.nodes.append((token, parents[-1]))
        return Part(self.sessions[which], tokens[: len(parents)], parents, range(len(parents)), keep)

    def check(self, which: int, scores: Tensor) -> None:
        """The newest nodes' scores are those of their texts, read at once."""
        twin = self.twins[which]
        for row, node in zip(scores, range(len(twin.nodes) - len(scores), len(twin.nodes)), strict=True):
            assert self.same(row, self.fresh(twin.words(node)))

    @rule(which=st.integers(0, 1), tokens=TOKENS, numbers=st.lists(NUMBERS, min_size=5, max_size=5))
    def score(self, which: int, tokens: list[int], numbers: list[int]) -> None:
        if self.twins[which].room:
            self.check(which, self.model.score([self.part(which, tokens, numbers, None)]))

    @rule(tokens=TOKENS, more=TOKENS, numbers=st.lists(NUMBERS, min_size=5, max_size=5))
    def score_both(self, tokens: list[int], more: list[int], numbers: list[int]) -> None:
        if not all(twin.room for twin in self.twins):
            return
        parts = [self.part(0, tokens, numbers, None), self.part(1, more, numbers[::-1], None)]
        scores = self.model.score(parts)
        self.check(0, scores[: len(parts[0].tokens)])
        self.check(1, scores[len(parts[0].tokens) :])

    @rule(which=st.integers(0, 1), node=NUMBERS, tokens=TOKENS, numbers=st.lists(NUMBERS, min_size=5, max_size=5))
    def keep_with_the_next_score(self, which: int, node: int, tokens: list[int], numbers: list[int]) -> None:
        path = self.path(which, node)
        self.twins[which].keep(path)
        self.check(which, self.model.score([self.part(which, tokens, numbers, path)]))

    @rule(which=st.integers(0, 1), node=NUMBERS, some=st.lists(NUMBERS, max_size=3))
    def keep(self, which: int, node: int, some: list[int]) -> None:
        """Commit a branch; some branches below it stay pending."""
        path, twin = self.path(which, node), self.twins[which]
        under = twin.below(path[-1]) if path else []
        chosen = {under[number % len(under)] for number in some} if under else set()
        live = sorted({other for node in chosen for other in twin.branch(node)} - set(path))
        self.sessions[which].keep(path, live)
        twin.keep(path, live)

    def path(self, which: int, node: int) -> list[int]:
        """A branch that fits into the text, or nothing."""
        twin = self.twins[which]
        path = twin.branch(node % (len(twin.nodes) + 1) - 1)
        return path[: CAPACITY - len(twin.text)]

    @rule(which=st.integers(0, 1), length=NUMBERS)
    def truncate(self, which: int, length: int) -> None:
        twin = self.twins[which]
        length %= len(twin.text) + 1
        self.sessions[which].truncate(length)
        twin.text, twin.nodes = twin.text[:length], []

    @rule(which=st.integers(0, 1), length=NUMBERS)
    def start_from_the_other(self, which: int, length: int) -> None:
        other = self.twins[1 - which]
        length %= len(other.text) + 1
        self.sessions[which] = self.open()
        self.sessions[which].start_from(self.sessions[1 - which], length)
        self.twins[which] = Twin()
        self.twins[which].text = other.text[:length]

    @rule(which=st.integers(0, 1), slots=st.integers(0, CAPACITY + ROOM), least=st.booleans())
    def make_slots(self, which: int, slots: int, least: bool) -> None:
        session = self.sessions[which]
        before, after = session.slots, session.slots_after(slots, least)
        session.reserve(slots, least)
        assert session.slots == after >= max(slots, before)
        assert not least or after == before or after < slots + BLOCK

    @rule(which=st.integers(0, 1))
    def give_slots_back(self, which: int) -> None:
        session = self.sessions[which]
        session.trim()
        assert session.slots <= 1.25 * (session.length + session.pending + BLOCK)

    @rule(which=st.integers(0, 1))
    def too_many_nodes_are_refused(self, which: int) -> None:
        count = self.twins[which].room + 1
        part = Part(self.sessions[which], [0] * count, [PREFIX] * count, [])
        with pytest.raises(UserError, match="do not fit"):
            self.model.score([part])

    @precondition(lambda self: any(len(twin.text) + len(twin.nodes) > CAPACITY for twin in self.twins))
    @rule()
    def a_text_that_grows_too_long_is_refused(self) -> None:
        for session, twin in zip(self.sessions, self.twins, strict=True):
            longest = max((twin.branch(node) for node in range(len(twin.nodes))), key=len, default=[])
            if len(twin.text) + len(longest) > CAPACITY:
                with pytest.raises(UserError, match="grows past"):
                    session.keep(longest)

    @rule(which=st.integers(0, 1))
    def what_cannot_be_is_refused(self, which: int) -> None:
        session, twin = self.sessions[which], self.twins[which]
        with pytest.raises(ValueError, match="cannot truncate"):
            session.truncate(len(twin.text) + 1)
        if twin.text or twin.nodes:
            with pytest.raises(ValueError, match="cannot start"):
                session.start_from(self.sessions[1 - which], 0)

    @invariant()
    def the_counts_are_the_twins(self) -> None:
        for session, twin in zip(self.sessions, self.twins, strict=True):
            assert session.length == len(twin.text)
            assert session.pending == len(twin.nodes)
            assert session.length + session.pending <= session.slots <= CAPACITY + ROOM
            assert session.slots % BLOCK == 0 or session.slots == CAPACITY + ROOM
            assert session.pending_depths == [len(twin.branch(node)) - 1 for node in range(len(twin.nodes))]

    def teardown(self) -> None:
        """Whatever is kept is still read right."""
        for which, twin in enumerate(self.twins):
            self.sessions[which].truncate(len(twin.text))
            twin.nodes = []
            self.score(which, [0], [0])
        del self.model, self.fresh, self.sessions  # hypothesis keeps machines


def toy() -> Model:
    return QuickToy(VOCAB, 4, 0)


def torch_runtime() -> Model:
    return Llama.from_tensors(reference.TINY, reference.random_tensors(reference.TINY).__getitem__)


def captured_runtime() -> Model:
    return GraphLlama.from_tensors(reference.TINY, reference.random_tensors(reference.TINY).__getitem__)


def exact_captured_runtime() -> Model:
    tensor = reference.random_tensors(reference.TINY).__getitem__
    return ExactGraphLlama.from_tensors(reference.TINY, tensor, exact=True, dtype=torch.float16)


def native_runtime() -> Model:
    pytest.importorskip("outpace_kernels", reason="outpace-kernels is not installed: `pip install ./kernels`")
    from outpace.models.llama.native.runtime import NativeLlama

    return NativeLlama.from_tensors(reference.TINY, reference.random_tensors(reference.TINY).__getitem__)


def walk(make: Callable[[], Model], depth: settings) -> None:
    model = make()
    assert model.exact or make in (toy, captured_runtime), "rows are compared bit by bit"

    @cache
    def fresh(words: tuple[int, ...]) -> Tensor:
        session = model.open(len(words), 1)
        return model.score([chain(session, words, [len(words) - 1])])[0]

    class Machine(SessionMachine):
        made = model, fresh

    if make is captured_runtime:  # its sums depend on what travels along
        Machine.same = staticmethod(partial(torch.allclose, atol=2e-4, rtol=2e-4))
    try:
        run_state_machine_as_test(Machine, settings=depth)
    finally:
        del Machine.made


RUNTIMES = [toy, torch_runtime, captured_runtime, exact_captured_runtime, native_runtime]


@pytest.mark.parametrize("make", RUNTIMES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_session_is_a_list_of_tokens(depth: settings, make: Callable[[], Model]) -> None:
    walk(make, depth)


@pytest.mark.parametrize("name", ["keep a wrong path", "forget to keep the accepted path", "tree mask sees siblings"])
def test_a_mistake_is_found(name: str) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    with mutation.applied(), pytest.raises((AssertionError, ValueError)):
        walk(toy, SEARCH)
