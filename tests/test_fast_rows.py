"""Single rows on the host against the definitions over all tokens: winners bit by bit, offers, the largest of a row."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from turns import in_turn, one_of

from outpace.core.logits import SparseLogits, largest_indices
from outpace.core.logprobs import token_logprobs
from outpace.core.noise import exponential, gumbel, gumbel_from_hashes, row_key, token_hashes
from outpace.core.sampling import Sampling
from outpace.core.types import LogprobsOptions, Request, Row
from outpace.rules import _ranking, greedy, match
from outpace.rules import gumbel as gumbel_rule
from outpace.rules._ranking import REACH, Race
from outpace.rules.base import top_k_rows

GREEDY, GUMBEL, MATCH = (module.build(module.Options()) for module in (greedy, gumbel_rule, match))
FILTERS = (
    Sampling(0.8),
    Sampling(0.05),
    Sampling(2.5),
    Sampling(0.9, top_k=5),
    Sampling(1.2, top_p=0.9),
    Sampling(0.7, min_p=0.05),
    Sampling(1.0, top_k=40, top_p=0.8, min_p=0.01),
)
SIZES = (1, 2, 63, 64, 130, 2048, 49152)


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are ranked by the kernels, or as where these are missing."""
    if request.param == "numpy":
        monkeypatch.setattr(_ranking, "native_rank", lambda: None)
    elif _ranking.native_rank() is None:
        pytest.skip("the kernels are not installed")
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


@pytest.mark.parametrize("seeds", [2, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_winners_are_those_of_the_whole_race(vocab: int, sampling: Sampling, seeds: int, way: str) -> None:
    found = 0
    for seed in range(min(seeds, 3 if vocab > 5000 else 30)):
        logits = shapes(vocab, seed)
        rows = rows_of(GUMBEL, sampling, seed, len(logits))
        assert GUMBEL.reduce(logits, rows) == GUMBEL.run(logits, rows)
        found += sum(pick is not None for pick in GUMBEL._winners(logits.numpy(), rows))
    assert found or vocab == 1 or sampling.temperature < 0.1, "nothing was decided on the fast path"


@pytest.mark.parametrize("seed", one_of(4, range(4)))
def test_a_token_that_the_noise_lifts_wins_from_any_depth(seed: int, way: str) -> None:
    """The luckiest token of all, as far below the top as it can be and still win, or just lose."""
    vocab = 4096
    for position in range(60):
        key = row_key(seed, 0, position)
        noise = gumbel([key], vocab)[0]
        lucky, top = int(noise.argmax()), int(noise.argmin())
        logits = torch.full((1, vocab), -60.0)
        logits[0, top] = 0.0
        for gap in (-0.1, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 0.1):
            logits[0, lucky] = noise[top] - noise[lucky] + gap
            rows = [Row(Request((1,), GUMBEL, sampling=Sampling(1.0), seed=seed), [1] * position)]
            assert GUMBEL.reduce(logits, rows) == GUMBEL.run(logits, rows)
            if abs(gap) > 0.01 and noise[top] > -2.4:
                assert Race().winner(logits[0].numpy(), 1.0, key) == (lucky if gap > 0 else top)


def test_a_row_too_close_to_call_is_not_called() -> None:
    key, vocab = row_key(1, 0, 5), 512
    noise = gumbel([key], vocab)[0]
    logits = -noise  # all of them finish together
    assert Race().winner(logits.numpy(), 1.0, key) is None
    for bad in (math.nan, math.inf):
        logits = torch.zeros(vocab)
        logits[7] = bad
        assert Race().winner(logits.numpy(), 1.0, key) is None
    assert Race().winner(np.full(vocab, -np.inf, np.float32), 1.0, key) is None
    assert Race().winner(torch.randn(vocab).numpy(), 1e-8, key) is None


def test_unlucky_tops_are_left_to_the_whole_race() -> None:
    """Where the likely ones' noise is so bad that a token that is neither likely nor lucky might win."""
    vocab = 4096
    keys = [row_key(0, 0, position) for position in range(500)]
    key = min(keys, key=lambda key: float(gumbel([key], 1)[0, 0]))
    logits = torch.full((vocab,), -REACH - 0.01)
    logits[0] = 0.0
    winner = Race().winner(logits.numpy(), 1.0, key)
    weights = torch.exp(logits - logits.max())
    assert winner in (None, int((weights / exponential([key], vocab)[0]).argmax()))


def test_hashes_and_noise_are_those_of_the_whole_row() -> None:
    for seed in range(20):
        key, tokens = row_key(seed, 1, 2), np.array(sorted(random.Random(seed).sample(range(200_000), 500)))
        whole = gumbel([key], 200_000)[0].double().numpy()[tokens]
        assert np.abs(gumbel_from_hashes(token_hashes(key, tokens)) - whole).max() < 4e-6
        lucky = Race().lucky(key, 200_000)
        e = exponential([key], 200_000)[0].numpy()
        assert set(np.flatnonzero(e < 2.0**-8 * 0.999)) <= set(lucky.tokens) <= set(np.flatnonzero(e < 2.0**-8 * 1.003))


@pytest.mark.parametrize("vocab", SIZES)
def test_the_largest_of_a_row(vocab: int) -> None:
    for row in shapes(vocab, 5).numpy():
        for count in {0, 1, min(8, vocab), min(200, vocab), vocab}:
            expected = sorted(range(vocab), key=lambda place: (-row[place], place))[:count] if vocab < 5000 else None
            got = largest_indices(row, count)
            assert expected is None or got.tolist() == expected
            assert np.array_equal(row[got], -np.sort(-row)[:count])


@pytest.mark.parametrize(("sampling", "vocab"), in_turn([Sampling(), *FILTERS], [64, 2048, 20000]), ids=str)
def test_offers_are_the_top_of_the_rank(vocab: int, sampling: Sampling, way: str) -> None:
    """From all rows or from held ones; values to float32's precision, tokens where these differ."""
    ids = np.sort(np.random.default_rng(3).permutation(vocab)[: max(vocab // 5, 8)])
    for rule in (GREEDY,) if sampling.is_greedy else (GUMBEL, MATCH):
        for seed in range(4):
            logits = shapes(vocab, seed)
            rows = rows_of(rule, sampling, seed, len(logits))
            for held in (SparseLogits(logits, None, vocab), SparseLogits(logits[:, torch.from_numpy(ids)], ids, vocab)):
                wide = held.wide()
                ranked = rule.rank(wide, rows)
                for (tokens, values), rank, row in zip(top_k_rows(held, rows, 8), ranked, wide, strict=True):
                    # The kernels divide x - top, the definition x, in float32: it is the rougher of the two.
                    # Far from 0 its logarithms are so coarse that it may leave another token at a filter's border.
                    near = (2.0**-20 if sampling.filters else 2.0**-22) if way == "native" else 0.0
                    rough = near * abs(float(row.max())) / (sampling.temperature or 1.0)
                    expected = [value for value in rank.topk(8).values.tolist() if value > -math.inf]
                    slack = rough + (2e-3 if abs(expected[0]) > 1e3 else 1e-4)
                    assert values == pytest.approx(expected, abs=slack, rel=near)
                    assert rank[tokens].tolist() == pytest.approx(expected, abs=rough + 2e-3)
                    assert len(set(tokens)) == len(tokens)


def test_a_rule_that_remembers_noise_travels() -> None:
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
        best = row.topk(5)
        assert record.logprob == row[record.token].item()
        assert [value for _, value in record.top] == [value for value in best.values.tolist() if value > -math.inf]
        assert all(row[token].item() == value for token, value in record.top)
