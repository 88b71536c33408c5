"""Drafters that draw trees of any shape, and all ways that a rule may write a text over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from doubles import QuickToy, make_request
from enumerating import Enumerating, texts_by_chance
from ways import ASKED, PROMPT

from outpace.core import registry
from outpace.core.distribution import RandomSource
from outpace.core.stats import summarize
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Request, Rule
from outpace.decoders import Autoregressive, Speculative
from outpace.drafters._sampled import DrawCounts
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions


class Shape(NamedTuple):
    """The shape of drawn trees.

    `draws`: children below a node by its depth, or as many as its token says; the number of layers and of verified
    nodes; and whether only the first round draws, because later ones would only multiply the ways.
    """

    draws: str = "1"
    layers: int = 1
    nodes: int = 16
    once: bool = False
    by_token: bool = False


class ByToken(DrawCounts):
    """One child below even tokens, two below odd ones."""

    def below(self, tree: TokenTree, node: int, request: Request) -> int:
        return 1 + tree.tokens[node] % 2 if request.rule.traits.several_draws else 1


class Shaped(ModelDrafter):
    """A model that draws trees of a shape."""

    def __init__(self, model: QuickToy, shape: Shape) -> None:
        super().__init__(model, Options(width=16, floor=0.0, draws=shape.draws))
        self._once = shape.once
        if shape.by_token:
            self._draws = ByToken(self._draws.by_depth)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> list[int]:
        growing = [n for n, state in enumerate(states) if not self._once or len(state.tokens) == len(PROMPT)]
        added = super().grow([states[n] for n in growing], [trees[n] for n in growing])
        found = dict(zip(growing, added, strict=True))
        return [found.get(n, 0) for n in range(len(states))]


def rule_of(name: str, chance: RandomSource | None = None, **options: Any) -> Rule:
    """A rule by name, with something else to decide for it."""
    kind: type[Rule] = registry.find("rules", name)
    rule = kind(kind.Options(**options))
    if chance is not None:
        rule.random_source = chance
    return rule


class Found(NamedTuple):
    """What all ways came to: the probability of every text, and the accepted tokens of the first round on average."""

    texts: dict[tuple[int, ...], float]
    accepted: float
    ways: int


def go_every_way(
    rule: Rule,
    target: QuickToy,
    drafter: Callable[[], Drafter],
    shape: Shape,
    asked: str = "bare",
    length: int = 2,
    beside: int = 0,
) -> Found:
    """Runs the real engine once for every way that the rule's chance may go."""
    chance = rule.random_source
    assert isinstance(chance, Enumerating)
    request = make_request(PROMPT, rule, length, **ASKED[asked])
    accepted: defaultdict[str, float] = defaultdict(float)

    def write() -> Sequence[int]:
        with Engine(target, drafter(), options=EngineOptions(nodes=shape.nodes, rows=256, chunk=8)) as engine:
            run = engine.submit(request, Speculative, Speculative.Options(draft_length=shape.layers))
            for number in range(beside):
                other = make_request(PROMPT[number:], "match", 1, temperature=1.0)
                engine.submit(other, Autoregressive, Autoregressive.Options())
            while run.finish_reason is None:
                engine.step()
        assert run.error is None, run.error
        accepted["mean"] += chance.probability * summarize(run.history.steps[:1]).accepted
        accepted["ways"] += 1
        return run.tokens

    texts = texts_by_chance(chance, write)
    return Found(texts, accepted["mean"], int(accepted["ways"]))
