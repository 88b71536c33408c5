"""What is tried again although it did not pay: one account for all such things, so that trials stay cheap."""

from __future__ import annotations

from collections.abc import Hashable


class Ledger:
    """Says what is due for another trial; to ask changes nothing.

    A trial may cost a `share` of the time since the thing was last tried, half as much after each trial that did not
    pay.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = 0.0  # of rounds so far
        self._tried: dict[Hashable, float] = {}  # when, in these seconds
        self._failures: dict[Hashable, int] = {}  # since it last paid

    def elapsed(self, seconds: float) -> None:
        """A round took so long."""
        self._seconds += seconds

    def is_due(self, what: Hashable, cost: float) -> bool:
        """Whether a trial of this kind, which costs so many seconds, is affordable by now."""
        idle = self._seconds - self._tried.get(what, 0.0)
        return cost < self._share / 2 ** self._failures.get(what, 0) * idle

    def tried(self, what: Hashable, has_paid: bool) -> None:
        """It was tried, or chosen because it pays."""
        self._tried[what] = self._seconds
        self._failures[what] = 0 if has_paid else min(self._failures.get(what, 0) + 1, 10)
