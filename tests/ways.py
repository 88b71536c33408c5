"""All ways in which rejection can write a text, by formulas of this file alone.

A way is: which tokens are drawn, which of them are accepted, and which token the residual or p gives after them. Its
probability is a product of lengths of intervals; a uniform number from each interval leads the engine down that way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from doubles import QuickToy, make_request
from twins import TEXTS, processed_slowly

from outpace.core import noise
from outpace.core.distribution import DecisionKey, RandomSource
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments
from outpace.rules.rejection import Rejection

PROMPT = (2, 0, 1, 2, 0)
NOTHING = 1e-12  # an interval as short as this is rounding
TARGETS = {3: QuickToy(3, 3, 4), 4: QuickToy(4, 2, 11)}
GARBAGE = {vocab: QuickToy(vocab, 2, 99) for vocab in TARGETS}
for _toy in (*TARGETS.values(), *GARBAGE.values()):
    _toy._tables *= 0.4  # flat enough that all tokens are likely to be drawn, and few intervals are short
ASKED: dict[str, dict[str, Any]] = {
    "bare": {"sampling": Sampling(1.0)},
    "top-k": {"sampling": Sampling(0.6, top_k=2)},
    "top-p": {"sampling": Sampling(1.4, top_p=0.8)},
    "min-p": {"sampling": Sampling(0.9, top_k=3, top_p=0.95, min_p=0.3)},
    "penalties": {
        "sampling": Sampling(1.1),
        "adjustments": Adjustments(1.3, 0.4, 0.7, ((0, 0.5), (2, -0.3)), TEXTS.ban(("ab", "bbc"))),
    },
}
Numbers = dict[tuple[int, int], tuple[float, float]]  # (node id, purpose) -> the interval of its uniform number
Propose = Callable[[Sequence[int]], list[list[int]]]  # from a text to a branch: the tokens picked as siblings, by depth


class Way(NamedTuple):
    """How a text may come about: its probability, the intervals that lead there, and its tokens."""

    chance: float
    numbers: Numbers
    tokens: tuple[int, ...]


class Prescribed(RandomSource):
    """Every uniform number is written in a table: by request, node and purpose; one half where it does not matter."""

    def __init__(self, table: Sequence[dict[tuple[int, int], float]]) -> None:
        self.table = table

    def number(self, key: DecisionKey) -> float:
        return self.table[key.seed].get((key.node_id, key.purpose), 0.5)


def by_chance(chance: RandomSource) -> Rejection:
    """The rule with something else to decide for it."""
    rule = Rejection()
    rule.random_source = chance
    return rule


class Ways:
    """All ways to write `length` tokens after PROMPT, by formulas of this file alone."""

    def __init__(self, target: QuickToy, draft: QuickToy | None, asked: dict[str, Any], gamma: int, length: int):
        self.target, self.draft, self.gamma, self.length = target, draft, gamma, length
        self.request = make_request(PROMPT, Rejection(), length, **asked)

    def p(self, text: Sequence[int], of: QuickToy | None = None) -> list[float]:
        return processed_slowly((of or self.target)._row(text).tolist(), self.request, text)

    def chances(self) -> dict[tuple[int, ...], float]:
        """p's own product for every text that has any."""
        vocab = range(self.target.vocab_size)
        found = {}
        for text in itertools.product(vocab, repeat=self.length):
            rows = (self.p([*PROMPT, *text[:place]]) for place in range(self.length))
            chance = math.prod(row[token] for row, token in zip(rows, text, strict=True))
            if chance:
                found[text] = chance
        return found

    def all(self, propose: Propose | None = None) -> Iterator[Way]:
        if propose is None:
            yield from self._drawn_rounds([], 0)
        else:
            yield from self._picked_rounds([], 0, propose)

    def _drawn_rounds(self, written: list[int], root: int) -> Iterator[Way]:
        """What may follow `written`: the next root has id `root`, the nodes below it are numbered on."""
        if len(written) >= self.length:
            yield Way(1.0, {}, tuple(written[: self.length]))
            return
        for way in self._drawn_round(written, root, 0):
            for rest in self._drawn_rounds(list(way.tokens), root + self.gamma + 1):
                yield Way(way.chance * rest.chance, {**way.numbers, **rest.numbers}, rest.tokens)

    def _drawn_round(self, written: list[int], root: int, depth: int) -> Iterator[Way]:
        """One round from the node at `depth` on; the accepted tokens are among the written ones."""
        text = [*PROMPT, *written]
        p, here, below = self.p(text), root + depth, root + depth + 1
        if len(written) >= self.length:
            yield Way(1.0, {}, tuple(written))
        elif depth == self.gamma:
            for token, low, high in parts(p):
                yield Way(high - low, {(here, noise.RESIDUAL): (low, high)}, (*written, token))
        else:
            q = self.p(text, self.draft)
            for token, low, high in parts(q):
                drawn = {(here, noise.DRAW): (low, high)}
                accepted = min(1.0, p[token] / q[token])
                if accepted > NOTHING:
                    for way in self._drawn_round([*written, token], root, depth + 1):
                        numbers = {**drawn, (below, noise.ACCEPT): (0.0, accepted), **way.numbers}
                        yield Way((high - low) * accepted * way.chance, numbers, way.tokens)
                if accepted < 1 - NOTHING:
                    drawn[below, noise.ACCEPT] = (accepted, 1.0)
                    for other, from_, to in parts(residual(p, q)):
                        chance = (high - low) * (1 - accepted) * (to - from_)
                        yield Way(chance, {**drawn, (here, noise.RESIDUAL): (from_, to)}, (*written, other))

    def _picked_rounds(self, written: list[int], root: int, propose: Propose) -> Iterator[Way]:
        if len(written) >= self.length:
            yield Way(1.0, {}, tuple(written[: self.length]))
            return
        layers = propose([*PROMPT, *written])
        after = root + 1 + sum(len(layer) for layer in layers)
        for way in self._picked_round(written, root, root + 1, layers):
            for rest in self._picked_rounds(list(way.tokens), after, propose):
                yield Way(way.chance * rest.chance, {**way.numbers, **rest.numbers}, rest.tokens)

    def _picked_round(self, written: list[int], here: int, first: int, layers: list[list[int]]) -> Iterator[Way]:
        """`layers[0]` hangs below node `here`, its nodes numbered from `first`; the next layer below its first."""
        p = self.p([*PROMPT, *written])
        if len(written) >= self.length:
            yield Way(1.0, {}, tuple(written))
            return
        chance, numbers = 1.0, {}
        for number, token in enumerate(layers[0] if layers else []):
            if p[token] > NOTHING:
                key = {(first + number, noise.ACCEPT): (0.0, p[token])}
                deeper = layers[1:] if number == 0 else []
                below = first + len(layers[0])
                for way in self._picked_round([*written, token], first + number, below, deeper):
                    yield Way(chance * p[token] * way.chance, {**numbers, **key, **way.numbers}, way.tokens)
            if p[token] > 1 - NOTHING:
                return
            numbers[first + number, noise.ACCEPT] = (p[token], 1.0)
            chance *= 1 - p[token]
            p = residual(p, [float(other == token) for other in range(len(p))])
        for token, low, high in parts(p):
            yield Way(chance * (high - low), {**numbers, (here, noise.RESIDUAL): (low, high)}, (*written, token))


def parts(p: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Every token with its interval of the distribution function."""
    for token, chance in enumerate(p):
        if chance > NOTHING:
            below = math.fsum(p[:token])
            yield token, below, below + chance


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    rest = [max(mine - other, 0.0) for mine, other in zip(p, q, strict=True)]
    total = math.fsum(rest)
    return [value / total for value in rest]
