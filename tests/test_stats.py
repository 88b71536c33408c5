"""Figures are folds over rounds: what was accepted at each position, of one run and of several."""

from __future__ import annotations

import pytest

from outpace.core.stats import RoundStats, merge_stats, positions, summarize

STEPS = [
    RoundStats(3, 3, 4, 3),
    RoundStats(3, 1, 2, 3),
    RoundStats(3, 0, 1, 3),
    RoundStats(1, 1, 2, 1),
    RoundStats(0, 0, 1, 0),
]


def test_the_rounds_that_reached_a_position_are_counted() -> None:
    assert summarize(STEPS).positions == ((4, 3), (2, 1), (1, 1))
    assert summarize(STEPS).acceptance_by_position == (3 / 4, 1 / 2, 1.0)
    assert summarize([]).positions == ()
    assert summarize([]).acceptance_by_position == ()


def test_a_position_counts_rounds_that_offered_a_token_there_after_accepting_all_before_it() -> None:
    assert positions([(1, 1), (2, 0)]) == ((2, 1),), "the first round offered no second token"
    assert positions([(3, 0), (2, 0)]) == ((2, 0),), "no round came to the second"
    assert positions([(0, 0)]) == ()
    assert positions(iter([(2, 2), (2, 1), (4, 2)])) == ((3, 3), (3, 2), (1, 0))


def test_several_runs_together_are_a_run_of_all_their_rounds() -> None:
    steps = [
        *STEPS,
        RoundStats(2, 2, 3, 2, hit="primary"),
        RoundStats(2, 0, 1, 2, hit="miss"),
        RoundStats(1, 1, 2, 1, hit="late"),
    ]
    steps = [*steps, RoundStats(1, 0, 1, 1, hit="miss", draft_seconds=0.5, target_seconds=0.25)]
    for cut in range(len(steps) + 1):
        assert merge_stats([summarize(steps[:cut]), summarize(steps[cut:])]) == summarize(steps)
    assert merge_stats([]) == summarize([])


@pytest.mark.parametrize("passes", [0, 4])
def test_figures_of_rounds_that_drafted_nothing(passes: int) -> None:
    figures = summarize([RoundStats(0, 0, 1, 0)] * passes)
    assert figures.mean_accepted_length == (1.0 if passes else 0.0)
    assert (figures.draft_acceptance, figures.hit_rate, figures.positions) == (None, None, ())
