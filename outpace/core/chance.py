"""What decides where a rule leaves it to chance: keyed numbers, or whatever a test puts in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outpace.core.noise import PURPOSES, uniform

if TYPE_CHECKING:
    from outpace.core.chances import Chances


class Key(NamedTuple):
    """Names one decision of one request; none may be asked for twice, or a text would be biased. Node ids never return,
    so they tell the rounds apart; `purpose` is one of `core.noise`."""

    seed: int
    choice: int
    node_id: int
    purpose: int

    def again(self, number: int) -> Key:
        """The key of the same decision where it is made a number of times more: of the next draws below one node."""
        return self._replace(purpose=self.purpose + PURPOSES * number)


class Chance:
    """Decisions by one uniform number a key: the same whatever else was decided, and in whatever order."""

    def number(self, key: Key) -> float:
        """In [0, 1)."""
        return uniform(*key)

    def accepts(self, key: Key, p: float) -> bool:
        """True with probability p; certain from 1 on."""
        return self.number(key) < p

    def draw(self, key: Key, p: Chances) -> int:
        """A token drawn from p: the least whose cumulative chance exceeds the number."""
        return p.at(self.number(key))
