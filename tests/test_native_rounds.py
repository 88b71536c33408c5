"""Native rounds: their trees and texts equal those of rounds that the engine runs step by step."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference
from doubles import make_request
from test_bursts import Clock
from test_native import TINIES, tiny

from outpace.core.carried import Carried
from outpace.core.drafting import BuildContext
from outpace.core.types import Adjustments, LogprobsOptions, Request
from outpace.decoders import Auto, Autoregressive
from outpace.drafters import _carrier, _tree_expander, ngram
from outpace.drafters import model as draft_model
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.native_rounds import NativeRounds
from outpace.engine.sequence import TARGET, TokenSequence
from outpace.models.base import chain
from outpace.models.llama.native import rope_tables
from outpace.models.llama.native.pair import NativePair
from outpace.models.llama.native.runtime import NativeLlama
from outpace.planning.cost_model import CostModel
from outpace.rules import gumbel

kernels = pytest.importorskip("outpace_kernels")
LONG = 1000.0  # seconds: as many rounds as there can be
SAMPLED = {"temperature": 0.8, "rule": "gumbel"}
FILTERED = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
ADJUSTED = {
    "adjustments": Adjustments(1.3, 0.4, 0.2, ((5, 2.0), (7, -30.0)), min_tokens=12),
    "stop_ids": frozenset(range(20, 60)),
}
CHEAP, DEAR = {"1": 1.0, "2": 1.01, "8": 1.05, "16": 1.1}, {"1": 1.0, "2": 1.1, "4": 1.5, "8": 2.5}


@pytest.fixture(scope="module")
def target() -> NativeLlama:
    if not hasattr(kernels, "Pair"):
        pytest.skip("outpace-kernels is older than these tests")
    return tiny(TINIES["tiny"])


@pytest.fixture(scope="module")
def draft(target: NativeLlama) -> NativeLlama:
    """The target without its last layer: right in some places, and wrong in others."""
    return target.select_layers(range(target.num_layers - 1))


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, so that all planners use the stated times."""

    def seen(costs: CostModel, *_: object, is_first: bool = True) -> None:
        costs._planned_at = costs.num_rounds if is_first else costs._planned_at
        costs._rounds.num_rounds += 1

    monkeypatch.setattr(CostModel, "record_round", seen)
    monkeypatch.setattr(CostModel, "record_step", lambda *_: None)
    monkeypatch.setattr(CostModel, "record_prefill", lambda *_: None)


def drafter_of(draft: NativeLlama, copies: bool, target: NativeLlama | None = None, **options: Any) -> Any:
    model = draft_model.build(draft_model.Options(**options), given=BuildContext(draft=draft, target=target))
    return SharedTree([ngram.build(ngram.Options(branches=2)), model]) if copies else model


def asked(count: int, number: int = 0, /, **options: Any) -> list[Request]:
    """Requests whose prompts repeat themselves here and there."""
    chance = random.Random(100 * count + number)
    found = []
    for _ in range(count):
        words = [chance.randrange(97) for _ in range(chance.randint(3, 12))]
        prompt = [*words, *words[: chance.randint(0, len(words))], *words[-2:]]
        found.append(make_request(prompt, max_tokens=chance.randint(20, 60), **options))
    return found


class Ways:
    """The same requests with whole rounds and without; `carried` are the former's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: NativeLlama, draft: NativeLlama) -> None:
        self._patch, self.target, self.draft = monkeypatch, target, draft
        self.carried: list[Carried] = []
        carry = NativePair.carry

        def watched(pair: NativePair, *given: Any) -> list[list[Carried]]:
            done = carry(pair, *given)
            self.carried += [one for row in done for one in row]
            return done

        monkeypatch.setattr(NativePair, "carry", watched)

    def runs(
        self,
        requests: Sequence[Request],
        carries: bool,
        copies: bool = True,
        burst: float = 0.0,
        rows: dict[str, float] | None = None,
        step: float = 0.05,
        nodes: int = 8,
        decoder: Any = Auto,
        batch: int = 4,
        method: Any = None,
        **options: Any,
    ) -> tuple[list[TokenSequence], int]:
        """Their ends, and in how many steps."""
        drafter = drafter_of(self.draft, copies, self.target, **options)
        settings = EngineOptions(chunk=16, batch=batch, burst=burst, nodes=nodes)
        with self._patch.context() as patch, Engine(self.target, drafter, options=settings, clock=Clock()) as engine:
            if not carries:
                patch.setattr(NativeRounds, "lookup_sources", lambda *_: None)
            profile = {"rounds": rows or CHEAP, "draft": {"model": step, "ngram": 0.001}, "trust": {}, "growth": {}}
            engine.costs.load_state_dict(profile)
            runs = [engine.submit(request, decoder, method or decoder.Options()) for request in requests]
            steps = 0
            while any(run.finish_reason is None for run in runs):
                engine.step()
                steps += 1
        assert not [run.error for run in runs if run.error]
        return runs, steps


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, target: NativeLlama, draft: NativeLlama) -> Ways:
    return Ways(monkeypatch, target, draft)


def plain_tokens(target: NativeLlama, request: Request) -> list[int]:
    with Engine(target) as engine:
        run = engine.submit(replace(request, rounds=False), Autoregressive, Autoregressive.Options())
        while run.finish_reason is None:
            engine.step()
    return run.tokens


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("rows", [CHEAP, DEAR])
@pytest.mark.parametrize("step", [0.01, 0.2])
@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | FILTERED, ADJUSTED, SAMPLED | FILTERED | ADJUSTED])
def test_rounds_are_those_that_are_asked_for_step_by_step(
    ways: Ways, copies: bool, rows: dict[str, float], step: float, options: dict[str, Any]
) -> None:
    """Their trees, by whom each node was planted, and the walks: prices, and all that is learnt, are the same then. But
    what a layer gave is learnt before the next one of its round is asked for there, and behind the round here: so no
    more layers than are known to give something."""
    met: Counter[str] = Counter()
    method = Auto.Options(deepest=4)
    for seed in range(6):
        (request,) = asked(1, seed, rounds=True, seed=seed, choice=seed % 2, **options)
        given = {
            "copies": copies,
            "rows": rows,
            "step": step,
            "width": 2 + seed % 3,
            "nodes": 6 + seed,
            "method": method,
        }
        (slow,), _ = ways.runs([request], carries=False, **given)
        before = len(ways.carried)
        (fast,), _ = ways.runs([request], carries=True, **given)
        assert fast.tokens == slow.tokens == plain_tokens(ways.target, request)
        assert fast.history.rounds == slow.history.rounds
        assert fast.history.sources == slow.history.sources
        assert [step[:6] for step in fast.history.steps] == [step[:6] for step in slow.history.steps]
        for one in ways.carried[before:]:
            met["rounds"] += 1
            met["layers"] += len(one.layers) > 1
            met["fewer"] += one.is_fewer
            met["accepted"] += len(one.path) > 1
            met["copied"] += any(one.copied)
    assert met["rounds"] > 20
    assert met["fewer"] > 0 or step > 0.1 or options
    assert met["accepted"] > 5
    assert met["copied"] > 5 or not copies
    assert met["layers"] > 5 or step > 0.1


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("stops", [frozenset(), frozenset(range(60, 75))])
@pytest.mark.parametrize(
    "options", [{}, SAMPLED, SAMPLED | FILTERED | {"seed": 2**63 - 1, "choice": 2**70}, ADJUSTED, SAMPLED | ADJUSTED]
)
def test_texts_are_plain_decodings(ways: Ways, count: int, stops: frozenset[int], options: dict[str, Any]) -> None:
    """Some rounds in a step, with other requests, in sequence where the batch is full, up to stop tokens;
    greedy requests batched with sampled ones."""
    requests = asked(count, **({"stop_ids": stops} | options))
    requests[1::2] = asked(count, stop_ids=stops)[1::2]
    single, many = ways.runs(requests, carries=True)
    assert ways.carried
    together, few = ways.runs(requests, carries=True, burst=LONG)
    assert few < many or sum(len(run.tokens) for run in single) < 4 * count
    for request, one, other in zip(requests, single, together, strict=True):
        assert one.tokens == other.tokens == plain_tokens(ways.target, request)
        assert one.finish_reason == other.finish_reason
        assert sum(step.emitted for step in other.history.steps) == len(other.history.sources) == len(other.tokens)


@pytest.mark.parametrize("name", ["windows", "gemma"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_layers_with_windows_and_turns_of_their_own_write_plain_texts(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(TINIES[name])
    ways, requests = Ways(monkeypatch, model, model.select_layers(range(model.num_layers - 1))), asked(4, 9, **options)
    runs, _ = ways.runs(requests, carries=True, burst=LONG)
    assert ways.carried
    assert any(len(one.path) > 1 for one in ways.carried) or options
    assert [run.tokens for run in runs] == [plain_tokens(model, request) for request in requests]


def test_a_watcher_ends_the_text_in_the_midst_of_rounds(ways: Ways) -> None:
    """As a stop string does; what was walked behind it is forgotten."""
    (request,) = asked(1)
    text = plain_tokens(ways.target, request)
    for most in (3, 7, 11, len(text) - 1):
        written: list[int] = []

        def watch(tokens: Sequence[int], drafted: int, written: list[int] = written, most: int = most) -> int | None:
            written += tokens
            return len(tokens) - (len(written) - most) if len(written) >= most else None

        with Engine(ways.target, drafter_of(ways.draft, True), options=EngineOptions(burst=LONG)) as engine:
            run = engine.submit(request, Auto, Auto.Options(), watch=watch)
            while run.finish_reason is None:
                engine.step()
            assert (run.tokens, run.finish_reason) == (text[:most], "stop")
            again = engine.submit(replace(request, prompt=(*request.prompt, *text[:most])), Auto, Auto.Options())
            while again.finish_reason is None:
                engine.step()
        rest = replace(request, prompt=(*request.prompt, *text[:most]))
        assert again.tokens == plain_tokens(ways.target, rest), "what is kept of a text that ended is not that text"


@pytest.mark.usefixtures("stated")
def test_both_sessions_hold_what_a_fresh_one_would(ways: Ways) -> None:
    """Bit by bit, after rounds that accepted branches of trees."""
    compared = 0
    for seed in range(4):
        (request,) = asked(1, seed)
        drafter = drafter_of(ways.draft, True)
        with Engine(ways.target, drafter, options=EngineOptions(burst=4.0), clock=Clock()) as engine:
            engine.costs.load_state_dict(
                {"rounds": CHEAP, "draft": {"model": 0.01, "ngram": 0.001}, "trust": {}, "growth": {}}
            )
            run = engine.submit(replace(request, max_tokens=60), Auto, Auto.Options())
            while len(run.tokens) < 40:
                engine.step()
                own = run.draft.state.parts[1] if run.draft.state is not None else None
                if own is None or own.session.pending or run.kv.session.pending:
                    continue
                sessions = (ways.target, run.kv.session, 0), (ways.draft, own.session, own.start)
                for model, session, start in sessions:
                    length = session.length
                    other = model.open(length + 8, 8)
                    model.score([chain(other, run.committed[start : start + length])])
                    other.keep(range(length))
                    assert np.array_equal(session.read(length), other.read(length))
                    compared += length > 0
    assert compared > 20
    assert any(one.path != [*range(len(one.path))] for one in ways.carried), "no branch was walked that had to be moved"


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": LogprobsOptions(2)},
        SAMPLED | {"adjustments": Adjustments(min_tokens=25, allowed=tuple(range(90)))},
        {"temperature": 0.8, "rule": "match"},
    ],
)
def test_who_asks_for_more_than_picked_tokens_is_served_step_by_step(ways: Ways, options: dict[str, Any]) -> None:
    """And so does the other request in the batch."""
    request, other = make_request([5, 6, 7, 5, 6], max_tokens=25, **options), asked(1)[0]
    ways.runs([request], carries=True)
    assert not ways.carried
    runs, _ = ways.runs([request, replace(other, max_tokens=60)], carries=True, burst=LONG)
    assert len(runs[0].tokens) == 25
    assert runs[1].tokens == plain_tokens(ways.target, replace(other, max_tokens=60))
    assert ways.carried, "the other one goes on alone"


def test_a_drafter_that_fails_costs_speed_only(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = asked(1)
    carry, calls = NativePair.carry, [0]

    def failing(pair: NativePair, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise MemoryError("no memory for a draft")
        return carry(pair, *given)

    monkeypatch.setattr(NativePair, "carry", failing)
    with pytest.warns(UserWarning, match="no memory for a draft"):
        (run,), _ = ways.runs([request], carries=True)
    assert run.tokens == plain_tokens(ways.target, request)


class Lucky(gumbel.Gumbel):
    """Picks what it likes."""

    def reduce(self, logits: Any, rows: Sequence[Any]) -> list[int]:
        return [7] * len(rows)


def test_a_rule_that_is_made_from_another_is_not_taken_for_it(ways: Ways) -> None:
    request = make_request([5, 6, 7, 5, 6], rule=Lucky(), max_tokens=20, temperature=0.8)
    (run,), _ = ways.runs([request], carries=True)
    assert run.tokens == [7] * 20
    assert not ways.carried


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**40},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {
            "adjustments": Adjustments(min_tokens=30, logit_bias=((5, 1.0), (5, -2.0))),
            "stop_ids": frozenset({6, 2**40}),
        },
    ],
)
def test_odd_options_write_plain_texts_beside_others(ways: Ways, options: dict[str, Any]) -> None:
    """And the drafter stays."""
    requests = [make_request([5, 6, 7, 5, 6], max_tokens=40, **(SAMPLED | options)), *asked(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs, _ = ways.runs(requests, carries=True)
    assert [run.tokens for run in runs] == [plain_tokens(ways.target, request) for request in requests]


def test_what_gives_nothing_is_tried_ever_later(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its time is none of a pass's."""
    calls: list[int] = []
    spent: list[float] = []
    build = Engine._build_batch

    def nothing(*_: Any) -> list[Any]:
        calls.append(len(spent))
        return []

    def watched(engine: Engine) -> Any:
        spent.append(engine.drafting.spent)
        return build(engine)

    monkeypatch.setattr(NativePair, "carry", nothing)
    monkeypatch.setattr(Engine, "_build_batch", watched)
    (request,) = asked(1)
    ways.runs([replace(request, max_tokens=200)], carries=True, step=0.01)
    gaps = [later - before for before, later in pairwise(calls)]
    assert all(gap >= min(2**failures, 64) for failures, gap in enumerate(gaps, 1))
    assert len(calls) == 7
    assert all(spent[step] > 0.0 for step in calls)


def test_rounds_that_cannot_be_carried_out_are_asked_for(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a row of scores has no order."""
    requests = asked(3)
    monkeypatch.setattr(NativePair, "carry", lambda *_: [])
    runs, _ = ways.runs(requests, carries=True, batch=1)
    assert [run.tokens for run in runs] == [plain_tokens(ways.target, request) for request in requests]
    assert sum(run.history.drafted["model"] for run in runs) > 0


@pytest.mark.parametrize("is_target", [True, False])
def test_rows_without_an_order_are_not_carried_out(target: NativeLlama, draft: NativeLlama, is_target: bool) -> None:
    """The kernels tell of no such round, and nothing of it is committed."""
    tensors = dict(reference.random_tensors(TINIES["tiny"]))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 3e38
    broken = NativeLlama.from_tensors(TINIES["tiny"], tensors.__getitem__)
    models = (broken, draft) if is_target else (target, broken)
    sessions = [model.open(40, 40) for model in models]
    sides = []
    for model, session in zip(models, sessions, strict=True):
        session.reserve(40)
        held, names = model.output_vocab()
        sides.append(
            kernels.Side(model.model_for_thread(), names, held, model.rope_table.table, 39, model.vocab_size - 1)
        )
    layers = 0 if is_target else 2
    plan = kernels.Plan(1.0, 1.0, 1.0, 4, layers, 0, 0.0, 0.0, 1.0, 0.0, -1e9, 0.0, [1.0], [])
    nodes = ([3], [-1], [0.0], [1.0])
    stores = (sessions[0].store, 0, sessions[1].store, 0)
    drafted = kernels.Drafted(
        *stores, [], nodes, plan, 1, True, 9, 20, [], None, [], kernels.Noise(0.0, 0, 0, 0, 1.0, 0.0)
    )
    times, growing = kernels.PassTimes([1.0, 1.0, 1.0, 1.0, 1.0], 4, []), kernels.Growing(2, 8, -9.0)
    assert kernels.Pair().carry_out(*sides, growing, 4, times, [drafted], 3, 9.0) == []
    assert (drafted.target_length, drafted.draft_length) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"budget": 0}, "budget is at least 1"),
    ],
)
def test_wrong_plans_are_refused(change: dict[str, Any], message: str) -> None:
    given = {
        "temperature": 1.0,
        "open": 1.0,
        "coverage": 1.0,
        "budget": 4,
        "deepest": 2,
        "explores": 0,
        "price": 1.0,
        "cost": 1.0,
    }
    given |= {"trust": 1.0, "row": 0.1, "least": -9.0, "copied": 0.0, "growth": [0.5], "due": []} | change
    with pytest.raises(ValueError, match=message):
        kernels.Plan(**given)


def test_wrong_trees_and_copies_are_refused(target: NativeLlama) -> None:
    store = target.open(8, 8).store
    plan = kernels.Plan(1.0, 1.0, 1.0, 4, 2, 0, 1.0, 1.0, 1.0, 0.1, -9.0, 0.0, [0.5], [])
    rest = (plan, 1, True, 9, 20, [], None, [], kernels.Noise(0.0, 0, 0, 0, 1.0, 0.0))
    for nodes, message in [
        (([], [], [], []), "for every node"),
        (([1, 2], [-1], [0.0, 0.0], [1.0, 1.0]), "for every node"),
        (([1, 2], [-1, 1], [0.0, 0.0], [1.0, 1.0]), "before its child"),
        (([1], [0], [0.0], [1.0]), "before its child"),
        (([1, 2], [-1, 0], [0.0, 0.0], [0.5, 0.6]), "as its parent at most"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernels.Drafted(store, 0, store, 0, [], nodes, *rest)
    with pytest.raises(ValueError, match="1 to 3 tokens"):
        kernels.Copies(4, 10, 2, 100, -9.0, 8)
    with pytest.raises(ValueError, match="out of range"):
        kernels.Copies(3, 10, 2, 100, -9.0, 8).extend([1 << 21])
    copies = kernels.Copies(3, 10, 2, 100, -9.0, 8)
    with pytest.raises(ValueError, match="for every kind"):
        kernels.Drafted(store, 0, store, 0, [], ([1], [-1], [0.0], [1.0]), *rest[:-3], copies, [0.0], rest[-1])


@pytest.mark.parametrize("block", [1, 7, 32])
def test_no_position_is_asked_for_behind_the_table(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Which reaches as far as sessions do and no further, where it is made in small pieces."""
    monkeypatch.setattr(rope_tables, "BLOCK", block)
    model = tiny(TINIES["tiny"])
    ways = Ways(monkeypatch, model, model.select_layers(range(model.num_layers - 1)))
    for seed in range(4):
        requests = asked(2, seed)
        runs, _ = ways.runs(requests, carries=True, burst=LONG, step=0.01)
        assert [run.tokens for run in runs] == [plain_tokens(model, request) for request in requests]
    assert ways.carried


def test_what_is_noted_of_rounds_is_what_they_were(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens of each, in their order, by the engine's costs and by the requests' own records."""
    noted: list[tuple[int, int]] = []
    inner = CostModel.record_round

    def watched(costs: CostModel, requests: int, rows: int, tokens: int, *more: Any, **options: Any) -> None:
        noted.append((rows, tokens))
        inner(costs, requests, rows, tokens, *more, **options)

    monkeypatch.setattr(CostModel, "record_round", watched)
    for seed in range(6):
        noted.clear()
        ways.carried.clear()
        (run,), _ = ways.runs(asked(1, seed), carries=True, burst=LONG, step=0.01)
        walked = [(len(one.picks), len(one.path)) for one in ways.carried]
        steps = [(step.verified_rows, step.emitted) for step in run.history.steps]
        cut = len(run.tokens) - sum(tokens for _, tokens in steps[:-1])
        assert steps[-1][1] == cut
        assert sum(step.accepted for step in run.history.steps) == len(run.history.sources) - run.history.sources.count(
            TARGET
        )
        rest = iter([*steps[:-1], (steps[-1][0], max(steps[-1][1], walked[-1][1]))])
        assert all(one in rest for one in walked), "a native round is missing in the record, or out of order"
        rest = iter(steps)
        assert all(one in rest for one in noted), "a recorded cost is missing in the record, or out of order"
        assert len(noted) >= len(walked) - 2


def test_fewer_rows_than_pay_are_tried_once_in_a_call(ways: Ways) -> None:
    """To know what so few cost; not in every round of it."""
    calls: list[list[bool]] = []
    inner = NativePair.carry

    def watched(pair: NativePair, *given: Any) -> list[list[Carried]]:
        done = inner(pair, *given)
        calls.append([row[0].is_fewer for row in done])
        return done

    ways._patch.setattr(NativePair, "carry", watched)
    for seed in range(8):
        ways.runs(asked(1, seed), carries=True, rows={"1": 1.0, "16": 1.01}, step=0.01, burst=LONG)
    assert any(map(any, calls))
    assert max(map(sum, calls)) == 1


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("context", [40, 64, 4096])
def test_a_draft_with_a_shorter_context_stops_there(target: NativeLlama, context: int, window: int) -> None:
    """Long before the text does, and without a warning."""
    draft = target.select_layers(range(target.num_layers - 1))
    draft.max_positions = min(context, target.max_positions)
    for length in (5, 30, 50, 90):
        prompt = [7 * n % 97 for n in range(length)]
        request = make_request([*prompt, *prompt[:5]], max_tokens=80)
        drafter = drafter_of(draft, True, target, draft_window=window)
        with Engine(target, drafter, options=EngineOptions(burst=LONG)) as engine, warnings.catch_warnings():
            warnings.simplefilter("error")
            run = engine.submit(request, Auto, Auto.Options())
            while run.finish_reason is None:
                engine.step()
        assert run.tokens == plain_tokens(target, request)


def test_a_long_text_that_the_draft_has_not_read_keeps_nobody_waiting(ways: Ways) -> None:
    """The draft reads one chunk of it a step where others write, as it does step by step."""
    chunk = _tree_expander.CHUNK
    ways._patch.setattr(_tree_expander, "CHUNK", 8)
    ways._patch.setattr(_carrier, "CHUNK", 8)
    reads: Counter[int] = Counter()
    inner, steps = _tree_expander.TreeExpander._read_chunk, [0]

    def watched(grower: Any, states: Any) -> None:
        reads[steps[0]] += 1
        inner(grower, states)

    ways._patch.setattr(_tree_expander.TreeExpander, "_read_chunk", watched)
    first, second = asked(1)[0], make_request([11 * n % 97 for n in range(200)], max_tokens=40)
    options = EngineOptions(chunk=256, batch=4, burst=LONG)
    with Engine(ways.target, drafter_of(ways.draft, True), options=options, clock=Clock()) as engine:
        engine.costs.load_state_dict(
            {"rounds": CHEAP, "draft": {"model": 0.01, "ngram": 0.001}, "trust": {}, "growth": {}}
        )
        runs = [engine.submit(replace(one, max_tokens=60), Auto, Auto.Options()) for one in (first, second)]
        while any(run.finish_reason is None for run in runs):
            steps[0] += 1
            engine.step()
    assert chunk > 8
    assert reads
    assert max(reads.values()) <= 2
    assert runs[1].tokens == plain_tokens(ways.target, replace(second, max_tokens=60))


def test_requests_that_pause_for_want_of_memory_write_their_texts(ways: Ways) -> None:
    requests = asked(4, 1)
    slots = ways.target.session_bytes(128) + ways.draft.session_bytes(512)
    drafter = drafter_of(ways.draft, True)
    options = EngineOptions(chunk=16, batch=4, burst=4.0, kv_memory=2.2 * slots / 2**30, reuse=False)
    with Engine(ways.target, drafter, options=options, clock=Clock()) as engine:
        runs = [engine.submit(replace(one, max_tokens=90), Auto, Auto.Options()) for one in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
    assert ways.carried
    for request, run in zip(requests, runs, strict=True):
        assert run.tokens == plain_tokens(ways.target, replace(request, max_tokens=90))


def test_a_missing_request_is_refused() -> None:
    model = tiny(TINIES["tiny"])
    model.open(8, 8)
    held, names = model.output_vocab()
    side = kernels.Side(model.model_for_thread(), names, held, model.rope_table.table, 7, model.vocab_size - 1)
    times = kernels.PassTimes([1.0], 1, [])
    with pytest.raises(ValueError, match="a request is missing"):
        kernels.Pair().carry_out(side, side, kernels.Growing(2, 8, -9.0), 4, times, [None], 1, 1.0)
