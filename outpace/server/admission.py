"""Who may join the queue: bounds on what waits, and how long a refused client does best to stay away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from outpace.server.choices import Group
from outpace.server.errors import ApiError
from outpace.server.options import Limits
from outpace.server.pace import Pace

LONGEST = 10.0  # seconds that a refused client is told to stay away, or as long as one answer takes
UNKNOWN = 1.0  # seconds for one more, before any were measured
SPREAD = 1.25  # times what is expected: of those who may wait just as long as is allowed half would wait in vain
MOMENT = 0.01  # seconds for which a count is kept


class Counts(NamedTuple):
    """Choices that wait for room and that the engine works on; `ahead`: tokens that are expected of those that wait."""

    waiting: int = 0
    running: int = 0
    ahead: float = 0.0


class Want(NamedTuple):
    """Why there is no room, in words and as a code, and the least seconds until there may be."""

    why: str
    code: str
    seconds: float = 0.0


class Admission:
    """Knows every request that is not over. Used by the event loop alone."""

    def __init__(self, limits: Limits, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._batch, self._clock = limits, batch, clock
        self.groups: set[Group] = set()
        self._keys: Counter[str] = Counter()
        self._pace = Pace(clock)
        self.preparing = 0  # places of requests that are not admitted yet
        self._counts, self._counts_until = Counts(), 0.0  # as they were a moment ago
        self._promised = 0.0  # when the client that was refused last was told to come back

    @property
    def waiting(self) -> int:
        """Choices without room in the engine yet."""
        return self._counted().waiting

    @property
    def running(self) -> int:
        """Choices that the engine works on."""
        return self._counted().running

    def _counted(self) -> Counts:
        waiting = running = 0
        ahead = 0.0
        for group in self.groups:
            for choice in group.choices:
                if choice.is_waiting:
                    waiting += 1
                    ahead += self._pace.expected(choice.asked.request.max_tokens)
                else:
                    running += choice.ended is None
        return Counts(waiting, running, ahead)

    @property
    def is_full(self) -> bool:
        """Whether there is no place for one more."""
        return self._want() is not None

    def _want(self) -> Want | None:
        """Why there is no place for one more. A flood asks this for every request, so what the engine does is looked
        at once in a moment, or when it told something."""
        if not self.groups and not self.preparing:
            return None
        now = self._clock()
        if now >= self._counts_until:
            self._counts, self._counts_until = self._counted(), now + MOMENT
        waiting = self._counts.waiting + self.preparing
        if waiting >= self._room(self._counts.running):
            return Want(f"the queue is full: {waiting} answers wait for room", "queue_full")
        seconds, most = self._begins_in(self._counts), self._limits.queue_timeout
        if seconds <= most:
            return None
        why = f"{waiting} answers wait for room, which may take {seconds:.0f} seconds, and {most:g} are allowed"
        return Want(f"the queue is slow: {why}", "queue_slow", seconds - most)

    def _begins_in(self, counts: Counts) -> float:
        """Seconds until the engine should have begun with who comes now, by what it wrote lately; 0 where that is not
        known. Before it all who wait are begun with and one more answer ends. Where nobody was left waiting by the
        engine's last step, it takes up those for whom it has places at once."""
        waiting, tokens = counts.waiting + self.preparing, counts.ahead + self.preparing * self._pace.expected()
        if not self._pace.is_crowded:
            free = max(0, self._batch - counts.running)
            if waiting < free:
                return 0.0
            tokens *= (waiting - free) / max(waiting, 1)
        return SPREAD * (self._pace.seconds(tokens + self._pace.expected()) or 0.0)

    def _room(self, running: int) -> int:
        """Choices that may wait: the queue's bound, and those that the engine takes up at once."""
        return self._limits.max_queue + max(0, self._batch - running)

    def check(self) -> None:
        """ApiError 429 where there is no place for one more."""
        if want := self._want():
            raise self._later(want)

    def place(self) -> Place:
        """A place for a request until it is admitted; ApiError 429 at once where there is none."""
        self.check()
        return Place(self)

    def admit(self, group: Group) -> None:
        """Takes a request in; ApiError 429 where there is no room to wait. A server without work takes any."""
        limits, more = self._limits, len(group.choices)
        if limits.per_key and self._keys[group.key] >= limits.per_key:
            said = f"this key has {limits.per_key} requests under way, which is its limit"
            raise self._later(Want(said, "key_limit"))
        waiting = [choice for other in self.groups for choice in other.choices if choice.is_waiting]
        if self.groups and len(waiting) + more > self._room(self.running):
            raise self._later(Want(f"the queue is full: {len(waiting)} answers wait for room", "queue_full"))
        tokens = sum(len(choice.asked.request.prompt) for choice in waiting)
        if waiting and tokens + group.prompt_tokens > limits.max_queued_tokens:
            raise self._later(Want(f"the queue is full: prompts of {tokens} tokens wait for room", "queue_full"))
        self.groups.add(group)
        self._counts_until = 0.0
        self._keys[group.key] += 1

    def leave(self, group: Group) -> None:
        """It is over."""
        if group in self.groups:
            self.groups.remove(group)
            self._counts_until = 0.0
            self._keys[group.key] -= 1
            self._keys += Counter()  # without those at zero
            for choice in group.choices:
                if choice.ended and choice.ended.tokens:
                    self._pace.ended(choice.ended.tokens)
            if not self.groups:
                self._pace.rest()

    def wrote(self, tokens: int) -> None:
        """So many tokens were written now, by all."""
        self._counts, self._counts_until = self._counted(), self._clock() + MOMENT
        self._pace.wrote(tokens, self._counts.waiting > 0)

    def waited(self, group: Group) -> ApiError | None:
        """What to tell a request whose time in the queue is over; None where the engine works on it."""
        if not group.is_waiting:
            return None
        said = f"the request waited {self._limits.queue_timeout:g} seconds for room"
        return self._later(Want(said, "queue_timeout"))

    def _later(self, want: Want) -> ApiError:
        said, retry_after = f"{want.why}; ask again later", self.wait(want.seconds)
        return ApiError(429, said, code=want.code, retry_after=retry_after)

    def wait(self, at_least: float = 0.0) -> float:
        """Seconds until there should be room for who is refused now, behind those who were refused before, as if all
        stood in a line. Otherwise they would all come back at once, and be refused again."""
        now, each = self._clock(), self._each()
        most = max(LONGEST, at_least + each)
        self._promised = min(max(self._promised, now + at_least) + each, now + most)
        return self._promised - now

    def _each(self) -> float:
        """Seconds in which there is room for one more, by what was written lately."""
        seconds = self._pace.seconds(self._pace.expected())
        return UNKNOWN if seconds is None else min(max(seconds, 0.05), 60.0)


class Place:
    """What a request holds in the queue from the moment that it has come until it is admitted or refused: many may come
    before the first of them is looked at."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._is_held = admission, True
        admission.preparing += 1

    def leave(self) -> None:
        """Once counts."""
        if self._is_held:
            self._is_held = False
            self._admission.preparing -= 1
