"""Every lossless ratio rule over every shape of tree, in the real engine: exactly p, to 1e-12."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from constraints import Table
from doubles import QuickToy, make_request
from enumerating import (
    ASKED,
    GARBAGE,
    PROMPT,
    TARGETS,
    Enumerating,
    Shape,
    chances_of,
    check_equal,
    exact_chances,
    go_every_way,
    rule_of,
)
from turns import in_turn

from outpace.core import registry
from outpace.core.distribution import DecisionKey
from outpace.core.noise import DRAW
from outpace.core.sampling import Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Row
from outpace.models.llama import kept_tokens

LENGTH = 3
RATIO = [
    name for name in registry.names("rules") if not (rule := rule_of(name)).traits.same_text and rule.traits.lossless
]
FANS = [name for name in RATIO if rule_of(name).traits.several_draws]
CHAINS = {
    "chain": (Shape(levels=2), "bare", 2),
    "chain over rounds": (Shape(), "bare", LENGTH),
    "chain, cut": (Shape(levels=2, nodes=2), "top-k", LENGTH),
    "chain, penalties": (Shape(levels=1), "penalties", 2),
    "chain, filtered": (Shape(levels=2), "top-p", 2),
    "longer chain, cut": (Shape(levels=3, nodes=3), "top-k", LENGTH),
    "longer chain, penalties": (Shape(levels=1), "penalties", LENGTH),
    "longer chain, filtered": (Shape(levels=3), "top-p", LENGTH),
}
TREES = {
    "fan": (Shape("2"), "bare", 2),
    "fan of three": (Shape("3"), "bare", 1),
    "duplicates, exhausted support": (Shape("3"), "top-k", 2),
    "tree": (Shape("2,1", 2, once=True), "bare", 2),
    "tree, deep": (Shape("2,1", 2, once=True), "top-k", LENGTH),
    "tree, wide below": (Shape("1,2", 2, once=True), "top-k", LENGTH),
    "tree, growth by what was drawn": (Shape(levels=2, once=True, by_token=True), "bare", 2),
    "tree, cut within a layer": (Shape("2,1", 2, 4, once=True), "bare", 2),
    "tree, growth by what was drawn, cut": (Shape("2", 2, 4, once=True, by_token=True), "bare", 2),
}
REDUCED = ("fan", "tree", "duplicates, exhausted support")
SLOW = [("spectr", case) for case in ("chain", "tree", "tree, cut within a layer", "duplicates, exhausted support")]


def check(name: str, shape: Shape, asked: str, length: int, draft: str = "garbage", **more: Any) -> None:
    found = go_every_way(rule_of(name, Enumerating()), draft, shape, asked, length, **more)
    check_equal(found.texts, exact_chances(asked, length, more.get("vocab", 3)))
    assert found.accepted > 0 or draft in ("plain", "copied")


def cases(rules: Sequence[str], shapes: Sequence[str]) -> Iterator[Any]:
    """Each rule over every third shape, the next rule over the next; the long tests have all of them."""
    for (number, name), (place, case) in itertools.product(enumerate(rules), enumerate(shapes)):
        is_long = case.startswith("longer") or (name, case) in SLOW or (number + place) % 3
        yield pytest.param(name, case, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("name", "case"), [*cases(RATIO, [*CHAINS]), *cases(FANS, [*TREES])])
def test_every_shape(name: str, case: str) -> None:
    check(name, *(CHAINS | TREES)[case])


@pytest.mark.parametrize(("name", "draft"), in_turn(FANS, ["garbage", "partial"]))
@pytest.mark.parametrize("draws", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_residuals_of_several_tokens(name: str, draws: str, draft: str) -> None:
    """With four tokens more than one is left after a rejection, so that each next q and p counts."""
    check(name, Shape(draws), "bare", 1, draft, vocab=4)


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("shape", [Shape("2,1", 3), pytest.param(Shape("1,2", 2, 3), marks=pytest.mark.long)])
def test_trees_become_less_deep_where_the_text_ends(name: str, shape: Shape) -> None:
    for length in (1, 2):
        found = go_every_way(rule_of(name, Enumerating()), "garbage", shape, "top-k", length, ends=True)
        check_equal(found.texts, exact_chances("top-k", length))
        assert (found.accepted > 0) == (length > 1), "the target itself writes the last token"


class Row32(QuickToy):
    """A toy with one row of float32 after each token."""

    def __init__(self, *rows: Sequence[float]) -> None:
        super().__init__(len(rows), 1)
        self.rows = torch.tensor(rows)

    def _row(self, context: Sequence[int]) -> torch.Tensor:
        return self.rows[int(context[-1])].clone()


FAR, LEAST = -1e4, -100.0  # in units of the temperature: no mass, and less than the reciprocal of float32's largest
ONE_POINT = [[0.0, FAR, FAR], [FAR, 0.0, FAR], [FAR, FAR, 0.0]]
PAIRS = [  # of target and draft
    ([[-1.0, 0.0, LEAST]] * 3, [[LEAST, 0.0, FAR], [0.0, LEAST, LEAST - 2], [LEAST, LEAST, 0.0]]),
    (ONE_POINT, [[0.0, LEAST, -1.0]] * 3),
    ([[0.0, LEAST, -1.0]] * 3, ONE_POINT),
    (ONE_POINT, [*ONE_POINT[1:], ONE_POINT[0]]),
    (ONE_POINT, ONE_POINT),
]


@pytest.mark.parametrize(("name", "temperature"), in_turn(RATIO, [1e-4, 1e-3, 0.01, 0.05, 0.1]))
@pytest.mark.filterwarnings("error")
def test_low_temperatures_and_distributions_of_one_point_in_float32(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ASKED, "cold", {"sampling": Sampling(temperature)})
    for rows, draft_rows in PAIRS:
        target, draft = (
            Row32(*((temperature * np.array(one)).tolist() for one in each)) for each in (rows, draft_rows)
        )
        monkeypatch.setitem(TARGETS, 3, target)
        monkeypatch.setitem(GARBAGE, 3, draft)
        exact = chances_of(
            lambda text, rows=rows: torch.softmax(torch.tensor(rows[text[-1]]).double(), 0).tolist(), 3, 2
        )
        for drafted, shape in (("garbage", Shape("2,1", 2, once=True)), ("siblings", Shape(levels=2))):
            found = go_every_way(rule_of(name, Enumerating()), drafted, shape, "cold", 2).texts
            for text in {*found, *exact}:
                assert found.get(text, 0.0) == pytest.approx(exact.get(text, 0.0), abs=2e-6)


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_without_a_finite_maximum_raise_nothing(name: str, score: float) -> None:
    """A broken model is no assertion: the text is the one that greedy decoding writes."""
    request = make_request(PROMPT, rule_of(name), 1, temperature=1.0)
    scores, tree = torch.full((3,), score), TokenTree(0)
    tree.add(0, 2, -0.1)
    rows = [Row(request, PROMPT), Row(request, PROMPT, (2,), 1)]
    verdict = rule_of(name).walk(tree, rule_of(name).reduce(torch.stack([scores] * 2), rows))
    assert verdict.path == [0]
    assert verdict.next_token == int(scores.argmax())


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize(
    ("draft", "shape", "asked", "length", "num_others"),
    [
        ("garbage", Shape("2", once=True), "bare", 2, 1),
        ("perfect", Shape("2", 1), "min-p", 2, 0),
        ("partial", Shape("2", 1), "min-p", 2, 0),
        ("copied", Shape(levels=2), "min-p", LENGTH, 0),
        ("siblings", Shape(levels=2), "min-p", LENGTH, 0),
        ("plain", Shape(), "bare", LENGTH, 0),
    ],
)
def test_every_draft(name: str, draft: str, shape: Shape, asked: str, length: int, num_others: int) -> None:
    check(name, shape, asked, length, draft, num_others=num_others)


@pytest.mark.parametrize("draft", ["reduced", "reduced, dense"])
@pytest.mark.parametrize(
    ("name", "case"), [("rejection", "chain over rounds"), ("rejection", "chain, penalties"), *in_turn(FANS, REDUCED)]
)
def test_a_draft_that_scores_few_tokens(name: str, case: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tokens it scores the first and the one that it read last: q is normalised over these two."""
    monkeypatch.setattr(kept_tokens, "MAX_ADDED", 1)
    shape, asked, length = (CHAINS | TREES)[case]
    check(name, shape, asked, length, draft)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("draft", ["partial", "copied", "siblings"])
def test_rejection_with_every_sampling(draft: str, asked: str) -> None:
    check("rejection", Shape(levels=2), asked, 2, draft)


@pytest.mark.parametrize("draft", ["plain", "perfect", "garbage", "copied", "siblings"])
def test_a_constrained_text_has_the_target_s_probability_among_the_allowed_ones(draft: str) -> None:
    follows = [frozenset({0, 1}), frozenset({2}), frozenset({0, 1, 2})]

    def row(text: Sequence[int]) -> list[float]:
        refused = [token not in follows[text[-1]] for token in range(3)]
        return torch.softmax(TARGETS[3]._row(text).masked_fill(torch.tensor(refused), -torch.inf), 0).tolist()

    rule, constraint = rule_of("rejection", Enumerating()), Table(len(PROMPT), follows)
    found = go_every_way(rule, draft, Shape(levels=2, nodes=8), "bare", LENGTH, constraint=constraint)
    check_equal(found.texts, chances_of(row, 3, LENGTH))


@pytest.mark.parametrize("purpose", [None, DRAW])
def test_a_key_that_decides_twice_is_noticed(purpose: int | None) -> None:
    """As if draws, or all decisions, were keyed by the place among a round's nodes."""

    class Returning(Enumerating):
        def _decide(self, key: DecisionKey, outcomes: Any) -> object:
            returns = purpose is None or key.purpose == purpose
            return super()._decide(key._replace(node_id=key.node_id % 2) if returns else key, outcomes)

    with pytest.raises(AssertionError, match="decides twice"):
        go_every_way(rule_of("rejection", Returning()), "garbage", Shape(), "bare", 6)


def test_a_biased_draft_is_noticed() -> None:
    """A drafter that replaces what it drew, as pruning by token does: the sums are no longer the target's."""

    class Pruning(Enumerating):
        def draw(self, key: DecisionKey, p: Any) -> int:
            token = super().draw(key, p)
            return 0 if key.purpose == DRAW and token == 1 else token

    found, exact = go_every_way(rule_of("rejection", Pruning()), "garbage").texts, exact_chances("bare", 2)
    assert max(abs(found.get(text, 0.0) - exact[text]) for text in exact) > 1e-3
