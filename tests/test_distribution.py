"""Distributions on the host against the plain formulas: filters, draws, residuals, tiny sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from doubles import make_request
from test_ranking import SAMPLINGS as FILTERS
from test_ranking import VOCABULARIES as SIZES
from test_ranking import shapes

from outpace.core.distribution import TokenDistribution, distribution_of, one_hot
from outpace.core.sampling import Sampling, log_probs
from outpace.core.types import Row
from outpace.rules.match import Match

TIED = (2, 3, 4, 8)  # rows of `shapes` in which equal scores stay or go together
EDGES = (0.0, 2.0**-53, 0.3, 0.5, 0.999999, 1.0 - 2.0**-53)


def random_chances(seed: int, size: int, kept: int | None = None, dtype: type = np.float64) -> TokenDistribution:
    """Of `size` tokens, or of `kept` of them; some weigh nothing."""
    chance = np.random.default_rng(seed)
    weights = chance.exponential(size=kept or size) ** 3 * (chance.random(kept or size) < 0.9)
    weights[-1] += 0.1
    tokens = None if kept is None else np.sort(chance.choice(size, kept, replace=False))
    return TokenDistribution(weights.astype(dtype), tokens)


def dense(chances: TokenDistribution, size: int) -> np.ndarray:
    """By a loop over its tokens, in float64."""
    row = np.zeros(size)
    tokens = range(len(chances.weights)) if chances.tokens is None else chances.tokens.tolist()
    for token, weight in zip(tokens, chances.weights.tolist(), strict=True):
        if token < size:
            row[token] = weight
    return row / sum(chances.weights.tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_a_distribution_equals_the_slow_definition(vocab: int, sampling: Sampling, dtype: torch.dtype) -> None:
    for seed, row in itertools.product(range(2), range(9)):
        scores = shapes(vocab, seed)[row].to(dtype)
        exact = torch.exp(log_probs(scores[None].double(), [sampling]))[0].numpy()
        found = distribution_of(scores.numpy(), sampling).to_dense(vocab)
        if dtype is torch.float64:
            assert np.abs(found - exact).max() < 1e-12
            assert ((found > 0) == (exact > 0)).all() or exact[(found > 0) != (exact > 0)].max() < 1e-300
        elif sampling.top_p < 1.0:  # by rounding one token more or less may reach top_p
            assert abs(int((found > 0).sum()) - int((exact > 0).sum())) <= 1 or row in TIED
        else:
            assert np.abs(found - exact).max() < 5e-6


def test_logits_of_some_tokens_give_their_distribution() -> None:
    scores, ids = torch.randn(40, dtype=torch.float64), np.sort(np.random.default_rng(1).choice(90, 40, False))
    wide = torch.full((90,), -math.inf, dtype=torch.float64)
    wide[torch.from_numpy(ids)] = scores
    for sampling in (Sampling(0.7), Sampling(1.3, top_k=5), Sampling(1.0, top_p=0.6, min_p=0.05), Sampling(0.0)):
        some, all_ = distribution_of(scores.numpy(), sampling, ids), distribution_of(wide.numpy(), sampling)
        assert some.to_dense(90) == pytest.approx(all_.to_dense(90), abs=1e-15)
        assert some.entropy == pytest.approx(all_.entropy)
        assert [some.probability(token) for token in range(95)] == pytest.approx(
            [all_.probability(token) for token in range(95)]
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_has_no_distribution(bad: float) -> None:
    assert distribution_of(np.full(5, bad), Sampling(1.0)).total == 0.0


@pytest.mark.parametrize(("size", "kept"), [(1, None), (3, None), (256, None), (700, None), (2000, 300), (2000, 40)])
def test_a_draw_inverts_the_distribution(size: int, kept: int | None) -> None:
    for seed in range(20):
        chances = random_chances(seed, size, kept)
        row, chance = dense(chances, size), np.random.default_rng(seed)
        cumulative = np.cumsum(row)
        for number in (*EDGES, *chance.random(50)):
            token = chances.token_at(float(number))
            assert row[token] > 0
            assert cumulative[token] > number - 1e-12
            assert cumulative[token] - row[token] <= number + 1e-12


def test_draws_from_a_long_row_of_float32_err_by_less_than_one_of_its_chances() -> None:
    chances = random_chances(5, 49152, dtype=np.float32)
    exact = np.cumsum(chances.weights, dtype=np.float64) / np.sum(chances.weights, dtype=np.float64)
    for number in np.random.default_rng(2).random(300):
        assert chances.token_at(float(number)) == np.searchsorted(exact, number, side="right")


SHAPES = [(600, None), (600, 50), (400, None), (900, 70), (600, 600)]


@pytest.mark.parametrize(("mine", "other"), list(itertools.product(SHAPES, SHAPES)))
def test_the_residual_of_two_distributions(mine: tuple[int, int | None], other: tuple[int, int | None]) -> None:
    """Whatever the two keep, and however many tokens they know."""
    for seed, share in ((1, 1.0), (2, 0.4), (3, 0.0)):
        p, q = random_chances(seed, *mine), random_chances(seed + 9, *other)
        exact = np.maximum(share * dense(p, 900) - dense(q, 900), 0.0)
        rest = p.above(q, share)
        assert rest.total == pytest.approx(exact.sum(), abs=1e-12)
        if rest.total:
            assert rest.to_dense(900) == pytest.approx(exact / exact.sum(), abs=1e-12)
        assert q.restrict_to(p) == pytest.approx(dense(q, 900)[p.tokens if p.tokens is not None else slice(mine[0])])
        assert p.probability(3) == pytest.approx(dense(p, 900)[3])


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_match_draws_the_same_as_the_sum_over_all_tokens(vocab: int, sampling: Sampling) -> None:
    """But where rounding decides which of two neighbouring tokens the number falls on, or what a filter keeps."""
    rule, same, asked = Match(), 0, 0
    for seed in range(2 if vocab > 5000 else 8):
        scores = shapes(vocab, seed)
        request = make_request((1,), rule, 1, sampling=sampling, seed=seed)
        rows = [Row(request, [1] * (seed + number)) for number in range(len(scores))]
        picks = [rule.pick(node) for node in rule.reduce(scores, rows)]
        same += sum(pick == exact for pick, exact in zip(picks, rule.run(scores.double(), rows), strict=True))
        asked += len(rows)
    assert same > 0.97 * asked


def test_float32_rows_keep_p_to_its_own_precision() -> None:
    """One drafted token of a real vocabulary's size: accepted and residual together are p to a few parts in 10^7."""
    vocab, sampling = 49152, Sampling(0.8)
    own, noise = (4 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    p, q = (distribution_of(row.numpy(), sampling) for row in (own, 0.8 * own + 0.2 * noise))
    exact = torch.softmax(own.double() / 0.8, 0).numpy()
    accepted = np.minimum(p.to_dense(vocab).astype(np.float64), q.to_dense(vocab))
    rest = p.above(q)
    written = accepted + (1.0 - accepted.sum()) * rest.to_dense(vocab)
    assert np.abs(written - exact).sum() < 2e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("left", [(1.0,), (1.0, 3.0, 0.0, 4.0), (5.0, 0.0, 2.0**20)])
def test_what_removals_leave_is_a_distribution_however_little_it_weighs(dtype: type, left: tuple[float, ...]) -> None:
    """The sum of what is left is so small that its reciprocal is infinite."""
    weights = np.array([1.0, *(one * float(np.finfo(dtype).smallest_subnormal) for one in left)], dtype)
    exact = np.array([0.0, *left]) / sum(left)
    removed, rest = TokenDistribution(weights).without(0), TokenDistribution(weights).above(one_hot(0))
    for chances in (removed, rest, rest.without(0)):
        assert chances.to_dense(len(weights)) == pytest.approx(exact)
        assert [chances.probability(token) for token in range(len(weights))] == pytest.approx(exact)
        assert chances.entropy == pytest.approx(-sum(p * math.log(p) for p in exact if p))
        assert {chances.token_at(number) for number in EDGES} <= {*np.flatnonzero(exact)}
        assert one_hot(1).above(chances).total == pytest.approx(1.0 - exact[1])


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-300])
def test_a_distribution_at_a_low_temperature_has_one_point(temperature: float) -> None:
    for dtype in (np.float32, np.float64):
        found = distribution_of(np.array([3.0, 3.5, -np.inf, 3.4], dtype), Sampling(temperature))
        assert found.to_dense(4).tolist() == [0.0, 1.0, 0.0, 0.0]
        assert found.entropy == 0.0
