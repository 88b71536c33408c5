"""How often the host waits for a device: once for a batch's picks, once for a drafter's offers. A stand-in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles import QuickToy, make_request
from engine_runs import submit
from torch.overrides import TorchFunctionMode

from outpace.core.logits import SparseLogits
from outpace.core.logprobs import token_logprobs
from outpace.core.sampling import Sampling, filter_logits
from outpace.core.types import LogprobsOptions, Request, Row
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.rules.base import reduce_rows, top_k_rows
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel
from outpace.rules.match import Match

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
COPIES = {"tensor", "as_tensor", "new_tensor"}  # from memory that is not pinned: they wait too
SAMPLED = [
    Sampling(0.8),
    Sampling(0.8, top_p=0.9),
    Sampling(0.7, top_k=20),
    Sampling(1.2, top_k=30, top_p=0.8, min_p=0.01),
    Sampling(1.0, min_p=0.05),
]


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
    assert waits.count == 1, waits.seen


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
    monkeypatch.setattr("outpace.core.logprobs.is_on_host", lambda scores: False)
    assert [run.history.logprobs for run in reports(REPORTED, most=3)] == here
    assert all(len(records) == 6 for records in here)


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
    monkeypatch.setattr("outpace.core.logprobs.is_on_host", lambda scores: False)
    with Waits() as waits:
        assert token_logprobs(given, [], tokens, LogprobsOptions(min(top, 1024))) == here
    assert waits.count == 1, waits.seen


def test_a_fault_in_one_requests_log_probabilities_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [run.history.logprobs for run in reports(REPORTED)]

    def failing(logits: Any, rows: Sequence[Row], *given: Any) -> Any:
        if any(row.request is REPORTED[1] for row in rows):
            raise ValueError("the second")
        return token_logprobs(logits, rows, *given)

    monkeypatch.setattr("outpace.engine.target_runner.token_logprobs", failing)
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
