"""What parts may need of the target's passes: passed on unchanged, refused if impossible, and free for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contract_parts import Forgiving, Skipping, Successors, Witness
from doubles import Empty, QuickToy, make_drafter, make_request, write
from engine_runs import finish, num_pauses, submit
from torch import Tensor
from toy import Toy

from outpace.card.inline import InlineWorker
from outpace.core import registry
from outpace.core.drafting import Needs
from outpace.core.errors import UserError
from outpace.core.logits import TargetOutput
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Part

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
BRANCHES = ((1, 2, 3), (1, 4), (7,))
LAYERED = Toy(16, 3, 0, mlp=0.5)


def decode_by(target: Any, drafter: Any, requests: Sequence[Request], **options: Any) -> list[list[int]]:
    settings = EngineOptions(nodes=12, rows=100, chunk=4, **options)
    needs = Needs(layers=requests[0].rule.traits.hidden_layers)
    with Engine(target, drafter, options=settings, needs=needs) as engine:
        runs = [engine.submit(one, Speculative, Speculative.Options(draft_length=1)) for one in requests]
        return finish(engine, *runs)


def check_feedback(witness: Witness, target: Toy, texts: Sequence[Sequence[int]]) -> None:
    """Compares all feedback with a fresh look at each text; nothing is given twice or missing."""
    needs = witness.capabilities.needs
    for state, text in zip(witness.states, texts, strict=True):
        length = len(state.tokens)  # the last round's tokens are given to no drafter
        assert length > len(state.request.prompt)
        assert state.tokens == [*state.request.prompt, *text][:length]
        for context, top, hidden in state.told:
            stream = target._stream(context)
            if needs.top:
                ranked = sorted(range(16), key=lambda token: -float(stream[-1][token]))
                assert top == ranked[: needs.top]
            if needs.layers:
                assert hidden is not None
                assert torch.equal(hidden, torch.stack([stream[layer] for layer in needs.layers]))
        told = [tuple(context) for context, _, _ in state.told]
        first = 1 if needs.prompt else len(state.request.prompt)
        walked = {tuple(state.tokens[:end]) for end in range(first, length)}
        assert walked <= set(told) if needs.top or needs.layers else not told
        assert len(told) == len(set(told))


@pytest.mark.parametrize(
    "needs",
    [
        Needs(top=1),
        Needs(top=3, prompt=True),
        Needs(layers=(2, 0)),
        Needs(layers=(3,), prompt=True),
        Needs(top=2, layers=(0, 1, 3), prompt=True),
    ],
)
def test_a_drafter_receives_its_needs_for_every_node_and_for_the_prompt(needs: Needs) -> None:
    witness = Witness(needs, BRANCHES)
    requests = [make_request(PROMPT[:length], max_tokens=12) for length in (1, 2, 7, 10)]
    if needs.prompt:
        requests += [make_request(PROMPT * 3, max_tokens=6)] * 2  # the second begins like the first
    texts = decode_by(LAYERED, witness, requests)
    assert texts == [write(LAYERED, request) for request in requests]
    check_feedback(witness, LAYERED, texts)


def test_each_of_several_drafters_receives_its_own_needs() -> None:
    one, two, three = (
        Witness(needs, BRANCHES[:count])
        for count, needs in enumerate((Needs(3, (1,), True), Needs(1, (3, 0)), Needs()), 1)
    )
    asked = make_request(PROMPT, max_tokens=10)
    reported = make_request(PROMPT, max_tokens=10, logprobs=LogprobsOptions(1))
    plain = write(LAYERED, asked)
    with Engine(LAYERED, {"a": one, "b": two, "c": three}, options=EngineOptions(chunk=3)) as engine:
        pairs = [(request, name) for request in (asked, reported) for name in "abc"]
        runs = [engine.submit(one, Speculative, Speculative.Options(1), drafter=name) for one, name in pairs]
        assert finish(engine, *runs) == [plain] * 6
        assert not any(run.history.prompt_logprobs for run in runs)
    for witness in (one, two, three):
        check_feedback(witness, LAYERED, [plain] * 2)


def test_drafters_of_one_tree_receive_their_own_needs() -> None:
    shown = Witness(Needs(2, (3, 1), True), ())
    with Engine(LAYERED, SharedTree([shown, Successors(), Empty()]), options=EngineOptions(chunk=3)) as engine:
        run = engine.submit(make_request(PROMPT, max_tokens=10), Speculative, Speculative.Options(1))
        (text,) = finish(engine, run)
    assert len(shown.states[0].told) >= len(PROMPT) + 5
    for context, top, hidden in shown.states[0].told:
        stream = LAYERED._stream(context)
        assert top == stream[-1].topk(2).indices.tolist()
        assert hidden is not None
        assert torch.equal(hidden, torch.stack([stream[3], stream[1]]))
    assert text == write(LAYERED, make_request(PROMPT, max_tokens=10))


@pytest.mark.parametrize("kind", ["witness", "skipping"])
def test_a_drafter_receives_nothing_twice_after_a_pause(kind: str) -> None:
    witness = Witness(Needs(2, (1, 3), True), BRANCHES)
    drafter = witness if kind == "witness" else Skipping(LAYERED, (2,), (2,))
    requests = [make_request(PROMPT[number:] * 3, max_tokens=200) for number in range(3)]
    settings = EngineOptions(nodes=8, chunk=8, kv_memory=LAYERED.session_bytes(330) / (1 << 30))
    with Engine(LAYERED, drafter, options=settings) as engine:
        runs = [engine.submit(one, Speculative, Speculative.Options(1)) for one in requests]
        texts = finish(engine, *runs)
    assert sum(num_pauses(run) for run in runs) > 0
    assert texts == [write(LAYERED, one) for one in requests]
    if kind == "witness":
        check_feedback(witness, LAYERED, texts)


def test_a_rule_gets_the_hidden_states_of_its_rows_alone() -> None:
    probe = torch.randn(16, generator=torch.Generator().manual_seed(2)).tolist()
    strict, lossy = (Forgiving(2, probe, threshold) for threshold in (0.0, 0.6))
    greedy = make_request(PROMPT, max_tokens=25)
    requests = [make_request(PROMPT, rule, 25) for rule in (strict, lossy)]
    drafters = {"mine": make_drafter("garbage", QuickToy(16, 3, 0)), "told": Witness(Needs(layers=(0,)), BRANCHES)}
    with Engine(LAYERED, drafters, needs=Needs(layers=(2,))) as engine:
        runs = [engine.submit(one, Speculative, Speculative.Options(3)) for one in requests]
        runs += [engine.submit(greedy, Speculative, Speculative.Options(1), drafter="told")]
        texts = finish(engine, *runs)
    assert texts[0] == texts[2] == write(LAYERED, greedy)
    assert texts[1] != texts[0]
    forgiven = 0
    for place, token in enumerate(texts[1]):
        stream = LAYERED._stream([*PROMPT, *texts[1][:place]])
        if token != int(stream[-1].argmax()):
            assert float(torch.sigmoid(stream[2] @ torch.tensor(probe, dtype=torch.float64))) < 0.6
            forgiven += 1
    assert forgiven


@pytest.mark.parametrize("width", [1, 3])
def test_a_drafter_on_the_targets_session_leaves_its_text_alone(width: int) -> None:
    request = make_request(PROMPT, max_tokens=30)
    accepted = {}
    for skipped in ((), (2,), (1, 2)):
        drafter = Skipping(LAYERED, skipped, skipped, width)
        with Engine(LAYERED, drafter, options=EngineOptions(nodes=10, chunk=4)) as engine:
            runs = submit(engine, request, request, method=Speculative)
            for _ in range(100):
                engine.step()
                for run in engine.running:
                    length = run.kv.session.length
                    assert run.kv.session.tokens[:length].tolist() == run.committed[:length]
            assert finish(engine, *runs) == [write(LAYERED, request)] * 2
        accepted[skipped] = sum(step.accepted for step in runs[0].history.steps)
    assert accepted[()] >= accepted[(2,)] >= accepted[(1, 2)] > 0
    assert accepted[()] >= 20
    assert accepted[()] > accepted[(1, 2)] or width > 1


class Spied(Toy):
    """A toy that notes how it is called."""

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def score(self, *given: Any, **named: Any) -> Tensor:
        self.calls.append(("score", given, named))
        return Toy.score_hidden(self, *given, (), **named).logits

    def score_hidden(self, *given: Any, **named: Any) -> TargetOutput:
        self.calls.append(("score_hidden", given, named))
        return super().score_hidden(*given, **named)


@pytest.mark.parametrize("method", registry.names("decoders"))
def test_the_target_is_called_plainly_if_no_part_needs_more(method: str) -> None:
    """With one argument, a list of parts; only their first five fields and `best` are set."""
    target, decoder = Spied(), registry.find("decoders", method)
    drafter = make_drafter("both", QuickToy(16, 3, 0))
    worker = InlineWorker(drafter) if decoder.drafting == "parallel" else None
    with Engine(target, None if worker else drafter, worker, EngineOptions(chunk=3, nodes=6)) as engine:
        finish(engine, *submit(engine, *[make_request(PROMPT, max_tokens=9)] * 2, method=decoder))
    assert {(name, len(given), *named) for name, given, named in target.calls} == {("score", 1)}
    for _, (forest,), _ in target.calls:
        assert type(forest) is list
        for part in forest:
            assert part == Part(*part[:5], best=part.best)


class Blind(Toy):
    """A model that gives its scores and no more."""

    capabilities = frozenset()


@pytest.mark.parametrize(
    ("target", "needs", "says"),
    [
        (
            Blind(),
            Needs(layers=(1,)),
            "Blind cannot give hidden states of its layers, .* native or transformers can",
        ),
        (Toy(), Needs(layers=(4,)), "a layer whose hidden states are needed is 4, it must be between 0 and 3"),
        (Toy(), Needs(layers=(-1,)), "is -1, it must be between 0 and 3"),
        (Toy(), Needs(top=17), "top is 17, it must be between 0 and 16"),
    ],
)
def test_needs_that_a_target_cannot_meet_are_refused_at_once(target: Toy, needs: Needs, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Engine(target, Witness(needs, BRANCHES))
    with pytest.raises(UserError, match=says):
        Engine(target, needs=needs)


def test_a_rule_whose_layers_are_not_passed_on_is_refused() -> None:
    rule = Forgiving(2, [0.0] * 16, 0.5)
    says = r"the rule Forgiving needs hidden states after layers \[2\]"
    with Engine(LAYERED, needs=Needs(layers=(1,))) as engine, pytest.raises(UserError, match=says):
        engine.submit(make_request(PROMPT, rule), Speculative, Speculative.Options())


def test_a_worker_takes_no_drafter_that_must_see_passes() -> None:
    with pytest.raises(UserError, match="drafter successors needs to see the target's passes"):
        InlineWorker(Successors())
    assert Card.drafting == "parallel"
