"""Exact enumeration: the real engine runs once for each outcome of all random decisions.

For any rule and drafter that decide by a `RandomSource`: the products of the decisions' probabilities, added up text by
text, must be the target's own probabilities. No formula of a rule or a drafter is used.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from doubles import QuickToy, make_drafter, make_request
from twins import TEXTS, processed_slowly

from outpace.core import registry
from outpace.core.distribution import DecisionKey, RandomSource, TokenDistribution
from outpace.core.logits import SparseLogits, TargetOutput, tensor_of
from outpace.core.sampling import Sampling
from outpace.core.stats import summarize
from outpace.core.tree import TokenTree
from outpace.core.types import Adjustments, Capabilities, Drafter, DraftSource, DraftState, Request, Rule
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.drafters._model_drafter import DrawCounts
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Part
from outpace.models.llama.kept_tokens import KeptTokens

PROMPT = (2, 0, 1, 2, 0)
TARGETS = {3: QuickToy(3, 3, 4), 4: QuickToy(4, 2, 11)}
GARBAGE = {vocab: QuickToy(vocab, 2, 99) for vocab in TARGETS}
for _toy in (*TARGETS.values(), *GARBAGE.values()):
    _toy._tables *= 0.4  # flat enough that all tokens are likely to be drawn
ASKED: dict[str, dict[str, Any]] = {
    "bare": {"sampling": Sampling(1.0)},
    "greedy": {"sampling": Sampling(0.0)},
    "top-k": {"sampling": Sampling(0.6, top_k=2)},
    "top-p": {"sampling": Sampling(1.4, top_p=0.8)},
    "min-p": {"sampling": Sampling(0.9, top_k=3, top_p=0.95, min_p=0.3)},
    "penalties": {
        "sampling": Sampling(1.1),
        "adjustments": Adjustments(1.3, 0.4, 0.7, ((0, 0.5), (2, -0.3)), TEXTS.ban(("ab", "bbc"))),
    },
}
Chances = dict[tuple[int, ...], float]  # the probability of every text
Outcome = tuple[object, float]  # what is decided, and with which probability


class Enumerating(RandomSource):
    """Follows given outcomes for the first decisions, then takes the first possible outcome.

    It records the other possible outcomes, and whether one key decided twice in one run.
    """

    def __init__(self) -> None:
        self.told: list[int] = []  # the numbers of the outcomes, decision by decision
        self.met: list[list[Outcome]] = []
        self.asked: set[DecisionKey] = set()
        self.twice: DecisionKey | None = None  # reported at the end, because the engine survives a drafter's error

    def begin(self) -> None:
        """Begin a run."""
        self.met, self.asked = [], set()

    def next(self) -> bool:
        """Go on to the next way, depth first; False when all are done."""
        taken = [self._taken(place) for place in range(len(self.met))]
        while taken and taken[-1] + 1 == len(self.met[len(taken) - 1]):
            taken.pop()
        if taken:
            taken[-1] += 1
        self.told = taken
        return bool(taken)

    @property
    def probability(self) -> float:
        """Return the probability of the way that was gone."""
        return math.prod(outcomes[self._taken(place)][1] for place, outcomes in enumerate(self.met))

    def accepts(self, key: DecisionKey, p: float) -> bool:
        chance = min(max(p, 0.0), 1.0)
        return bool(self._decide(key, [(True, chance), (False, 1.0 - chance)]))

    def draw(self, key: DecisionKey, p: TokenDistribution) -> int:
        token = self._decide(key, list(enumerate(p.to_dense(p.size).tolist())))
        assert isinstance(token, int)
        return token

    def _decide(self, key: DecisionKey, outcomes: Sequence[Outcome]) -> object:
        self.twice = key if key in self.asked else self.twice
        self.asked.add(key)
        self.met.append([outcome for outcome in outcomes if outcome[1] > 0.0])
        return self.met[-1][self._taken(len(self.met) - 1)][0]

    def _taken(self, place: int) -> int:
        return self.told[place] if place < len(self.told) else 0


def texts_by_chance(chance: Enumerating, write: Callable[[], Sequence[int]]) -> Chances:
    """Return the probability of every text that `write` may give."""
    found: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    while True:
        chance.begin()
        text = tuple(write())
        assert chance.twice is None, f"{chance.twice} decides twice"
        found[text].append(chance.probability)
        if not chance.next():
            return {text: math.fsum(parts) for text, parts in found.items()}


def p_after(model: QuickToy, text: Sequence[int], asked: str = "bare") -> list[float]:
    """Return a model's p after a text that begins with PROMPT, by the slow twins."""
    return processed_slowly(model._row(text).tolist(), make_request(PROMPT, "match", **ASKED[asked]), text)


def chances_of(rows: Callable[[Sequence[int]], Sequence[float]], vocab: int, length: int) -> Chances:
    """Return the product of the rows along every text that has a probability; `rows` maps a text to p after it."""
    found = {}
    for text in itertools.product(range(vocab), repeat=length):
        chance = math.prod(rows([*PROMPT, *text[:place]])[token] for place, token in enumerate(text))
        if chance:
            found[text] = chance
    return found


def exact_chances(asked: str, length: int, vocab: int = 3) -> Chances:
    """Return the target's own probability of every text."""
    return chances_of(lambda text: p_after(TARGETS[vocab], text, asked), vocab, length)


def check_equal(found: Chances, exact: Chances) -> None:
    assert set(found) == set(exact)
    assert max(abs(found[text] - exact[text]) for text in exact) < 1e-12


class Shape(NamedTuple):
    """The shape of drawn trees.

    `draws`: children below a node by its depth, or with `by_token` as many as its token says; the number of levels and
    of verified nodes; `once`: only the first round draws, because later ones would only multiply the ways.
    """

    draws: str = "1"
    levels: int = 1
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
            self._children.draws = ByToken(self._children.draws.by_depth)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        growing = [n for n, state in enumerate(states) if not self._once or len(state.tokens) == len(PROMPT)]
        super().grow([states[n] for n in growing], [trees[n] for n in growing])


def copied(text: Sequence[int]) -> list[list[int]]:
    """Return what followed the longest and latest earlier occurrence of the last tokens, one token per level."""
    for length in (3, 2, 1):
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == list(text[-length:]):
                return [[token] for token in text[end : end + 3]]
    return []


def siblings(text: Sequence[int]) -> list[list[int]]:
    """Return two or three tokens as siblings, and two below the first of them."""
    first = (3 * text[-1] + 2 * text[-2] + len(text)) % 3
    return [[first, (first + 1) % 3, (first + 2) % 3][: 2 + len(text) % 2], [text[-1], (text[-1] + 1) % 3]]


class Planted(Drafter):
    """Grows the picked tree that a function of the text says, once a round."""

    capabilities = Capabilities((DraftSource("planted"),))

    def __init__(self, propose: Callable[[Sequence[int]], list[list[int]]]) -> None:
        self._propose = propose

    def grow(self, states: Sequence[DraftState], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            if len(tree) == 1:
                self._grow(state, tree)

    def _grow(self, state: DraftState, tree: TokenTree) -> None:
        node = 0
        for level in self._propose(state.tokens):
            nodes = [tree.add(node, token, 0.0) for token in level]
            assert nodes[0] is not None
            node = nodes[0]


class ReducedToy(QuickToy):
    """A model whose output layer keeps the first token and those that were read last, as `reduce_output` does."""

    def __init__(self, vocab: int, is_sparse: bool) -> None:
        super().__init__(vocab, 2, 99)
        self._tables *= 0.4
        self._kept, self._is_sparse = KeptTokens(1, vocab), is_sparse

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        self._kept.read([token for part in forest for token in part.tokens])
        logits, hidden, _ = super()._score_hidden(forest, layers)
        others = np.setdiff1d(np.arange(self.vocab_size), self._kept.kept.ids)
        return TargetOutput(tensor_of(logits).index_fill(1, torch.from_numpy(others), -torch.inf), hidden)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        wide = super().score_sparse(forest)
        if not self._is_sparse:
            return wide
        ids = self._kept.kept.ids
        return SparseLogits(wide.values[:, ids], ids, self.vocab_size)


def draft_of(name: str, target: QuickToy) -> QuickToy:
    if name.startswith("reduced"):
        return ReducedToy(target.vocab_size, is_sparse=name == "reduced")
    models = {"perfect": target, "garbage": GARBAGE.get(target.vocab_size)}
    return models.get(name) or make_drafter("model", target)._expander.model


def drafter_of(name: str, shape: Shape, target: QuickToy) -> Drafter | None:
    """Return a drafter of drawn trees, of picked ones ("copied", "siblings"), or none ("plain")."""
    if name in ("copied", "siblings"):
        return Planted({"copied": copied, "siblings": siblings}[name])
    return None if name == "plain" else Shaped(draft_of(name, target), shape)


def rule_of(name: str, chance: RandomSource | None = None, **options: Any) -> Rule:
    """Return a rule by name, with another source of random decisions."""
    kind: type[Rule] = registry.find("rules", name)
    rule = kind(kind.Options(**options))
    if chance is not None:
        rule.random_source = chance
    return rule


class Found(NamedTuple):
    """The result of all ways: the texts, and the mean of the tokens that the first round accepted."""

    texts: Chances
    accepted: float


def go_every_way(
    rule: Rule,
    draft: str = "partial",
    shape: Shape = Shape(),  # noqa: B008
    asked: str = "bare",
    length: int = 2,
    *,
    vocab: int = 3,
    num_others: int = 0,
    ends: bool = False,
    **more: Any,
) -> Found:
    """Run the real engine once for every outcome, in a batch with `num_others` requests that decode plainly. The text
    goes on after the `length` tokens that are compared, unless it `ends` there, where trees become less deep."""
    chance, target = rule.random_source, TARGETS[vocab]
    assert isinstance(chance, Enumerating)
    request = make_request(PROMPT, rule, length if ends else length + 16, **ASKED[asked], **more)
    accepted = 0.0

    def write() -> Sequence[int]:
        nonlocal accepted
        drafter = drafter_of(draft, shape, target)
        options: Any = Speculative.Options(draft_length=shape.levels) if drafter else Autoregressive.Options()
        with Engine(target, drafter, options=EngineOptions(nodes=shape.nodes, rows=256, chunk=8)) as engine:
            run = engine.submit(request, Speculative if drafter else Autoregressive, options)
            for number in range(num_others):
                other = make_request(PROMPT[number:], "match", 1, temperature=1.0)
                engine.submit(other, Autoregressive, Autoregressive.Options())
            while run.finish_reason is None and len(run.tokens) < length:
                engine.step()
        assert run.error is None, run.error
        accepted += chance.probability * summarize(run.history.steps[:1]).accepted
        return run.tokens[:length]

    texts = texts_by_chance(chance, write)
    return Found(texts, accepted)
