"""Mistakes in drawn trees and in the rules that judge them: all ways that chance may go must show each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enumerating import Shape
from mutation_checks import Mutation, Original
from option_mutations import no_bonus, unfiltered_q
from test_every_rule import FANS, RATIO, check
from torch import Tensor

from outpace.core.tree import DrawnChildren, Siblings, TokenTree
from outpace.drafters import _model_drafter
from outpace.rules import _ratio, spectr, without_replacement

BOTTOM_UP = ("block", "traversal")
INDEPENDENT = ("multi_round", "spectr")


def rule_differences(names: Sequence[str]) -> Iterator[str]:
    """Short texts by these rules over chains, fans and trees."""
    for name in names:
        shapes: list[tuple[Shape, str, int, int]] = [(Shape(levels=2), "top-k", 2, 3), (Shape(), "bare", 2, 3)]
        if name in FANS:
            shapes += [(Shape("3"), "top-k", 1, 3), (Shape("2"), "bare", 1, 4)]
            shapes += [(Shape("2,1", 2, once=True), "bare", 2, 3)]
        for shape, asked, length, vocab in shapes:
            try:
                check(name, shape, asked, length, vocab=vocab)
            except AssertionError as difference:
                said = str(difference).partition("\n")[0] or "another distribution"
                yield f"{name}, {shape.draws} children, {asked}: {said}"


def mutation(name: str, owner: Any, attribute: str, mistake: Original, rules: Sequence[str] = tuple(RATIO)) -> Mutation:
    return Mutation(f"rules: {name}", [owner], attribute, mistake, lambda: next(rule_differences(rules), None))


def keyed_by_position(
    draw_level: Original, tree: TokenTree, frontier: Sequence[int], logits: Tensor, rows: Sequence[Any], draws: Any
) -> None:
    ids = dict(zip(frontier, (row.position for row in rows), strict=True))
    draw_level(Renumbered(tree, ids), frontier, logits, rows, draws)


class Renumbered:
    """A tree whose nodes have other ids."""

    def __init__(self, tree: TokenTree, ids: Mapping[int, int]) -> None:
        self._tree, self.ids = tree, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


def one_key_for_all_draws(again: Original, key: Any, number: Any) -> Any:
    return key


def changed(change: Callable[[DrawnChildren], DrawnChildren]) -> Original:
    """Another group than what was drawn."""

    def mistake(draw: Original, self: Any, parent: int, drawn: DrawnChildren, siblings: Siblings) -> int:
        return int(draw(self, parent, change(drawn), siblings))

    return mistake


def drop_what_was_drawn(drawn: DrawnChildren) -> DrawnChildren:
    kept = tuple(token for token in drawn.tokens if token != 1)
    return drawn._replace(tokens=kept or drawn.tokens)


def merge_duplicates(drawn: DrawnChildren) -> DrawnChildren:
    return drawn._replace(tokens=tuple(dict.fromkeys(drawn.tokens)))


def shifted(reduce: Original, self: Any, logits: Tensor, rows: Sequence[Any]) -> Any:
    return reduce(self, logits.roll(1, -1), rows)


def of_the_next_node(reduce: Original, self: Any, logits: Tensor, rows: Sequence[Any]) -> Any:
    return reduce(self, logits.roll(1, 0), rows)


RULE_MUTATIONS = [
    mutation("draws keyed by position", _model_drafter, "draw_level", keyed_by_position),
    mutation("one key for all draws below a node", _ratio.DecisionKey, "again", one_key_for_all_draws, FANS),
    mutation("a token dropped after it was drawn", TokenTree, "draw", changed(drop_what_was_drawn), FANS),
    *(
        mutation(f"duplicates merged, {name}", TokenTree, "draw", changed(merge_duplicates), [name])
        for name in INDEPENDENT
    ),
    mutation("q filtered for drawing, unfiltered for judging", TokenTree, "draw", unfiltered_q),
    mutation("no residual, from the root down", _ratio, "residual", lambda f, p, q: p, ["without_replacement"]),
    mutation(
        "no residual, from the leaves up",
        _ratio,
        "without_child",
        lambda f, weight, p, q: (f(weight, p, q)[0], p),
        BOTTOM_UP,
    ),
    mutation("no residual, spectr", spectr, "any_of", lambda f, beta, count: 0.0, ["spectr"]),
    mutation("rho of one draft", spectr, "least_rho", lambda f, p, q, count: f(p, q, 1), ["spectr"]),
    mutation(
        "q keeps a rejected token",
        without_replacement.WithoutReplacement,
        "after",
        lambda f, self, q, token: q,
        ["without_replacement"],
    ),
    mutation("no bonus, from the root down", _ratio.TopDown, "walk", no_bonus, INDEPENDENT),
    mutation("no bonus, from the leaves up", _ratio.BottomUp, "walk", no_bonus, BOTTOM_UP),
    mutation("p shifted by one token", _ratio.RatioRule, "reduce", shifted),
    mutation("p shifted by one node", _ratio.RatioRule, "reduce", of_the_next_node),
]
