"""Running means that forget."""

from __future__ import annotations

FADE = 0.95  # of the past's weight, a round


class Mean:
    """A running ratio of two sums, which starts from a prior worth `weight`."""

    def __init__(self, prior: float, weight: float, fade: float = FADE) -> None:
        self._above, self._below, self._fade = prior * weight, weight, fade
        self.value = prior if weight else 0.0

    def learn(self, above: float, below: float = 1.0) -> None:
        self._above = self._above * self._fade + above
        self._below = self._below * self._fade + below
        self.value = self._above / self._below if self._below else 0.0
