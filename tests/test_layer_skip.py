"""A draft of the target's own layers: it changes no committed key or value, its rows are those of a forward without the
sublayers, its search finds what can be left out, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import reference
import tiny as transformers_tiny
import torch
from doubles import make_request, write
from passes import branch, prefilled, random_parents, text
from test_llama import tiny as llama
from toy import Toy

from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Observation
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.drafters import layer_skip
from outpace.drafters.layer_skip import (
    LayerSkipDrafter,
    Options,
    SkipState,
    Sublayers,
    SublayerSearch,
    evenly_spaced,
    find_agreements,
    format_layers,
    parse_layers,
)
from outpace.engine.build import BuildOptions
from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, Part, chain
from outpace.models.hf.load import adapt
from outpace.models.llama.native.runtime import NativeLlama

DEEP = replace(reference.TINY, num_layers=6)


def native(config: Any) -> NativeLlama:
    return NativeLlama.from_tensors(config, reference.random_tensors(config).__getitem__)


@pytest.fixture(params=["llama", "llama, not exact", "native"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "native":
        return native(DEEP)
    return llama(DEEP, None if request.param == "llama" else False)


def finish(engine: Engine, runs: Sequence[TokenSequence]) -> list[list[int]]:
    while not all(run.finish_reason for run in runs):
        engine.step()
    for run in runs:
        if run.error:
            raise run.error
    return [run.tokens for run in runs]


def held_by(session: Any) -> bytes:
    """The bits of what is committed."""
    held = session.read(session.length)
    return bytes((held.numpy() if isinstance(held, torch.Tensor) else held).tobytes())


class Guarded(LayerSkipDrafter):
    """Compares what the target's sessions have committed before and after each draft."""

    drafts = 0

    def grow(self, states: Sequence[SkipState], trees: Sequence[TokenTree]) -> None:
        before, size = [held_by(state.target_session) for state in states], sum(map(len, trees))
        lengths = [state.target_session.length for state in states]
        super().grow(states, trees)
        for state, held, length in zip(states, before, lengths, strict=True):
            assert state.target_session.length == length
            assert held_by(state.target_session) == held
        self.drafts += sum(map(len, trees)) - size


@pytest.mark.parametrize(
    ("sampling", "width"),
    [
        pytest.param(GREEDY, 3, id="greedy-3"),
        pytest.param(Sampling(0.9), 1, id="sampled-1"),
        pytest.param(GREEDY, 1, id="greedy-1", marks=pytest.mark.long),
        pytest.param(Sampling(0.9), 3, id="sampled-3", marks=pytest.mark.long),
    ],
)
def test_nothing_that_is_committed_changes_and_the_text_is_plain_decodings(
    model: Model, sampling: Sampling, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_skip, "_WINDOW", 6)
    monkeypatch.setattr(layer_skip, "_EVERY", 1)
    options = Options(width=width, confidence=0.0)
    drafter = Guarded(model, Sublayers((2,), (2, 3)), options, SublayerSearch(evenly_spaced(6, 0.4), 6, 50, 2.0))
    rule = "greedy" if sampling.is_greedy else "gumbel"
    requests = [make_request(text(model, 9 + n, n), rule, 30, sampling=sampling, seed=n) for n in range(3)]
    with Engine(model, drafter) as engine:
        plain = [engine.submit(one, Autoregressive, Autoregressive.Options()) for one in requests]
        drafted = [engine.submit(one, Speculative, Speculative.Options(3)) for one in requests]
        texts = finish(engine, [*plain, *drafted])
    assert texts[:3] == texts[3:]
    assert drafter.drafts > 60
    assert drafter.search is not None
    assert drafter.search.count > 5, "the search tried sets meanwhile"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9)], ids=["greedy", "sampled"])
def test_where_nothing_is_skipped_everything_is_accepted(model: Model, sampling: Sampling) -> None:
    drafter = LayerSkipDrafter(model, Sublayers(), Options(confidence=0.0))
    rule = "greedy" if sampling.is_greedy else "gumbel"
    with Engine(model, drafter) as engine:
        request = make_request(text(model, 12), rule, 33, sampling=sampling)
        run = engine.submit(request, Speculative, Speculative.Options(3))
        finish(engine, [run])
    steps = run.history.steps[:-1]  # the last one is cut by max_tokens
    assert len(steps) == 8
    assert all(step.accepted == step.drafted == 3 for step in steps)


def test_rows_are_those_of_a_fresh_forward_without_the_sublayers(model: Model) -> None:
    """Node after node, as a draft grows, and each path at once behind a prompt that was read anew."""
    less = model.skip_sublayers((1, 4), (2,))
    prompt, nodes, parents = text(model, 25), text(model, 10, 1), random_parents(10, 4)
    session = prefilled(model, prompt)
    grown = [
        less.score([Part(session, [token], [parent], [0])])[0] for token, parent in zip(nodes, parents, strict=True)
    ]
    for node, row in enumerate(grown):
        path = [nodes[other] for other in branch(parents, node)]
        fresh = less.score([chain(prefilled(model, prompt), path, [len(path) - 1])])[0]
        if model.exact:
            assert torch.equal(row, fresh)
        else:
            torch.testing.assert_close(row, fresh, atol=1e-4, rtol=1e-4)
    assert not torch.equal(grown[0], model.score([chain(prefilled(model, prompt), nodes[:1], [0])])[0])


def test_agreement_is_that_of_single_steps_and_leaves_the_session_alone(model: Model) -> None:
    less, tokens = model.skip_sublayers((2,), (3,)), text(model, 30)
    session = prefilled(model, tokens[:-1])
    before = held_by(session)
    request = make_request(tokens[:10])
    found = find_agreements(less, session, request, tokens, 12)
    assert (session.length, session.pending) == (29, 0)
    assert held_by(session) == before
    for place in range(12):
        own = prefilled(model, tokens[:17])
        row = less.score([chain(own, tokens[17 : 18 + place], [place])])[0]
        assert found[place] == (int(row.argmax()) == tokens[18 + place])
    said = [int(row.argmax()) for row in less.score([chain(prefilled(model, tokens[:17]), tokens[17:29], range(12))])]
    assert find_agreements(less, session, request, [*tokens[:29], said[-1]], 12)[-1]


def test_a_draft_ends_with_a_token_that_it_is_not_sure_of() -> None:
    model = llama(DEEP)
    lengths = {}
    for confidence in (0.0, 0.5, 1.0):
        with Engine(model, LayerSkipDrafter(model, Sublayers((2,), ()), Options(confidence=confidence))) as engine:
            run = engine.submit(make_request(text(model, 9), max_tokens=40), Speculative, Speculative.Options(6))
            finish(engine, [run])
        lengths[confidence] = [step.drafted for step in run.history.steps if step.emitted < 8][:-1]
    assert set(lengths[0.0]) == {6}
    assert set(lengths[1.0]) == {1}
    assert 1 < sum(lengths[0.5]) / len(lengths[0.5]) < 6


@pytest.mark.parametrize(("target", "step"), [(0.9, 0.5), (0.5, 0.5), (0.2, 1.0), (0.9, 0.0)])
def test_the_threshold_follows_the_acceptance_rate(target: float, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows section 4.3 of Draft & Verify, recomputed here from the statistics of each round."""
    rounds: list[tuple[float, bool]] = []

    class Noted(LayerSkipDrafter):
        def observe(self, state: SkipState, seen: Observation) -> None:
            rounds.append((state.confidence, state.is_unsure))
            super().observe(state, seen)

    model = llama(DEEP)
    monkeypatch.setattr(layer_skip, "_ACCEPTANCE_TARGET", target)
    monkeypatch.setattr(layer_skip, "_CONFIDENCE_STEP", step)
    options = Options(confidence=0.4)
    with Engine(model, Noted(model, Sublayers((2,), ()), options)) as engine:
        run = engine.submit(make_request(text(model, 9), max_tokens=80), Speculative, Speculative.Options(6))
        finish(engine, [run])
    rate, confidence = target, 0.4
    for (used, is_unsure), round_ in zip(rounds, run.history.steps, strict=False):
        assert used == pytest.approx(confidence)
        rate = 0.5 * rate + 0.5 * round_.accepted / round_.drafted
        goal = confidence + step if rate < target else confidence - step if is_unsure else confidence
        confidence = min(max(0.9 * confidence + 0.1 * goal, 0.0), 1.0)
    values = [used for used, _ in rounds]
    assert len(values) > 15
    assert len(set(values)) == 1 if step == 0.0 else max(values) > 0.4 > min(values) or target != 0.5


def test_the_search_finds_layers_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of a toy's ten layers have no effect: a set of just these agrees everywhere, so the search keeps it."""
    toy = Toy(16, 10, 0)
    idle = (2, 4, 5, 7)
    for layer in idle:
        toy._tables[layer] = 0.0
    start = evenly_spaced(10, 0.4)
    drafter = LayerSkipDrafter(toy, start, Options(confidence=0.0), SublayerSearch(start, 10, 2000, 1.0))
    monkeypatch.setattr(layer_skip, "_WINDOW", 24)
    monkeypatch.setattr(layer_skip, "_EVERY", 1)
    assert drafter.sublayers != Sublayers(idle, drafter.sublayers.mlp)
    with Engine(toy, drafter) as engine:
        for number in range(40):
            request = make_request((3, 1, number % 16), max_tokens=120)
            run = engine.submit(request, Speculative, Speculative.Options(3))
            assert finish(engine, [run]) == [write(toy, request)]
            if drafter.search is not None and drafter.search.is_over:
                break
    assert drafter.search is not None
    assert drafter.search.score == 1.0
    assert drafter.sublayers.attention == idle
    assert all(step.accepted == step.drafted for step in run.history.steps[-3:-1])


def value(sublayers: Sublayers) -> float:
    """Best where the attention of the last inner layers and the MLPs of the first ones are left out. 0 to 1"""
    late, early = sum(layer > 7 for layer in sublayers.attention), sum(layer < 6 for layer in sublayers.mlp)
    return (late + early) / sublayers.size


def test_a_search_keeps_its_size_and_the_best_set() -> None:
    search, seen = SublayerSearch(evenly_spaced(14, 0.3), 14, 120, 1.1), []
    while not search.is_over:
        tried = search.propose()
        assert len(tried.attention) == len(tried.mlp) == 4
        assert all(1 <= layer <= 12 for kind in tried for layer in kind)
        assert all(list(kind) == sorted(set(kind)) for kind in tried)
        seen.append((value(tried), tried))
        assert search.learn(tried, value(tried)) == (len(seen) == 1 or value(tried) > max(v for v, _ in seen[:-1]))
    assert len(seen) == search.count == 120
    assert seen[0][1] == evenly_spaced(14, 0.3)
    assert (search.score, search.best) == max(seen, key=lambda pair: pair[0])
    again = SublayerSearch(evenly_spaced(14, 0.3), 14, 120, 1.1)
    for _, tried in seen[:60]:
        assert again.propose() == tried, "the same sets in the same order"
        again.learn(tried, value(tried))


@pytest.mark.parametrize(
    ("layers", "share", "enough", "trials", "count"),
    [(14, 0.3, 0.0, 9, 1), (14, 0.3, 1.1, 9, 9), (14, 0.3, 1.1, 1000, 301), (3, 0.45, 1.0, 100, 1)],
)
def test_a_search_ends(layers: int, share: float, enough: float, trials: int, count: int) -> None:
    """With an agreement that is enough, after all trials, without progress, and where there is no other set."""
    search = SublayerSearch(evenly_spaced(layers, share), layers, trials, enough)
    while not search.is_over:
        search.learn(search.propose(), 0.5)
    assert search.count == count


@pytest.mark.parametrize(
    ("layers", "said"), [((), '""'), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((1, 3, 4, 9, 10, 11), "1,3-4,9-11")]
)
def test_layers_are_written_as_they_are_read(layers: tuple[int, ...], said: str) -> None:
    assert format_layers(layers) == said
    assert parse_layers("skip_mlp", said.strip('"')) == layers
    assert parse_layers("skip_mlp", f" {said} ".replace(",", " , ").strip(' "')) == layers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "skip_mlp is 'x', it must be layers such as 3,5-8"),
        ("3,", "skip_mlp is '3,'"),
        ("8-5", "skip_mlp has '8-5', a range rises"),
        ("1-99999999", "a range rises and ends below 10000"),
    ],
)
def test_what_names_no_layers_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Options(skip_mlp=text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"skip_attention": "2,6"}, "skip_attention names layer 6, the target has layers 0 to 5"),
        ({"skip_attention": "0-5", "skip_mlp": "0-5"}, "name all 6 layers: at least one attention or MLP must stay"),
        ({"skip_attention": "", "skip_mlp": ""}, "name no layer: a draft that leaves out nothing costs as much"),
    ],
)
def test_sets_that_do_not_fit_are_refused(values: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        layer_skip.build(Options(**values), given=BuildContext(target=llama(DEEP)))


def test_what_cannot_leave_out_sublayers_is_refused_by_name() -> None:
    gpt = adapt(transformers_tiny.build("gpt2"))
    says = "TransformersModel cannot leave out sublayers, models of the runtime llama or native can"
    with pytest.raises(UserError, match=says):
        layer_skip.build(Options(), given=BuildContext(target=gpt))
    with pytest.raises(UserError, match="drafts on the target's own session, a worker has none"):
        layer_skip.build(Options(), given=BuildContext())
    with pytest.raises(UserError, match="the target has 2 layers, and a search keeps the first and the last"):
        layer_skip.build(Options(), given=BuildContext(target=llama(replace(DEEP, num_layers=2))))
    assert layer_skip.build(Options(skip_mlp="1"), given=BuildContext(target=llama(replace(DEEP, num_layers=2))))


def test_it_needs_no_draft_model_and_no_worker_runs_it() -> None:
    from outpace.card.inline import InlineWorker

    assert registry.describe("drafters", "layer_skip").needs == "no other model"
    assert not BuildOptions("auto", "layer_skip").may_draft
    drafter = LayerSkipDrafter(llama(DEEP), Sublayers((1,), ()), Options())
    with pytest.raises(UserError, match="drafter layer_skip needs to see the target's passes"):
        InlineWorker(drafter)
    assert drafter.capabilities.sources[0].weight_bytes == round(llama(DEEP).weight_bytes * 11 / 12)
