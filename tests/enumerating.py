"""A chance that goes every way: the real engine is run once for each outcome of all that it leaves to chance.

For any rule and drafter that leave their decisions to `core.chance`: the products of what was decided, added up text by
text, must be the target's own probabilities. It knows no formula of theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from outpace.core.distribution import DecisionKey, RandomSource, TokenDistribution

Outcome = tuple[object, float]  # what is decided, and with which probability


class Enumerating(RandomSource):
    """Follows given outcomes for the first decisions, then takes the first possible outcome.

    It records the other possible outcomes, and whether one key decided twice in one run.
    """

    def __init__(self) -> None:
        self.told: list[int] = []  # the numbers of the outcomes, decision by decision
        self.met: list[list[Outcome]] = []
        self.asked: set[DecisionKey] = set()
        self.twice: DecisionKey | None = None  # the engine goes on after a drafter's fault, so it is said at the end

    def begin(self) -> None:
        """A run begins."""
        self.met, self.asked = [], set()

    def next(self) -> bool:
        """Goes on to the next way, depth first; False when all are done."""
        taken = [self._taken(place) for place in range(len(self.met))]
        while taken and taken[-1] + 1 == len(self.met[len(taken) - 1]):
            taken.pop()
        if taken:
            taken[-1] += 1
        self.told = taken
        return bool(taken)

    @property
    def probability(self) -> float:
        """Of the way that was gone."""
        return math.prod(outcomes[self._taken(place)][1] for place, outcomes in enumerate(self.met))

    def accepts(self, key: DecisionKey, p: float) -> bool:
        chance = min(max(p, 0.0), 1.0)
        return bool(self._decide(key, [(True, chance), (False, 1.0 - chance)]))

    def draw(self, key: DecisionKey, p: TokenDistribution) -> int:
        token = self._decide(key, list(enumerate(p.wide(p.size).tolist())))
        assert isinstance(token, int)
        return token

    def _decide(self, key: DecisionKey, outcomes: Sequence[Outcome]) -> object:
        self.twice = key if key in self.asked else self.twice
        self.asked.add(key)
        self.met.append([outcome for outcome in outcomes if outcome[1] > 0.0])
        return self.met[-1][self._taken(len(self.met) - 1)][0]

    def _taken(self, place: int) -> int:
        return self.told[place] if place < len(self.told) else 0


def texts_by_chance(chance: Enumerating, write: Callable[[], Sequence[int]]) -> dict[tuple[int, ...], float]:
    """The probability of every text that `write` may give, and that of nothing at all must be left."""
    found: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    while True:
        chance.begin()
        text = tuple(write())
        assert chance.twice is None, f"{chance.twice} decides twice"
        found[text].append(chance.probability)
        if not chance.next():
            return {text: math.fsum(parts) for text, parts in found.items()}
