"""Rows ranked by the kernels and on the host, against their definitions over all tokens."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from test_enumeration import slow_exponential
from torch import Tensor
from turns import in_turn, one_of

from outpace.core.arrays import kernels
from outpace.core.logits import SparseLogits, largest_indices
from outpace.core.logprobs import token_logprobs
from outpace.core.noise import gumbel as gumbel_noise
from outpace.core.noise import key_words, row_key, row_words
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments, LogprobsOptions, Request, Row
from outpace.rules import base, greedy, gumbel, match
from outpace.rules.base import top_k_rows

GREEDY, GUMBEL, MATCH = greedy.Greedy(), gumbel.Gumbel(), match.Match()
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 2048, 10007)


def rank(scores: np.ndarray, count: int, temperature: float, keys: list[int], ids: object, whole: bool) -> list:
    return kernels.rank(scores, count, [temperature] * len(scores), keys, ids, whole)


def rank_by_torch(patch: pytest.MonkeyPatch) -> None:
    """Make the rules rank by their definition instead of the kernels."""
    patch.setattr(base, "host_rows", lambda scores: None)


def definition(row: np.ndarray, temperature: float, key: int | None, ids: np.ndarray | None, whole: bool) -> tuple:
    """All possible tokens, best first, and their values, in float64."""
    tokens = np.arange(len(row)) if ids is None else ids
    top = float(row.max())
    beside = (row.astype(np.float64) - top) / temperature
    values = beside + (0.0 if key is None else -np.log(slow_exponential(key, tokens)))
    values += -math.log(np.exp(beside).sum()) if whole else top / temperature
    order = np.argsort(-values, kind="stable")
    order = order[: int((row > -np.inf).sum())]
    return tokens[order].tolist(), values[order].tolist()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "temperature", [0.8, *(pytest.param(other, marks=pytest.mark.long) for other in (1.0, 0.05, 30.0))]
)
@pytest.mark.parametrize("held", SIZES)
def test_rows_are_ranked_as_the_definition_says(held: int, temperature: float, whole: bool) -> None:
    scores, ids = shapes(held, held).numpy(), np.sort(np.random.default_rng(held).permutation(3 * held)[:held])
    keys = [row_key(held, 0, place) for place in range(len(scores))]
    for asked in ([], keys):
        for tokens in (None, ids):
            rows = zip(scores, asked or [None] * len(scores), strict=True)
            defined = [definition(row, temperature, key, tokens, whole) for row, key in rows]
            for count in (1, 8, held, held + 5):
                got = rank(scores, count, temperature, asked, tokens, whole)
                for (best, values), (expected, exact) in zip(got, defined, strict=True):
                    assert best == expected[:count]
                    assert len(values) == len(best)
                    some = np.array(exact[:count])
                    assert (np.abs(values - some) <= 2e-6 + 1e-12 * np.abs(some)).all()


def test_rows_may_lie_in_a_wider_table() -> None:
    wide, ids = np.random.default_rng(1).standard_normal((5, 300)).astype(np.float32), np.arange(200) * 2
    assert rank(wide[1:4, 50:250], 6, 0.9, [3, 4, 5], ids, True) == rank(
        np.ascontiguousarray(wide[1:4, 50:250]), 6, 0.9, [3, 4, 5], ids, True
    )


def test_what_does_not_fit_is_refused() -> None:
    scores, ids = np.zeros((2, 6), np.float32), np.arange(6)
    for bad in (
        (scores, 0, [1.0, 1.0], [], ids, True),
        (scores, 2, [1.0], [], ids, True),
        (scores, 2, [1.0, 0.0], [], ids, True),
        (scores, 2, [1.0, math.nan], [], ids, True),
        (scores, 2, [1.0, 1.0], [7], ids, True),
        (scores, 2, [1.0, 1.0], [], ids[:5], True),
        (np.zeros((6, 2), np.float32).T, 2, [1.0, 1.0], [], ids, True),
        (scores, 2, [1.0, 1.0], [], ids, True, [(1, 1.0, 0.0)]),
        (scores, 2, [1.0, 1.0], [], ids, True, [(1, 1.0, 0.0), (-1, 1.0, 0.0)]),
        (scores, 2, [1.0, 1.0], [], ids, True, [(1, 0.0, 0.0), (1, 1.0, 0.0)]),
        (scores, 2, [1.0, 1.0], [], ids, True, [(1, 1.0, 0.0), (1, 1.0, math.nan)]),
    ):
        with pytest.raises(ValueError, match=r"must|has the wrong shape"):
            kernels.rank(*bad)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_row_without_an_order_gives_its_first_maximum(odd: float) -> None:
    scores = np.random.default_rng(2).standard_normal((4, 100)).astype(np.float32)
    scores[1, 99], scores[3] = odd, -np.inf
    assert [bool(tokens) for tokens, _ in rank(scores, 3, 1.0, [], None, True)] == [True, False, True, False]
    for rule, pick in ((GUMBEL, None), (MATCH, MATCH.pick)):
        rows = [Row(Request((1,), rule, sampling=Sampling(0.7)), [1]) for _ in scores]
        picks = [pick(node) if pick else node for node in rule.reduce(scores, rows)]
        assert [picks[1], picks[3]] == [99, 0]


def test_requests_of_many_kinds_share_a_call(way: str) -> None:
    requests = (
        Request((1,), GREEDY),
        Request((1, 2), GUMBEL, sampling=Sampling(0.8), seed=3),
        Request((1, 2), GUMBEL, sampling=Sampling(0.9, top_k=4), seed=3),
        Request((5,), GUMBEL, sampling=Sampling(0.8), adjustments=Adjustments(logit_bias=((3, 9.0),))),
        Request((5,), MATCH, sampling=Sampling(1.3, top_p=0.7)),
        Request((5,), GREEDY, adjustments=Adjustments(logit_bias=((3, -9.0),))),
    )
    rows = [Row(request, list(request.prompt), path) for request in requests for path in ((), (7,))]
    scores = torch.randn(len(rows), 500, generator=torch.Generator().manual_seed(1)) * 3
    together = top_k_rows(SparseLogits(scores, None, 500), rows, 6)
    for number, (row, (tokens, values)) in enumerate(zip(rows, together, strict=True)):
        ranked = row.request.rule.rank(scores[number : number + 1], [row])[0]
        best = ranked.topk(6)
        possible = int((best.values > -math.inf).sum())
        assert tokens == best.indices[:possible].tolist()
        assert values == pytest.approx(best.values[:possible].tolist(), abs=1e-5)


FILTERS = ((1, 1.0, 0.0), (5, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.5, 0.0), (0, 0.999, 0.0))
FILTERS += ((0, 0.001, 0.0), (0, 1.0, 0.05), (0, 0.9, 0.1), (50, 0.95, 0.02), (0, 1.0, 1.0), (2**40, 1.0, 0.0))


@pytest.mark.parametrize("held", [1, 2, 17, 64, 130, 2048, 10007])
def test_filters_leave_what_their_definition_leaves(held: int) -> None:
    """The pick is the race's winner among the tokens that remain; float32 and float64 may keep others at a border."""
    chance, scores = np.random.default_rng(held), shapes(held, held).numpy()
    asked = same = 0
    for temperature in (0.05, 0.7, 1.0, 2.0, 30.0):
        for top_k, top_p, min_p in FILTERS:
            sampling = Sampling(temperature, top_k, top_p, min_p)
            seeds = chance.integers(1 << 40, size=len(scores)).tolist()
            rows = [Row(Request((1,), GUMBEL, sampling=sampling, seed=seed), [1] * 9) for seed in seeds]
            exact = GUMBEL.run(torch.from_numpy(scores).double(), rows)
            for kind, (pick, expected) in enumerate(zip(GUMBEL.reduce(scores, rows), exact, strict=True)):
                if kind != 3:  # where float32 is coarse
                    asked, same = asked + 1, same + (pick == expected)
    assert same > 0.995 * asked


def test_drafts_are_ranked_among_what_filters_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by torch, but for the token at a border in one row or another."""
    scores = torch.randn(60, 3000, generator=torch.Generator().manual_seed(3)) * 4
    held, same = SparseLogits(scores, np.arange(3000) * 3 + 1, 9001), 0
    for top_k, top_p, min_p in FILTERS:
        for rule in (GUMBEL, MATCH):
            sampling = Sampling(0.8, top_k, top_p, min_p)
            rows = [Row(Request((1,), rule, sampling=sampling, seed=4), [1] * (place + 1)) for place in range(60)]
            fast = top_k_rows(held, rows, 6)
            with monkeypatch.context() as patched:
                rank_by_torch(patched)
                slow = top_k_rows(held, rows, 6)
            for (tokens, values), (others, exact) in zip(fast, slow, strict=True):
                same += tokens == others and values == pytest.approx(exact, abs=0.01)
    assert same > 0.99 * 60 * 2 * len(FILTERS)


def test_the_keys_of_many_positions_are_those_of_each() -> None:
    places = np.array([0, 1, 77, 2**31, 2**40])
    for seed, choice in ((0, 0), (5, 3), (2**63 - 1, 2**32)):
        found = row_words(seed, choice, places)
        assert found.dtype == np.int32
        assert found.tolist() == [list(key_words(row_key(seed, choice, int(place)))) for place in places]


SAMPLINGS = (
    Sampling(0.8),
    Sampling(0.05),
    Sampling(2.5),
    Sampling(0.9, top_k=5),
    Sampling(1.2, top_p=0.9),
    Sampling(0.7, min_p=0.05),
    Sampling(1.0, top_k=40, top_p=0.8, min_p=0.01),
)
VOCABULARIES = (1, 2, 63, 64, 130, 2048, 49152)


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rank by the kernels, or by the definition."""
    if request.param == "torch":
        rank_by_torch(monkeypatch)
    name: str = request.param
    return name


def rows_of(rule: object, sampling: Sampling, seed: int, count: int) -> list[Row]:
    request = Request((1,), rule, sampling=sampling, seed=seed)
    return [Row(request, [1] * (place + 1)) for place in range(count)]


def shapes(vocab: int, seed: int) -> Tensor:
    """Rows of many kinds: flat, peaked, tied, far from 0, mostly -inf, coarse. [rows, vocab]"""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(9, vocab, generator=chance)
    x[1] *= 12
    x[2] = x[2].mul(2).round()  # full of ties
    x[3] += 3e4
    x[4] = 0.0
    x[5, torch.randperm(vocab, generator=chance)[: vocab // 2]] = -math.inf
    x[6] = torch.where(x[6] > x[6].max() - 0.5, 40.0, -1e30)
    x[7] *= 1e-4
    x[8] = x[8].mul(4).sub(5).bfloat16().float()
    return x


@pytest.mark.parametrize("seed", one_of(4, range(4)))
def test_a_token_that_the_noise_lifts_wins_from_any_depth(seed: int) -> None:
    """The luckiest token of all, as far below the top as it can be and still win, or just lose."""
    vocab = 4096
    for position in range(60):
        key = row_key(seed, 0, position)
        noise = gumbel_noise([key], vocab)[0]
        lucky, top = int(noise.argmax()), int(noise.argmin())
        logits = torch.full((1, vocab), -60.0)
        logits[0, top] = 0.0
        for gap in (-0.1, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 0.1):
            logits[0, lucky] = noise[top] - noise[lucky] + gap
            rows = [Row(Request((1,), GUMBEL, sampling=Sampling(1.0), seed=seed), [1] * position)]
            picks = GUMBEL.reduce(logits, rows)
            assert abs(gap) < 1e-5 or picks == GUMBEL.run(logits, rows)
            assert abs(gap) < 0.01 or noise[top] < -2.4 or picks == [lucky if gap > 0 else top]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_largest_of_a_row(vocab: int) -> None:
    for row in shapes(vocab, 5).numpy():
        for count in {0, 1, min(8, vocab), min(200, vocab), vocab}:
            expected = sorted(range(vocab), key=lambda place: (-row[place], place))[:count] if vocab < 5000 else None
            got = largest_indices(row, count)
            assert expected is None or got.tolist() == expected
            assert np.array_equal(row[got], -np.sort(-row)[:count])


@pytest.mark.parametrize(("sampling", "vocab"), in_turn([Sampling(), *SAMPLINGS], [64, 2048, 20000]), ids=str)
def test_the_best_tokens_are_the_top_of_the_rank(vocab: int, sampling: Sampling, way: str) -> None:
    """From all rows or from held ones; values to float32's precision, tokens where these differ."""
    ids = np.sort(np.random.default_rng(3).permutation(vocab)[: max(vocab // 5, 8)])
    for rule in (GREEDY,) if sampling.is_greedy else (GUMBEL, MATCH):
        for seed in range(4):
            logits = shapes(vocab, seed)
            rows = rows_of(rule, sampling, seed, len(logits))
            for held in (SparseLogits(logits, None, vocab), SparseLogits(logits[:, torch.from_numpy(ids)], ids, vocab)):
                wide = held.to_dense()
                ranked = rule.rank(wide, rows)
                for (tokens, values), rank, row in zip(top_k_rows(held, rows, 8), ranked, wide, strict=True):
                    if way == "native" and sampling.filters and abs(float(row.max())) / sampling.temperature > 1e30:
                        assert tokens == []  # so far from 0 the kernels apply no filters
                        continue
                    # The kernels divide x - top, the definition x, in float32: it is the rougher of the two.
                    # Far from 0 its logarithms are so coarse that it may leave another token at a filter's border.
                    near = (2.0**-20 if sampling.filters else 2.0**-22) if way == "native" else 0.0
                    rough = near * abs(float(row.max())) / (sampling.temperature or 1.0)
                    expected = [value for value in rank.topk(8).values.tolist() if value > -math.inf]
                    slack = rough + (2e-3 if abs(expected[0]) > 1e3 else 1e-4)
                    assert values == pytest.approx(expected, abs=slack, rel=near)
                    assert rank[tokens].tolist() == pytest.approx(expected, abs=rough + 2e-3)
                    assert len(set(tokens)) == len(tokens)


def test_a_rule_that_is_pickled_picks_the_same() -> None:
    logits, rows = shapes(2048, 1), rows_of(GUMBEL, Sampling(0.8), 1, 9)
    before = GUMBEL.reduce(logits, rows)
    again = pickle.loads(pickle.dumps(GUMBEL))
    assert again.reduce(logits, rows) == before
    assert len(pickle.dumps(GUMBEL)) < 500


def test_log_probabilities_are_those_of_the_whole_softmax() -> None:
    logits = shapes(2048, 2)
    tokens = list(range(len(logits)))
    whole = torch.log_softmax(logits, dim=-1)
    records = token_logprobs(logits, [], tokens, LogprobsOptions(5))
    for row, record in zip(whole, records, strict=True):
        best = [value for value in row.topk(5).values.tolist() if value > -math.inf]
        assert record.logprob == pytest.approx(row[record.token].item(), abs=2e-6, rel=1e-6)
        assert [value for _, value in record.top] == pytest.approx(best, abs=2e-6, rel=1e-6)
        assert [row[token].item() for token, _ in record.top] == pytest.approx(best, abs=2e-6, rel=1e-6)
