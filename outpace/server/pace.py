"""How fast the queue moves: what is written in the time in which somebody waits, and how long answers are."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW = 30.0  # seconds that the rate is taken from
LEAST = 1.0  # seconds of waiting before there is a rate
USUAL = 128.0  # tokens of an answer, before any has ended
FORGETS = 0.9


class Pace:
    """Time in which nobody waits does not count: an idle server writes nothing, and one with few requests writes less
    than it can."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, float, int]] = deque()  # when a span of time ended, its seconds and tokens
        self._seconds, self._tokens = 0.0, 0  # of those
        self._since: float | None = None  # when the span began that is not over; None: nobody waits
        self._usual = USUAL

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waited when it was told last what was written."""
        return self._since is not None

    def wrote(self, tokens: int, somebody_waits: bool) -> None:
        """So many tokens were written since the last time, by all. It counts where somebody waited then and still
        does: most new requests wait for the next step alone."""
        now = self._clock()
        if self._since is not None and somebody_waits:
            self._recent.append((now, now - self._since, tokens))
            self._seconds += now - self._since
            self._tokens += tokens
        self._since = now if somebody_waits else None
        self._forget(now)

    def rest(self) -> None:
        """There is no request any more."""
        self._since = None

    def ended(self, tokens: int) -> None:
        """An answer is over that has so many."""
        self._usual = FORGETS * self._usual + (1 - FORGETS) * tokens

    def expected(self, most: float = math.inf) -> float:
        """Tokens of an answer that may have so many."""
        return min(self._usual, most)

    def seconds(self, tokens: float) -> float | None:
        """In which so many are written while others wait. None where that was not measured lately; before an answer's
        worth of tokens was seen it takes half the window."""
        now = self._clock()
        self._forget(now)
        taken = self._seconds + (0.0 if self._since is None else now - self._since)
        if taken < (LEAST if self._tokens >= self._usual else WINDOW / 2):
            return None
        return tokens * taken / max(self._tokens, 1)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            _, seconds, tokens = self._recent.popleft()
            self._seconds = self._seconds - seconds if self._recent else 0.0  # or what is rounded would add up
            self._tokens -= tokens
