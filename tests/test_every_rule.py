"""Every lossless rule over every shape of drawn tree, every way that chance may go in the real engine: p to 1e-12."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drawing import Shape, Shaped, go_every_way, rule_of
from enumerating import Enumerating
from test_every_way import LENGTH
from test_rejection import Planted, copied, draft_of, siblings
from turns import in_turn
from ways import ASKED, TARGETS, Ways

from outpace.core import registry
from outpace.core.types import Drafter

RATIO = [
    name for name in registry.names("rules") if not (rule := rule_of(name)).traits.same_text and rule.traits.lossless
]
FANS = [name for name in RATIO if rule_of(name).traits.several_draws]
CHAINS = {
    "chain": (Shape(layers=2), "bare", 2),
    "chain over rounds": (Shape(), "bare", LENGTH),
    "chain, cut": (Shape(layers=2, nodes=2), "top-k", LENGTH),
    "chain, penalties": (Shape(layers=1), "penalties", 2),
    "chain, filtered": (Shape(layers=2), "top-p", 2),
    "longer chain, cut": (Shape(layers=3, nodes=3), "top-k", LENGTH),
    "longer chain, penalties": (Shape(layers=1), "penalties", LENGTH),
    "longer chain, filtered": (Shape(layers=3), "top-p", LENGTH),
}
TREES = {
    "fan": (Shape("2"), "bare", 2),
    "fan of three": (Shape("3"), "bare", 1),
    "duplicates, exhausted support": (Shape("3"), "top-k", 2),
    "tree": (Shape("2,1", 2, once=True), "bare", 2),
    "tree, deep": (Shape("2,1", 2, once=True), "top-k", LENGTH),
    "tree, wide below": (Shape("1,2", 2, once=True), "top-k", LENGTH),
    "tree, growth by what was drawn": (Shape(layers=2, once=True, by_token=True), "bare", 2),
    "tree, cut within a layer": (Shape("2,1", 2, 4, once=True), "bare", 2),
    "tree, growth by what was drawn, cut": (Shape("2", 2, 4, once=True, by_token=True), "bare", 2),
}


def check(
    name: str, shape: Shape, asked: str, length: int, draft: str = "garbage", beside: int = 0, vocab: int = 3
) -> int:
    """The number of ways."""
    rule, target = rule_of(name, Enumerating()), TARGETS[vocab]
    model = draft_of(draft, target)
    found = go_every_way(rule, target, lambda: Shaped(model, shape), shape, asked, length, beside)
    differ(found.texts, asked, length, vocab)
    assert found.accepted > 0
    return found.ways


def differ(found: dict[tuple[int, ...], float], asked: str, length: int, vocab: int = 3) -> None:
    exact = Ways(TARGETS[vocab], None, ASKED[asked], 1, length).chances()
    assert set(found) == set(exact)
    assert max(abs(found[text] - exact[text]) for text in exact) < 1e-12


DEAR = [("spectr", case) for case in ("chain", "tree", "tree, cut within a layer", "duplicates, exhausted support")]


def chains() -> Iterator[Any]:
    """Each rule over every third chain, the next rule over the next; over all of them in the long tests."""
    for number, name in enumerate(RATIO):
        for place, case in enumerate(CHAINS):
            is_long = case.startswith("longer") or (name, case) in DEAR or (number + place) % 3
            yield pytest.param(name, case, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("name", "case"), list(chains()))
def test_chains(name: str, case: str) -> None:
    check(name, *CHAINS[case])


def trees() -> Iterator[Any]:
    """Each rule over every third tree, the next rule over the next; over all of them in the long tests."""
    for number, name in enumerate(FANS):
        for place, case in enumerate(TREES):
            yield pytest.param(
                name, case, marks=[pytest.mark.long] if (name, case) in DEAR or (number + place) % 3 else []
            )


@pytest.mark.parametrize(("name", "case"), list(trees()))
def test_trees(name: str, case: str) -> None:
    check(name, *TREES[case])


@pytest.mark.parametrize(("name", "draft"), in_turn(FANS, ["garbage", "partial"]))
@pytest.mark.parametrize("draws", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_residuals_of_several_tokens(name: str, draws: str, draft: str) -> None:
    """With four tokens more than one is left after a rejection, so that each next q and p counts."""
    check(name, Shape(draws), "bare", 1, draft, vocab=4)


@pytest.mark.parametrize("name", RATIO)
def test_beside_another_request(name: str) -> None:
    check(name, Shape("2", once=True), "bare", 2, beside=1)


@pytest.mark.parametrize("draft", ["perfect", "partial"])
@pytest.mark.parametrize("name", RATIO)
def test_better_drafts(name: str, draft: str) -> None:
    check(name, Shape("2", 1), "min-p", 2, draft)


@pytest.mark.parametrize("planted", [copied, siblings])
@pytest.mark.parametrize("name", RATIO)
def test_picked_trees(name: str, planted: object) -> None:
    def drafter() -> Drafter:
        return Planted(planted)  # type: ignore[arg-type]

    rule = rule_of(name, Enumerating())
    differ(go_every_way(rule, TARGETS[3], drafter, Shape(layers=2), "min-p", LENGTH).texts, "min-p", LENGTH)
