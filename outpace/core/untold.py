"""Rounds that a drafter was not told of yet."""

from __future__ import annotations

from outpace.core.types import Observation


class Untold:
    """What the target walked and wrote since a drafter was told last. It is told when it is asked next, of all rounds
    together: whoever is not asked costs nothing."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._tokens: list[int] = []
        self._last: Observation | None = None

    def add(self, seen: Observation) -> None:
        """One more round is over."""
        self._path += seen.path
        self._tokens += seen.tokens
        self._last = seen

    def take(self) -> Observation | None:
        """All these rounds as one; None where there are none."""
        last = self._last
        if last is None:
            return None
        together = Observation(self._path, self._tokens, last.tree, last.seen)
        self._path, self._tokens, self._last = [], [], None
        return together
