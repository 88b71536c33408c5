"""The KV cache of drafts counts towards the memory budget, which is never exceeded; a paused request holds none, and
drafts again when it resumes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from doubles import QuickToy, make_drafter, make_request, write
from engine_runs import num_pauses
from light import failing
from test_memory import GIB, drafts_of, few_slots, finish, prompts
from toy import ToySession

from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.drafters import layer_skip, model, ouroboros
from outpace.drafters._composite import DraftSelector, SharedTree
from outpace.drafters.layer_skip import Sublayers
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TREE, WINDOW = 16, 6
TOKEN = QuickToy.token_bytes
Build = Callable[[QuickToy], Drafter]


class Ledger:
    """Tracks the live sessions of some models and the most slots that they held together."""

    def __init__(self) -> None:
        self.sessions: list[weakref.ref[ToySession]] = []
        self.most = self.opened = 0

    @property
    def slots(self) -> int:
        return sum(session.slots for ref in self.sessions if (session := ref()) is not None)

    def watch(self, toy: QuickToy) -> QuickToy:
        """Track the sessions that this toy opens from now on."""
        ledger = self

        class Watched(ToySession):
            def _resize(self, slots: int) -> None:
                super()._resize(slots)
                ledger.most = max(ledger.most, ledger.slots - self.slots + slots)

        def opened(capacity: int, room: int) -> ToySession:
            session = Watched(capacity, room)
            ledger.sessions.append(weakref.ref(session))
            ledger.opened += 1
            return session

        toy.open = opened  # type: ignore[method-assign]
        return toy


def near(ledger: Ledger, seed: int = 0) -> QuickToy:
    return ledger.watch(QuickToy(16, 3, seed, 0.8))


def chains(ledger: Ledger, seed: int = 0, **options: Any) -> model.ModelDrafter:
    return model.ModelDrafter(near(ledger, seed), model.Options(**{"width": 2, "tree_nodes": TREE, **options}))


DRAFTERS: dict[str, Callable[[Ledger, QuickToy], Drafter]] = {
    "model": lambda ledger, target: chains(ledger),
    "window": lambda ledger, target: chains(ledger, draft_window=WINDOW),
    "several": lambda ledger, target: DraftSelector(
        [chains(ledger), chains(ledger, 7, draft_window=WINDOW)], [0.1, 0.1]
    ),
    "ouroboros": lambda ledger, target: ouroboros.OuroborosDrafter(near(ledger), ouroboros.Options(tree_nodes=TREE)),
    "together": lambda ledger, target: SharedTree([DRAFTERS["layer_skip"](ledger, target), chains(ledger)]),
    "layer_skip": lambda ledger, target: layer_skip.LayerSkipDrafter(
        target, Sublayers((1,), ()), layer_skip.Options(tree_nodes=TREE, confidence=0.0)
    ),
}


SLOTS = dict.fromkeys(DRAFTERS, 1300) | {"layer_skip": 900}  # so few that requests are paused


def submit_all(engine: Engine, count: int, method: ModuleType, max_tokens: int = 120) -> list[TokenSequence]:
    requests = [
        make_request(prompt, "gumbel", max_tokens, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts(count))
    ]
    return [engine.submit(request, method, method.Options()) for request in requests]


def step(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("name", DRAFTERS)
def test_memory_never_exceeds_the_budget_and_a_paused_request_holds_none(name: str) -> None:
    """The peak counts, for the sessions of target and drafts together; a paused request holds none in its draft's
    sessions, nor in the target's session that a drafter borrows."""
    ledger = Ledger()
    target = ledger.watch(QuickToy(16, 3, 0))
    options = few_slots(target, SLOTS[name], nodes=12, reuse=False)  # type: ignore[arg-type]
    with Engine(target, DRAFTERS[name](ledger, target), options=options) as engine:
        runs, paused = submit_all(engine, 8, Speculative), []
        while any(run.finish_reason is None for run in runs):
            engine.step()
            if paused or not (paused := [run for run in engine.waiting if num_pauses(run)]):
                continue
            assert paused[0].draft.state is not None
            held = sum(run.kv.session.slots for run in engine.running)
            running = {run.key for run in engine.running}
            assert ledger.slots == held + sum(session.slots for key, session in drafts_of(engine) if key in running)
        assert paused
        assert [run.tokens for run in runs] == [write(target, run.request) for run in runs]
        assert ledger.slots == 0, "finished requests still hold memory"
        assert 400 < ledger.most <= engine.memory.budget / TOKEN


def test_a_window_bounds_the_stored_bytes() -> None:
    drafter = chains(Ledger(), draft_window=WINDOW)
    assert (
        drafter.capabilities.memory([1 << 20])
        == drafter.capabilities.memory([3 * WINDOW])
        > drafter.capabilities.memory([WINDOW])
    )
    whole = chains(Ledger())
    assert whole.capabilities.memory([1 << 20]) > TOKEN << 20
    assert DraftSelector([drafter, whole], [0.1, 0.1]).capabilities.memory([40, 50]) == sum(
        part.capabilities.memory([length]) for part in (drafter, whole) for length in (40, 50)
    )


def test_a_window_bounds_memory_when_a_text_is_observed_late() -> None:
    """Plain rounds are observed together, so the new tokens may exceed the window."""
    ledger = Ledger()
    drafter = chains(ledger, draft_window=WINDOW)
    text = write(QuickToy(16, 3, 0), request := make_request((1, 2, 3), max_tokens=300))
    state = drafter.open(request)
    for start, end in ((0, 5), (5, 90), (90, 92), (92, 300)):
        tree = TokenTree(([3, *text])[start])
        drafter.grow([state], [tree])
        root = TokenTree(text[end - 1], root_id=1000 + end, next_id=1001 + end)
        drafter.observe(state, Observation([tree.ids[0]], text[start:end], root))
    drafter.grow([state], [root])
    assert len(root) > 1
    assert ledger.most <= 3 * WINDOW + TREE + ToySession.block


def test_admission_counts_the_draft() -> None:
    target, ledger = QuickToy(16, 3, 0), Ledger()
    fits, drafter = make_request((1, 2, 3), max_tokens=50), chains(ledger)
    needed = (53 + 6) * TOKEN + drafter.capabilities.memory([53 + 6])
    for budget, method, is_taken in (
        (needed, Speculative, True),
        (needed - 1, Speculative, False),
        (needed - 1, Autoregressive, True),
    ):
        options = EngineOptions(nodes=6, kv_memory=(budget + 0.5) / GIB)
        with Engine(target, drafter, options=options) as engine:
            if is_taken:
                finish(engine, [run := engine.submit(fits, method, method.Options())])
                assert run.tokens == write(target, fits)
            else:
                with pytest.raises(UserError, match=r"of 53 tokens need .* of them for drafts, the budget is"):
                    engine.submit(fits, method, method.Options())


@pytest.mark.parametrize("concurrent", [False, True])
def test_memory_of_a_failed_drafter_is_freed(concurrent: bool) -> None:
    """It no longer counts, and no session stays open."""
    target, ledger = QuickToy(16, 3, 0), Ledger()
    drafter = failing(chains(ledger), after=6)
    drafter.capabilities = drafter.inner.capabilities
    worker = InlineWorker(drafter) if concurrent else None
    with Engine(target, None if concurrent else drafter, worker, few_slots(target, 4000)) as engine:  # type: ignore[arg-type]
        runs = submit_all(engine, 2, Card if concurrent else Speculative)
        with pytest.warns(UserWarning, match="continuing without it"):
            step(engine, 40)
        assert ledger.opened == 2
        assert ledger.slots == 0
        assert engine.memory.used == sum(run.kv.session.slots for run in engine.running) * TOKEN
        finish(engine, runs)
    assert [run.tokens for run in runs] == [write(target, run.request) for run in runs]


@pytest.mark.parametrize("method", [Speculative, Card])
def test_a_resumed_request_is_drafted_again(method: ModuleType) -> None:
    target = QuickToy(16, 3, 0)
    drafter = make_drafter("perfect", target, width=1, tree_nodes=TREE)
    parts = (None, InlineWorker(drafter)) if method is Card else (drafter, None)
    with Engine(target, *parts, options=few_slots(target, 1000, nodes=12)) as engine:  # type: ignore[arg-type]
        runs = submit_all(engine, 8, method, 100)
        before: dict[int, int] = {}
        while any(run.finish_reason is None for run in runs):
            engine.step()
            for run in engine.waiting:
                if num_pauses(run):
                    before[run.key] = sum(step.accepted for step in run.history.steps)
        assert before
        for key, accepted in before.items():
            assert sum(step.accepted for step in runs[key].history.steps) > accepted + 5
    assert [run.tokens for run in runs] == [write(target, run.request) for run in runs]
