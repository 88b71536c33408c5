"""Drafters in one engine: what a builder is given, several of them in one batch, and a fault in one is its own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doubles import DrafterDiedError, Empty, QuickToy, failing, make_drafter, make_request, write
from test_library import folder

from outpace.api.llm import LLM
from outpace.card.inline import InlineWorker
from outpace.card.loop import DraftLoop, Open, SetDirectives
from outpace.core import registry
from outpace.core.drafting import BuildContext, DraftDirectives
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, Request
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.engine.build import _rebuild_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.load import Loaded, load_model

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5, 3, 1, 4)


class Noted(Drafter):
    """Another drafter, with notes of how many trees it grew at once and for which requests."""

    def __init__(self, inner: Drafter, name: str) -> None:
        self.inner = inner
        self.capabilities = Capabilities((DraftSource(name, inner.capabilities.runs_model),))
        self.seen: set[Request] = set()
        self.most = 0

    def open(self, request: Request) -> Any:
        self.seen.add(request)
        return self.inner.open(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        assert {state.request for state in states} <= self.seen
        self.most = max(self.most, len(trees))
        self.inner.grow(states, trees)

    def observe(self, state: Any, seen: Any) -> None:
        self.inner.observe(state, seen)

    def close(self, state: Any) -> None:
        self.inner.close(state)


def finish(engine: Engine, runs: Sequence[TokenSequence]) -> list[list[int]]:
    for _ in range(400):
        if all(run.finish_reason for run in runs):
            return [run.tokens for run in runs]
        engine.step()
    raise AssertionError("no end")


@pytest.mark.parametrize("method", [Speculative, Auto])
def test_a_mixed_batch_writes_each_text_by_its_own_drafter_and_rule(method: Any) -> None:
    drafters = {name: Noted(make_drafter(name, TARGET), name) for name in ("perfect", "ngram", "garbage")}
    asked = [
        make_request(PROMPT[:length], rule, 30, seed=length, **({} if rule == "greedy" else {"temperature": 0.9}))
        for length in (3, 5, 8)
        for rule in ("greedy", "gumbel", "match")
    ]
    names = ["perfect", "ngram", "garbage"] * 3
    with Engine(TARGET, drafters, options=EngineOptions(nodes=12, rows=200, chunk=8)) as engine:
        submitted = zip(asked, names, strict=True)
        runs = [engine.submit(one, method, method.Options(), drafter=name) for one, name in submitted]
        texts = finish(engine, runs)
    assert texts == [write(TARGET, request) for request in asked]
    for name, drafter in drafters.items():
        assert drafter.seen == {request for request, its in zip(asked, names, strict=True) if its == name}
        assert method is Auto or drafter.most == 3, "requests of one drafter grow together"
    if method is Speculative:  # the planner asks a drafter that takes as long as the target for as little as it may
        accepted = [sum(step.accepted for step in run.history.steps) for run in runs]
        assert all(accepted[place] > 0 for place in range(0, 9, 3)), "the perfect drafter's"


def test_a_drafter_that_fails_leaves_the_others_alone() -> None:
    drafters = {"dying": failing(make_drafter("perfect", TARGET), after=1), "living": make_drafter("perfect", TARGET)}
    request = make_request(PROMPT, max_tokens=30)
    with Engine(TARGET, drafters) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [engine.submit(request, Speculative, Speculative.Options(), drafter=name) for name in drafters]
        assert finish(engine, runs) == [write(TARGET, request)] * 2
        later = engine.submit(request, Speculative, Speculative.Options(), drafter="dying")
        assert finish(engine, [later]) == [write(TARGET, request)], "a later request writes plainly"
    assert [str(warning.message) for warning in caught] == [
        f"the drafter dying failed ({DrafterDiedError.__name__}: grow number 1); continuing without it"
    ]
    lengths = [len(run.history.steps) for run in runs]
    assert lengths[0] > 2 * lengths[1]


@pytest.mark.parametrize(
    ("decoder", "name", "says"),
    [
        (Speculative, "two", r"unknown drafter of this engine 'two', allowed are first, tow; did you mean 'tow'\?"),
        (Autoregressive, "first", "method autoregressive uses no drafter: leave out drafter 'first'"),
        (Card, "first", "method card runs one drafter in a worker, a request cannot choose another: leave out drafter"),
    ],
)
def test_a_drafter_that_a_request_cannot_have_is_refused(decoder: Any, name: str, says: str) -> None:
    with Engine(TARGET, {"first": Empty(), "tow": Empty()}, InlineWorker(Empty())) as engine:
        with pytest.raises(UserError, match=says):
            engine.submit(make_request(PROMPT), decoder, decoder.Options(), drafter=name)
        assert not engine.waiting


def test_the_library_lets_an_answer_choose(tmp_path: Path) -> None:
    target = load_model(folder(tmp_path, "target"), runtime="llama")
    with LLM(target, target, method="speculative", drafter="model,ngram,model+ngram") as llm:
        texts = {}
        for name in (None, "model", "ngram", "model+ngram"):
            (answer,) = llm.generate("hello", max_tokens=24, drafter=name)
            texts[name] = answer.tokens, answer.figures.draft_acceptance
        assert len({tokens for tokens, _ in texts.values()}) == 1
        assert texts[None][1] != texts["ngram"][1] != texts["model"][1]
        assert llm.chat("hello", max_tokens=4, drafter="ngram").tokens
        with pytest.raises(UserError, match="unknown drafter of this engine 'suffix'"):
            llm.stream("hello", drafter="suffix")
        with pytest.raises(UserError, match="uses no drafter"):
            llm.stream("hello", plain=True, drafter="model")
    with pytest.raises(UserError, match="names one twice"):
        LLM(target, method="speculative", drafter="ngram,ngram")
    with pytest.raises(UserError, match="one drafter in its worker, not 'model,ngram'"):
        LLM(target, target, method="card", drafter="model,ngram")


@dataclass(frozen=True)
class Options:
    """None."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[BuildContext]:
    """What a drafter `asking` of another package was built from."""
    seen: list[BuildContext] = []

    def build(options: Options, *, given: BuildContext) -> Empty:
        if given.tokenizer is None:
            raise UserError("drafter asking needs the target's tokenizer, use worker thread")
        seen.append(given)
        return Empty()

    module = ModuleType("a_package_of_drafters", "Asks what there is.\n\nNo paper.")
    vars(module).update(Options=Options, build=build)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Callable[..., Any] = registry.entry_points
    point = SimpleNamespace(name="asking", module=module.__name__)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == "outpace.drafters" else list(found(group=group))
    )
    return seen


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("given"), "target"), runtime="llama")


def test_a_builder_is_given_both_models_and_their_tokenizers(
    target: Loaded, given: list[BuildContext], tmp_path: Path
) -> None:
    draft = load_model(folder(tmp_path, "draft"), runtime="llama")
    with LLM(target, draft, method="speculative", drafter="asking"):
        pass
    assert given == [BuildContext(draft.model, target.model, draft.tokenizer, target.tokenizer)]
    with LLM(target, method="speculative", drafter="asking"):
        pass
    assert given[1] == BuildContext(None, target.model, None, target.tokenizer)


def test_in_another_process_there_is_the_draft_alone(target: Loaded, given: list[BuildContext]) -> None:
    with pytest.raises(UserError, match="use worker thread"):
        _rebuild_drafter("asking", lambda: target, 7, {})
    drafter = _rebuild_drafter("model", lambda: target, target.model.vocab_size, {})
    assert drafter.capabilities.sources[0].weight_bytes == target.model.weight_bytes


def test_a_draft_step_that_agrees_with_a_lookup_is_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds no node, but raises the scores of the branch. CARD's drafter goes on until it has a new node."""
    forwards, score = [0], QuickToy.score

    def counted(model: QuickToy, forest: Any) -> Any:
        forwards[0] += 1
        return score(model, forest)

    monkeypatch.setattr(QuickToy, "score", counted)
    request = make_request(PROMPT)
    text = write(TARGET, request)[:4]
    drafter = make_drafter("perfect", TARGET, width=1)
    state, tree = drafter.open(request), TokenTree(PROMPT[-1])
    tree.chain(0, text, [-3.0, -3.5, -4.0, -4.5])
    drafter.grow([state], [tree])
    assert (forwards[0], len(tree), tree.num_confirmed) == (1, 5, 1)
    assert tree.scores[1] > -3.0
    assert tree.scores[4] - tree.scores[1] == pytest.approx(-1.5)
    loop = DraftLoop(drafter)
    loop.post(Open(1, request))
    loop.post(SetDirectives(1, DraftDirectives(width=1, floor=0.0)))
    loop._read_inbox()
    drafted = loop._requests[1]
    drafted.tree.chain(0, text, [-3.0, -3.5, -4.0, -4.5])
    drafted.published = 5
    loop.grow()
    assert (forwards[0], len(drafted.tree), drafted.tree.num_confirmed) == (1 + 5, 6, 4)
