"""A clock that goes on with the work: what the planner chooses by it is the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from toy import Toy, ToySession

from outpace.core.logits import TargetOutput
from outpace.models.base import Capability, Model, Part


class Stopwatch:
    """A clock that goes on where a `Timed` model works, and nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Model):
    """A toy whose passes take stated times: `first` seconds, and `row` more for every row but the first."""

    def __init__(self, toy: Toy, watch: Stopwatch, first: float, row: float) -> None:
        self.vocab_size, self.max_positions, self.device = toy.vocab_size, toy.max_positions, toy.device
        self._toy, self._watch, self._first, self._row = toy, watch, first, row
        self.mask_token = toy.mask_token
        self.num_layers, self.capabilities = toy.num_layers, frozenset({Capability.HIDDEN})

    @property
    def token_bytes(self) -> int:
        return self._toy.token_bytes

    def open(self, capacity: int, room: int) -> ToySession:
        return self._toy.open(capacity, room)

    def score(self, forest: Sequence[Part]) -> Tensor:
        self._take(forest)
        return self._toy.score(forest)

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        self._take(forest)
        return self._toy.score_hidden(forest, layers)

    def _take(self, forest: Sequence[Part]) -> None:
        rows = sum(len(part.tokens) for part in forest)
        self._watch.now += self._first + self._row * max(rows - 1, 0)
