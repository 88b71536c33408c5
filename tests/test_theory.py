"""The planner's formulas against simulation, enumeration and published numbers."""

from __future__ import annotations

import itertools
import math

import pytest

from outpace.core import theory

ALPHAS = (0.0, 0.3, 0.6, 0.8, 0.95, 1.0)


@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_expected_tokens_over_all_outcomes(alpha: float, gamma: int) -> None:
    expected = 0.0
    for accepted in itertools.product((True, False), repeat=gamma):
        chance = math.prod(alpha if one else 1 - alpha for one in accepted)
        expected += chance * (1 + len(list(itertools.takewhile(bool, accepted))))
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(expected)
    assert theory.expected_tokens_by_position([alpha] * gamma) == pytest.approx(expected)


def test_positions_that_are_not_alike() -> None:
    assert theory.expected_tokens_by_position([]) == 1.0
    assert theory.expected_tokens_by_position([0.9, 0.5, 0.2]) == pytest.approx(1 + 0.9 + 0.45 + 0.09)


@pytest.mark.parametrize(("alpha", "parallel", "in_turn"), [(0.8, 2.64, 2.47), (0.6, 1.56, 1.67)])
def test_pearl_wins_or_loses_by_acceptance(alpha: float, parallel: float, in_turn: float) -> None:
    """At c = .1, each at the length that is best for it."""
    best = max(theory.pearl_speedup(alpha, gamma, 0.1) for gamma in range(1, 65))
    assert best == pytest.approx(parallel, abs=0.005)
    gamma = theory.best_length(alpha, 0.1)
    assert theory.speedup(theory.expected_tokens(alpha, gamma), gamma, 0.1) == pytest.approx(in_turn, abs=0.005)


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_pearls_formula_over_all_outcomes_of_a_block(alpha: float, gamma: int) -> None:
    """A block of gamma tokens takes one step where its first is rejected before it ends, or where all are accepted
    while the next block is drafted; a rejection in between is seen one step later, and what was drafted is dropped."""
    tokens = steps = 0.0
    for accepted in range(gamma + 1):
        chance = alpha**accepted * (1 - alpha if accepted < gamma else 1.0)
        tokens += chance * (accepted + 1 if accepted < gamma else gamma)
        steps += chance * (2 if 0 < accepted < gamma else 1)
    assert theory.pearl_speedup(alpha, gamma, 0.0) == pytest.approx(tokens / steps)
    assert theory.pearl_speedup(alpha, gamma, 0.5) == pytest.approx(tokens / steps / max(1.0, gamma * 0.5))


def test_pearls_tokens_by_position() -> None:
    """A chain of steps walked through: the first checks one token, each further one gamma more."""
    acceptances, gamma = [0.9, 0.4, 0.7], 2
    reached = [math.prod((acceptances + [0.7] * 200)[:depth]) for depth in range(200)]
    steps = 1.0 + math.fsum(reached[1::gamma])
    assert theory.pearl_tokens(acceptances, gamma) == pytest.approx(math.fsum(reached) / steps)
    assert theory.pearl_tokens([0.5, 1.0], gamma) == gamma


@pytest.mark.parametrize("c", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_draft_helps_only_where_it_is_accepted_more_often_than_it_costs(alpha: float, c: float) -> None:
    gamma = theory.best_length(alpha, c)
    gain = theory.speedup(theory.expected_tokens(alpha, gamma), gamma, c)
    assert (gamma > 0 and gain > 1.0) == (alpha > c)  # Leviathan et al., corollary 3.9
    assert gain <= theory.tokens_per_rejection([alpha])


def test_limits() -> None:
    assert theory.tokens_per_rejection([0.75]) == pytest.approx(4.0)
    assert theory.tokens_per_rejection([1.0]) == theory.tokens_per_rejection([0.5, 1.0]) == math.inf
    assert theory.tokens_per_rejection([0.0, 1.0]) == 1.0
    assert theory.tokens_per_rejection([0.9, 0.5, 0.2]) == pytest.approx(
        1 + 0.9 + 0.45 + 0.09 + 0.018 + 0.0036, abs=1e-3
    )
    assert theory.expected_tokens(0.75, 500) == pytest.approx(4.0)
    assert theory.parallel_limit(0.1) == pytest.approx(10.0)
    assert theory.parallel_limit(0.0) == math.inf
    assert theory.pearl_speedup(1.0, 10, 0.1) == pytest.approx(10.0)
    assert theory.card_limit(5.0, 1.25, 0.2) == pytest.approx(4.0)
    assert theory.card_limit(5.0, 1.25, 0.4) == pytest.approx(2.5)


@pytest.mark.parametrize(("stages", "hop"), [(1, 0.0), (2, 0.5), (4, 5.0)])
def test_a_pipeline_over_rounds_walked_through(stages: int, hop: float) -> None:
    """Plain decoding travels once per token; a round travels once for all its tokens."""
    gamma, c, alpha, v = 4, 0.1, 0.75, 1.2
    tokens = theory.expected_tokens(alpha, gamma)
    ring = sum(hop for _ in range(stages)) if stages > 1 else 0.0
    plain, ours = 1000 * (1.0 + ring), 1000 / tokens * (gamma * c + v + ring)
    assert theory.pipeline_speedup(tokens, gamma, c, stages, hop, v) == pytest.approx(plain / ours)
    least = theory.pipeline_break_even(gamma, c, stages, hop, v)
    assert theory.pipeline_speedup(least, gamma, c, stages, hop, v) == pytest.approx(1.0)
    without_way_back = (stages - 1) * hop
    saved = without_way_back - without_way_back / tokens
    assert theory.pipeline_saving(stages, hop, tokens) == pytest.approx(saved)
    if stages == 1:
        assert theory.pipeline_speedup(tokens, gamma, c, 1, 0.0) == theory.speedup(tokens, gamma, c)


TARGET, DRAFT = [0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]


def tvs(count: int) -> list[float]:
    """Return the TV between q and what consecutive rejections leave of the target's p, for 0 to `count` - 1 of them."""
    p, found = TARGET, []
    for _ in range(count):
        rest = [max(own - other, 0.0) for own, other in zip(p, DRAFT, strict=True)]
        found.append(math.fsum(rest))
        p = [value / found[-1] for value in rest]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_expected_rejections_match_a_recursion(count: int) -> None:
    """Yin et al., theorems 1 and 4: `count` drafts of the token after each rejection, one of any other."""
    left = math.prod(tvs(count))
    tokens = 400
    chance, rejections = 1.0, 0.0  # of a token after a rejection
    for _ in range(tokens):
        rejected = chance * left + (1.0 - chance) * tvs(1)[0]
        rejections += rejected
        chance = rejected
    alphas = [1.0 - distance for distance in tvs(count)]
    first = theory.any_acceptance(alphas)
    assert first == pytest.approx(1.0 - left)
    assert tokens / rejections == pytest.approx(theory.tokens_per_rejection([first, alphas[0]]), rel=0.01)
    assert count > 1 or theory.tokens_per_rejection(alphas) == pytest.approx(1.0 / tvs(1)[0])
    assert tokens / rejections < 1.0 / tvs(1)[0] + 1.01, "more drafts gain at most one token"
