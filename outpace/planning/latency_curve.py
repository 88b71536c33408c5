"""How long rounds take by the rows that they verify, learnt while they run."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence

from outpace.planning.estimators import KEPT, TRIED, RollingMedian

_RENEWED = 4  # rounds after which medians are taken anew
_STALE = 96  # rounds after which a row count is measured again
_FORGOTTEN = 512  # rounds after which the time of more rows than were met since is not known any more
_FIRST = 4  # nodes that may be verified before any times are known
_ROW = 0.05  # of a pass: what one more row is held to cost, until anything is known
_WIDE = 16  # tokens of prompt, in a pass that tells what rows cost where there are many
Point = tuple[int, float]


class LatencyCurve:
    """Seconds of a round, its drafting not counted, by the rows of all requests together."""

    def __init__(self) -> None:
        self._times = RollingMedian()  # by bucket
        self._last: dict[int, int] = {}  # by bucket: the round in which it was met last
        self._wide: deque[Point] = deque(maxlen=KEPT)  # the latest passes over prompts
        self._curve: tuple[list[int], list[float]] | None = None
        self._beyond: float | None = None  # the curve's `_slope`
        self._widest: int | None = None  # bucket that has a time
        self._more: dict[int, list[float]] = {}  # see `more`
        self._table: list[float] = []  # see `table`
        self._untimed: list[bool] = []  # see `untimed`
        self.seen = 0  # rounds

    def learn(self, rows: int, seconds: float) -> bool:
        """A round is over; whether times are told anew since then."""
        bucket = _bucket(rows)
        self._times.learn(bucket, seconds)
        self._last[bucket] = self.seen
        self.seen += 1
        if self.seen % _RENEWED == 0:
            self._forget_old()
        is_renewed = self.seen % _RENEWED == 0 or self._times.count(bucket) <= TRIED
        if is_renewed:
            self._renew()
        return is_renewed

    def read(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of prompts, and nothing else, is over."""
        if tokens >= _WIDE:
            self._wide.append((tokens, seconds))
            self._beyond, self._more, self._table = None, {}, []

    def _renew(self) -> None:
        """What was derived from the times is derived anew when it is asked for."""
        self._curve, self._beyond, self._more, self._table, self._widest = None, None, {}, [], None
        self._untimed = []

    def _forget_old(self) -> None:
        """Of more rows than any lately: their times may be those of a machine that was busy then. They are tried anew
        where fewer rows say that they might pay."""
        widest = max([bucket for bucket, last in self._last.items() if self.seen - last <= _FORGOTTEN])
        for bucket in [bucket for bucket in self._times if bucket > widest]:
            self._times.forget(bucket)
            del self._last[bucket]

    def knows(self, rows: int, samples: int = TRIED) -> bool:
        """Whether a pass over so many rows was timed, so often."""
        return self._times.count(_bucket(rows)) >= samples

    def is_stale(self, rows: int) -> bool:
        """Whether a pass over so many rows was timed, and then not for long."""
        return self.seen - self._last.get(_bucket(rows), self.seen) > _STALE

    def is_untimed(self, rows: int) -> bool:
        """Whether the time of so many rows is not known, or not any more."""
        return not self.knows(rows) or self.is_stale(rows)

    def untimed(self, rows: int) -> Sequence[bool]:
        """The same of 1, 2, ... up to `rows` rows at least, as it was when times were last told anew."""
        if len(self._untimed) < rows:
            self._untimed = [*map(self.is_untimed, range(1, rows + 1))]
        return self._untimed

    @property
    def has_slope(self) -> bool:
        """Whether what a row costs was measured at all."""
        return len(self._times.medians) > 1

    def target(self, rows: int) -> float:
        """Seconds of a round over so many rows; 0 until anything is known."""
        if self._curve is None:
            self._curve = self._convex()
        counts, seconds = self._curve
        if not counts:
            return 0.0
        place = bisect.bisect_left(counts, rows)
        if place == len(counts):
            if self._beyond is None:
                self._beyond = self._slope(counts, seconds)
            return seconds[-1] + (rows - counts[-1]) * self._beyond
        if place == 0:
            return seconds[0]
        share = (rows - counts[place - 1]) / (counts[place] - counts[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def more(self, rows: int, count: int) -> Sequence[float]:
        """By how much rounds over 1, 2, ... up to `count` more rows than `rows` take longer than one over `rows`."""
        known = self._more.get(rows)
        if known is None or len(known) < count:
            base = self.target(rows)
            known = self._more[rows] = [self.target(rows + more) - base for more in range(1, count + 1)]
        return known[:count]

    def table(self, rows: int) -> Sequence[float]:
        """Seconds of rounds over 1, 2, ... up to `rows` rows at least."""
        if len(self._table) < rows:
            self._table = self._laid_out(rows)
        return self._table

    def _laid_out(self, rows: int) -> list[float]:
        """`target` of 1, 2, ... rows, along the curve's straight pieces."""
        first = self.target(1)
        counts, seconds = self._curve or ([], [])
        table = [first] * (counts[0] if counts else rows)
        for place in range(1, len(counts)):
            rise = (seconds[place] - seconds[place - 1]) / (counts[place] - counts[place - 1])
            table += [seconds[place - 1] + rise * more for more in range(1, counts[place] - counts[place - 1] + 1)]
        if len(table) < rows and counts:
            rise = self.target(counts[-1] + 1) - seconds[-1]
            table += [seconds[-1] + rise * more for more in range(1, rows - len(table) + 1)]
        return table

    @property
    def widest(self) -> int:
        """The most rows that were timed."""
        if self._widest is None:
            self._widest = max(self._times, default=0)
        return self._widest

    def most_more(self, others: int) -> int:
        """Rows beside a request's root that may be tried, with so many rows of others: twice as many as are known."""
        return max(_FIRST, 2 * self.widest - others - 1)

    def state_dict(self) -> dict[str, float]:
        """What a profile keeps."""
        return {str(rows): seconds for rows, seconds in self._times.medians.items()}

    def load_state_dict(self, kept: Mapping[str, float]) -> None:
        """Begins with what a profile holds."""
        for rows, seconds in kept.items():
            bucket = _bucket(int(rows))
            self._times.expect(bucket, float(seconds))
            self._last[bucket] = self.seen
        self._renew()

    def _convex(self) -> tuple[list[int], list[float]]:
        """Row counts and their times: the lower convex hull of what was measured, made not to fall.

        A pass is bound by memory first and by arithmetic later, so its time is convex in its rows but for the kernels'
        tiles. Medians of few samples are not: between two of them rows would seem to be free by chance, and all that
        drafts hold would be verified.
        """
        known = self._times.medians or self._times.least  # these where so far nothing was done twice
        hull: list[Point] = []  # from the widest down: no count takes longer than a higher one
        for rows in sorted(known, reverse=True):
            point = rows, min(known[rows], hull[-1][1]) if hull else known[rows]
            while len(hull) > 1 and _is_above(hull[-1], point, hull[-2]):
                hull.pop()
            hull.append(point)
        hull.reverse()
        return [rows for rows, _ in hull], [seconds for _, seconds in hull]

    def _slope(self, counts: Sequence[int], seconds: Sequence[float]) -> float:
        """What one more row costs beyond the widest known: what the last of these did, or a token of prompt where that
        is more, because a pass is bound by arithmetic in the end. Where one count is known it lies between what a row
        costs at best and that."""
        more = sum(tokens - counts[0] for tokens, _ in self._wide)
        token = sum(wide - seconds[0] for _, wide in self._wide) / more if more > 0 else 0.0
        if len(counts) < 2:
            least = _ROW * seconds[0]
            return (least + max(least, token)) / 2
        return max((seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]), token)


def _is_above(point: Point, left: Point, right: Point) -> bool:
    """Whether a point between two others lies on the line between them, or above it."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (point[1] - left[1]) * run >= rise * (point[0] - left[0])


def _bucket(rows: int) -> int:
    """Row counts that share their samples: all to 8, then in steps of 2, 4, 16, 64."""
    step = 1 if rows <= 8 else 2 if rows <= 16 else 4 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step
