"""What is learnt of some rounds together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Together(Generic[T]):
    """Facts that wait for each other until they are learnt, as many as `most` at last, the first ones at once: behind a
    pass the code that learns is cold."""

    def __init__(self, learn: Callable[[T], None], most: int) -> None:
        self._learn, self._most = learn, most
        self._waiting: list[T] = []
        self._learnt = 0

    def add(self, facts: Iterable[T]) -> None:
        """They happened, in this order."""
        self._waiting += facts
        if len(self._waiting) > min(self._most, self._learnt // self._most):
            self.work_in()

    def work_in(self) -> None:
        """What waits counts from now on."""
        for fact in self._waiting:
            self._learn(fact)
        self._learnt += len(self._waiting)
        self._waiting.clear()
