"""Relaxed tokens are counted: where the exact rule, by the same random numbers, would have written others."""

from __future__ import annotations

from typing import Any

import pytest
from doubles import DRAFTERS, QuickToy, decode, make_drafter, make_request, write
from drawing import rule_of

from outpace.core.stats import RoundStats
from outpace.rules.cascade import MIXTURES

TARGET = QuickToy(16, 3, 0)
RATIO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # the rule, a loose dial, the strict one
    ("lenience", {"lenience": 0.4}, {"lenience": 0.0}),
    ("adaptive", {"most_lenience": 0.8}, {"most_lenience": 0.0}),
    *(("cascade", {"defer": kind, "alpha": 0.4}, {"defer": kind, "alpha": -2.0}) for kind in MIXTURES),
]
PICKED: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("top_beta", {"beta": 3}, {"beta": 1}, 0.0),
    ("typical", {}, {"epsilon": 1.0, "delta": 1e9}, 1.0),
    ("rollback", {"rollback": 3.0}, {"rollback": 0.0}, 0.0),
]

SEEDS = (20, pytest.param(120, marks=pytest.mark.long))


def first_round(name: str, options: dict[str, Any], temperature: float, seed: int) -> tuple[RoundStats, list[int]]:
    """The Step of one drafted token, and the text."""
    rule = rule_of(name, **options)
    request = make_request((2, 7, 1, 8, 1 + seed % 14), rule, 2, temperature=temperature, seed=seed)
    drafter = make_drafter("garbage", TARGET, width=1)
    run = decode([request], "speculative", drafter, target=TARGET, draft_length=1)
    return run.steps[0][0], run.texts[0]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "loose", "strict"), RATIO, ids=lambda value: str(value))
def test_relaxed_is_what_the_ratio_rule_rejects_by_the_same_number(
    name: str, loose: dict[str, Any], strict: dict[str, Any], seeds: int
) -> None:
    counted = []
    for seed in range(seeds):
        step, exact = first_round(name, loose, 1.0, seed)[0], first_round("rejection", {}, 1.0, seed)[0]
        lost = name == "cascade" and exact.accepted > step.accepted  # pi may have less of a token than p
        assert step.relaxed == (0 if lost else step.accepted - exact.accepted)
        counted.append(step.relaxed)
        assert first_round(name, strict, 1.0, seed)[0].relaxed == 0
    assert 0 < sum(counted) < len(counted)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "loose", "strict", "temperature"), PICKED, ids=lambda value: str(value))
def test_relaxed_is_what_plain_decoding_would_not_have_written(
    name: str, loose: dict[str, Any], strict: dict[str, Any], temperature: float, seeds: int
) -> None:
    counted = []
    for seed in range(seeds):
        step, text = first_round(name, loose, temperature, seed)
        plain = "gumbel" if temperature else "greedy"
        exact = write(TARGET, make_request((2, 7, 1, 8, 1 + seed % 14), plain, 1, temperature=temperature, seed=seed))
        assert step.relaxed == (step.accepted and text[0] != exact[0])
        counted.append(step.relaxed)
        assert first_round(name, strict, temperature, seed)[0].relaxed == 0
    assert 0 < sum(counted) < len(counted)


def test_picked_siblings_are_counted_by_what_the_rejections_have_left() -> None:
    """Without lenience no token of a tree of n-grams is relaxed, whatever was rejected before it."""
    for lenience, expected in ((0.0, False), (0.9, True)):
        rule = rule_of("lenience", lenience=lenience)
        requests = [make_request((3, 1, 4, 1, 5, 3, 1, 4) * 2, rule, 60, temperature=1.0, seed=n) for n in range(12)]
        run = decode(requests, "speculative", make_drafter("ngram", TARGET), target=TARGET)
        assert run.figures.accepted > 0
        assert (run.figures.relaxed > 0) is expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_exact_rules_relax_nothing(drafter: str) -> None:
    for name, temperature in (("greedy", 0.0), ("gumbel", 0.9), ("match", 0.9)):
        requests = [make_request(prompt, name, 30, temperature=temperature) for prompt in ((7,), (2, 7, 1, 8))]
        run = decode(requests, "speculative", make_drafter(drafter, TARGET), target=TARGET)
        assert run.figures.relaxed == 0


def test_what_a_stop_cuts_off_is_not_counted() -> None:
    rule = rule_of("typical", epsilon=0.0, delta=0.0)  # accepts all that is possible at all
    request = make_request((2, 7, 1, 8), rule, 3, temperature=1.0)
    run = decode([request], "speculative", make_drafter("garbage", TARGET, width=1), target=TARGET, draft_length=8)
    assert run.figures.emitted == 3
    assert run.figures.relaxed <= run.figures.accepted <= 3
