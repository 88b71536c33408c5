"""How much is done for a text and for waiting requests: passes, rows, draft forwards, calls, waits for a device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from doubles import Empty, QuickToy, decode, decoder_of, make_request, write
from engine_runs import finish, submit
from timed import Stopwatch, Timed
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.core.logits import SparseLogits
from outpace.core.logprobs import token_logprobs
from outpace.core.sampling import Sampling, filter_logits
from outpace.core.tree import TokenTree
from outpace.core.types import (
    Commit,
    Draft,
    DraftState,
    LogprobsOptions,
    Observation,
    Request,
    Row,
    TokenLogprobs,
    Verify,
)
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.base import DecoderGenerator, RequestContext
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part
from outpace.planning import planner
from outpace.rules.base import reduce_rows, top_k_rows
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel
from outpace.rules.match import Match

WHOLE = EngineOptions(nodes=12, rows=256, chunk=64, reuse=False)
READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
COPIES = {"tensor", "as_tensor", "new_tensor"}  # from memory that is not pinned: they wait too
SAMPLED = [
    Sampling(0.8),
    Sampling(0.8, top_p=0.9),
    Sampling(0.7, top_k=20),
    Sampling(1.2, top_k=30, top_p=0.8, min_p=0.01),
    Sampling(1.0, min_p=0.05),
]


class Counted(QuickToy):
    """A toy that counts its passes, their rows, and the rows whose scores are asked for."""

    def __init__(self, seed: int = 0, order: int = 3) -> None:
        super().__init__(16, order, seed)
        self.work: Counter[str] = Counter()

    def score(self, forest: Sequence[Part]) -> Tensor:
        self.work["passes"] += 1
        self.work["rows"] += sum(len(part.tokens) for part in forest)
        self.work["wanted"] += sum(len(part.logit_rows) for part in forest)
        return super().score(forest)


class CountedEmpty(Empty):
    """Offers nothing, and counts its calls."""

    asked = observed = 0

    def observe(self, state: DraftState, seen: Observation) -> None:
        self.observed += 1
        assert len(seen.node_ids) == len(seen.tokens), "a path that is walked, one token behind each node"
        assert len(set(seen.node_ids)) == len(seen.node_ids)
        assert seen.tree.tokens == [seen.tokens[-1]]
        super().observe(state, seen)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        self.asked += 1
        super().grow(states, trees)


def requests_of(count: int, max_tokens: int, rule: Any = "greedy") -> list[Request]:
    prompts = [[(7 * place * place + number) % 16 for place in range(11)] for number in range(count)]
    return [make_request(prompt, rule, max_tokens) for prompt in prompts]


def run(target: Any, requests: Sequence[Request], method: str = "autoregressive", *args: Any, **more: Any) -> Any:
    outcome = decode(requests, method, *args, target=target, check_storage=False, **({"engine": WHOLE} | more))
    toy = getattr(target, "_toy", target)
    assert outcome.texts == [write(toy, request) for request in requests]
    return outcome


def test_plain_decoding_is_a_pass_a_token() -> None:
    target = Counted()
    run(target, requests_of(1, 9), engine=EngineOptions(chunk=4))
    assert target.work == {"passes": 3 + 9, "rows": 10 + 9, "wanted": 9}  # a prompt of ten tokens, by four


@pytest.mark.parametrize("count", [1, 4])
def test_a_perfect_chain_is_a_pass_for_five_tokens(count: int) -> None:
    target, draft = Counted(), Counted()
    run(target, requests_of(count, 20), "speculative", ModelDrafter(draft, Options(width=1, floor=0.0)))
    assert target.work == {"passes": 1 + 4, "rows": count * (10 + 20), "wanted": count * 20}
    # Each round four forwards for all requests; the first of a round reads what was written since, two tokens at most.
    assert draft.work == {"passes": 16, "rows": count * (10 + 16 + 3), "wanted": count * 16}


def test_a_tree_is_grown_by_at_most_as_many_forwards_as_it_has_layers() -> None:
    target, draft = Counted(), Counted(99, 2)
    outcome = run(target, requests_of(3, 12), "speculative", ModelDrafter(draft, Options()), draft_length=3)
    rounds = [len(steps) for steps in outcome.steps]
    assert target.work["passes"] == 1 + max(rounds)
    assert target.work["wanted"] == sum(step.verified_rows for steps in outcome.steps for step in steps)
    assert max(rounds) < draft.work["passes"] <= 3 * max(rounds), "none where no node that is new could be verified"
    assert draft.work["wanted"] <= sum(rounds) * (1 + 4 + 4), "the root, then the four best nodes"


def seldom(place: RequestContext, options: None) -> DecoderGenerator:
    """A decoder that drafts in every fourth round."""
    tree = TokenTree(place.last_token)
    for number in itertools.count(1):
        if number % 4 == 0:
            yield Draft(tree)
        picks = yield Verify(tree)
        tree = yield Commit(tree, place.request.rule.walk(tree, picks))


def test_rounds_without_drafts_are_observed_together() -> None:
    """Of 30 tokens the drafter drafts and observes in every fourth round; at the end it knows the whole text."""
    decoder = decoder_of(seldom, "sequential")
    target, empty, texts = Counted(), CountedEmpty(), []
    empty.close = lambda state: texts.append(state.tokens)  # type: ignore[method-assign]
    with Engine(target, empty, options=WHOLE) as engine:
        request = requests_of(1, 30)[0]
        run = engine.submit(request, decoder, None)
        finish(engine, run)
    assert (empty.asked, empty.observed) == (7, 8), "before each draft, and at the end"
    whole = [*request.prompt, *write(target, request)]
    assert run.committed == whole
    assert texts == [whole[:-1]], "the end of a text is not followed by a draft"


def test_card_is_a_pass_a_round_and_drafts_while_it_runs() -> None:
    target, draft = Counted(), Counted()
    worker = InlineWorker(ModelDrafter(draft, Options()), SimulatedClock(lambda: 1.0, lambda rows: 4.0))
    outcome = run(target, requests_of(1, 30), "card", worker=worker, just_in_time=0)
    rounds = len(outcome.steps[0])
    assert target.work["passes"] == 1 + rounds < 1 + 30
    most = 4 * (1 + rounds) + 1
    assert draft.work["passes"] <= most, "four forwards during every pass, and one that the end cuts off"
    assert draft.work["passes"] >= rounds


def test_the_time_of_planning_counts_as_part_of_rounds_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is not free: the time for planning the next layer counts as part of a draft step."""
    watch, target, asked = Stopwatch(), QuickToy(16, 3, 0), planner.Planner.next_width

    def next_width(planner: Any, tree: TokenTree, model: Any) -> int:
        watch.now += 0.4
        return asked(planner, tree, model)

    monkeypatch.setattr(planner.Planner, "next_width", next_width)
    drafter = ModelDrafter(Timed(target, watch, 0.5, 0.0), Options(width=1))
    with Engine(Timed(target, watch, 6.0, 0.1), drafter, options=WHOLE, clock=watch) as engine:
        run = engine.submit(requests_of(1, 100)[0], Auto, Auto.Options(deepest=4))
        finish(engine, run)
        costs, (source,) = engine.costs, drafter.capabilities.sources
    assert run.history.steps[-2].verified_rows == 5
    assert costs.pass_seconds(5) == pytest.approx(6.0 + 4 * 0.1 + 0.4, abs=0.1), "planning the first layer"
    assert costs.draft_seconds(source) == pytest.approx(0.5 + 0.4), "and then the next one"


class Waits(TorchFunctionMode):
    """Counts what would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.seen[name] += name in READS | COPIES
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return sum(self.seen.values())


def rows_of(rule: Any, samplings: list[Sampling]) -> list[Row]:
    requests = [Request((1, 2), rule, 9, sampling, n) for n, sampling in enumerate(samplings)]
    return [Row(request, [1, 2], path) for request in requests for path in ((), (3,), (3, 4))]


def scores(count: int, vocab: int = 3000) -> torch.Tensor:
    """In half precision, which goes the way of a device's rows on a CPU too."""
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.core.sampling._NUCLEUS", 1 << 30)  # as where it is not a CPU


@pytest.mark.parametrize(
    ("rule", "samplings"),
    [(Greedy(), [Sampling()] * 5), (Gumbel(), SAMPLED), (Match(), SAMPLED)],
    ids=["greedy", "gumbel", "match"],
)
def test_the_host_waits_once_for_a_batch(rule: Any, samplings: list[Sampling]) -> None:
    rows = rows_of(rule, samplings)
    given = scores(len(rows))
    with Waits() as waits:
        picks = reduce_rows(given, rows)
    assert len(picks) == len(rows)
    assert waits.count == 1, waits.seen
    with Waits() as waits:
        offers = top_k_rows(SparseLogits(given, None, given.shape[1]), rows, 8)
    assert [len(tokens) for tokens, _ in offers] == [8] * len(rows)
    assert waits.count == 1, waits.seen


def test_the_host_waits_once_for_a_likelihood() -> None:
    drafter = ModelDrafter(QuickToy(16, 3, 0), Options())
    state = drafter.open(make_request((1, 2, 3)))
    with Waits() as waits:
        assert len(drafter.likelihood(state, [7, 2, 9, 9, 4]) or ()) == 5
    assert waits.seen["cpu"] == 1, waits.seen  # what follows is on the host


def test_a_gpu_gets_more_rows_and_longer_chunks_in_a_pass() -> None:
    """A row adds little to the time of its pass, which is that of reading all weights."""
    sizes = []
    for device in ("cuda:0", "cpu"):
        target = QuickToy(16, 3, 0)
        target.device = device
        with Engine(target, options=EngineOptions(kv_memory=0.01)) as engine:
            sizes.append((engine._max_rows, engine._chunk))
    assert sizes == [(512, 2048), (64, 256)]


REPORTED = [
    make_request((number, 2), rule="gumbel", temperature=0.8, top_k=9, seed=number, max_tokens=6, logprobs=options)
    for number, options in enumerate([LogprobsOptions(3, processed=True)] * 4 + [LogprobsOptions(2)] * 3)
]


def reports(requests: Sequence[Request], most: int | None = None) -> list[TokenSequence]:
    """Return the results of plain decoding, with at most `most` waits per round."""
    with Engine(QuickToy(16, 3, 0), options=EngineOptions(rows=16, batch=8)) as engine:
        runs = submit(engine, *requests)
        engine.step()  # the prompts
        while any(run.finish_reason is None for run in runs):
            with Waits() as waits:
                engine.step()
            assert most is None or waits.count <= most, waits.seen
    return runs


def test_the_host_waits_once_for_all_log_probabilities_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the picks, once for each of the two kinds; and they are those of each request alone, on the host."""
    here = [run.history.logprobs for request in REPORTED for run in reports([request])]
    monkeypatch.setattr("outpace.core.logprobs.host_rows", lambda scores: None)
    for run, records in zip(reports(REPORTED, most=3), here, strict=True):
        assert_equal_records(run.history.logprobs, records)
    assert all(len(records) == 6 for records in here)


def assert_equal_records(records: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> None:
    """Compare records of log-probabilities; values to float32's precision."""
    assert [(one.token, [token for token, _ in one.top]) for one in records] == [
        (one.token, [token for token, _ in one.top]) for one in others
    ]
    for one, other in zip(records, others, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-6)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "top"), [(150, 5), (150, 0), (3, 4000), (0, 5)])
def test_log_probabilities_on_a_device_equal_those_of_the_host(
    count: int, top: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many equal scores, and tokens that are left out."""
    given = (scores(count).double() * 4).round().to(dtype)
    given[:, ::7] = -torch.inf
    tokens = [n * 19 % given.shape[1] for n in range(count)]
    here = token_logprobs(given, [], tokens, LogprobsOptions(min(top, 1024)))
    monkeypatch.setattr("outpace.core.logprobs.host_rows", lambda scores: None)
    with Waits() as waits:
        there = token_logprobs(given, [], tokens, LogprobsOptions(min(top, 1024)))
    assert waits.count == 1, waits.seen
    assert_equal_records(there, here)


def test_a_fault_in_one_requests_log_probabilities_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [run.history.logprobs for run in reports(REPORTED)]

    def failing(logits: Any, rows: Sequence[Row], *given: Any) -> Any:
        if any(row.request is REPORTED[1] for row in rows):
            raise ValueError("the second")
        return token_logprobs(logits, rows, *given)

    monkeypatch.setattr("outpace.core.logprobs.token_logprobs", failing)
    first, second, *others = reports(REPORTED)
    assert (second.finish_reason, str(second.error), second.history.logprobs) == ("error", "the second", [])
    assert [run.history.logprobs for run in (first, *others)] == [expected[0], *expected[2:]]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_filters_that_read_nothing_back_keep_the_same_tokens(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scores(6).float()
    without_reads = filter_logits(given, [sampling] * 6)
    monkeypatch.setattr("outpace.core.sampling._NUCLEUS", 64)
    assert torch.equal(filter_logits(given, [sampling] * 6), without_reads)


WORK: Counter[str] = Counter()
LENGTH, WAITING, CHUNK = 4096, 100, 256


class Token(int):
    """A token that counts comparisons and hashes."""

    def __eq__(self, other: object) -> bool:
        WORK["compared"] += 1
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        WORK["compared"] += 1
        return int.__ne__(self, other)

    def __hash__(self) -> int:
        WORK["hashed"] += 1
        return int.__hash__(self)


def prompt(start: int, end: int) -> list[Token]:
    """Return LENGTH tokens: a beginning for each `start`, and an ending for each `end`."""
    stem = [Token((start + 7 * place + place * place // 3) % 16) for place in range(LENGTH - 4)]
    return [*stem, *(Token(end >> shift & 15) for shift in (12, 8, 4, 0))]


@pytest.fixture
def engine() -> Iterator[Engine]:
    WORK.clear()
    with closing(Engine(Counted(), options=EngineOptions(batch=4, chunk=CHUNK, kv_memory=0.01))) as made:
        yield made


def step(engine: Engine) -> Counter[str]:
    """Return the work of one step."""
    assert isinstance(engine.target, Counted)
    WORK.clear()
    engine.target.work.clear()
    engine.step()
    return WORK + Counter(passes=engine.target.work["passes"], rows=engine.target.work["rows"])


def submit_requests(engine: Engine, start: int, count: int) -> None:
    for number in range(count):
        request = make_request(prompt(start, number), max_tokens=4)
        engine.submit(request, Autoregressive, Autoregressive.Options())


def test_a_request_that_waits_for_a_shared_prefix_compares_once(engine: Engine) -> None:
    submit_requests(engine, 0, 1 + WAITING)
    assert WORK == {"hashed": (1 + WAITING) * (LENGTH - LENGTH % 16)}, "each block is hashed when its request comes"
    first = step(engine)
    assert first["compared"] <= WAITING * LENGTH
    assert len(engine.waiting) == WAITING
    for _ in range(LENGTH // CHUNK - 3):
        assert step(engine) == {"passes": 1, "rows": CHUNK}, "nothing is looked up again"
    assert len(engine.waiting) == WAITING


def test_a_request_that_waits_for_a_slot_costs_nothing(engine: Engine) -> None:
    for start in range(4):
        submit_requests(engine, start, 1)
    submit_requests(engine, 9, WAITING)
    step(engine)
    assert len(engine.running) == 4
    for _ in range(10):
        work = step(engine)
        assert set(work) == {"passes", "rows"}, "nothing is compared or hashed"
        assert work["passes"] == 1
        assert 0 < work["rows"] <= CHUNK
