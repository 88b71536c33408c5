"""Who may join the queue: bounds on what waits, and how long a refused client does best to stay away."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outpace.server.choices import Group
from outpace.server.errors import ApiError
from outpace.server.options import Limits

LONGEST = 10.0  # seconds that a refused client is told to stay away, or as long as one answer takes
WINDOW = 30.0  # seconds of writing that the rate is taken from
USUAL = 128.0  # tokens of an answer, before any has ended
FORGETS = 0.9
MOMENT = 0.01  # seconds for which a count is kept


class Admission:
    """Knows every request that is not over. Used by the event loop alone."""

    def __init__(self, limits: Limits, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._batch, self._clock = limits, batch, clock
        self.groups: set[Group] = set()
        self._keys: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        self._recently = 0  # tokens of those
        self._usual = USUAL
        self._preparing = 0  # requests whose prompts are being read
        self._counts, self._counts_until = (0, 0), 0.0  # those that wait and that run, as they were a moment ago
        self._promised = 0.0  # when the client that was refused last was told to come back

    @property
    def waiting(self) -> int:
        """Choices without room in the engine yet."""
        return self._counted()[0]

    @property
    def running(self) -> int:
        """Choices that the engine works on."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        """Those that wait and those that run."""
        waiting = running = 0
        for group in self.groups:
            for choice in group.choices:
                waiting += (is_waiting := choice.is_waiting)
                running += choice.ended is None and not is_waiting
        return waiting, running

    @property
    def is_full(self) -> bool:
        """Whether there is no place for one more."""
        return self._ahead() > 0

    def _ahead(self) -> int:
        """Choices that wait where there is no place for one more, else 0. A flood asks this for every request, so what
        the engine does is looked at once in a moment, or when it told something."""
        if not self.groups and not self._preparing:
            return 0
        now = self._clock()
        if now >= self._counts_until:
            self._counts, self._counts_until = self._counted(), now + MOMENT
        waiting, running = self._counts
        waiting += self._preparing
        return waiting if waiting >= self._room(running) else 0

    def _room(self, running: int) -> int:
        """Choices that may wait: the queue's bound, and those that the engine takes up at once."""
        return self._limits.max_queue + max(0, self._batch - running)

    def check(self) -> None:
        """ApiError 429 where there is no place for one more."""
        if waiting := self._ahead():
            raise self._refusal(f"the queue is full: {waiting} answers wait for room", "queue_full")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Holds a place while a request's prompt is tokenised; ApiError 429 at once where there is none."""
        self.check()
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def admit(self, group: Group) -> None:
        """Takes a request in; ApiError 429 where there is no room to wait. A server without work takes any."""
        limits, more = self._limits, len(group.choices)
        if limits.per_key and self._keys[group.key] >= limits.per_key:
            raise self._refusal(f"this key has {limits.per_key} requests under way, which is its limit", "key_limit")
        waiting = [choice for other in self.groups for choice in other.choices if choice.is_waiting]
        if self.groups and len(waiting) + more > self._room(self.running):
            raise self._refusal(f"the queue is full: {len(waiting)} answers wait for room", "queue_full")
        tokens = sum(len(choice.asked.request.prompt) for choice in waiting)
        if waiting and tokens + group.prompt_tokens > limits.max_queued_tokens:
            raise self._refusal(f"the queue is full: prompts of {tokens} tokens wait for room", "queue_full")
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
                    self._usual = FORGETS * self._usual + (1 - FORGETS) * choice.ended.tokens

    def wrote(self, tokens: int) -> None:
        """So many tokens were written now, by all."""
        now = self._clock()
        self._counts_until = 0.0
        self._recent.append((now, tokens))
        self._recently += tokens
        while self._recent[0][0] < now - WINDOW:
            self._recently -= self._recent.popleft()[1]

    def _refusal(self, why: str, code: str) -> ApiError:
        return ApiError(429, f"{why}; ask again later", code=code, retry_after=self.wait())

    def wait(self) -> float:
        """Seconds until there should be room for who is refused now: behind those who were refused before, as if all
        stood in a line. Otherwise they would all come back at once, and be refused again."""
        now, each = self._clock(), self._each()
        self._promised = min(max(self._promised, now) + each, now + max(LONGEST, each))
        return self._promised - now

    def _each(self) -> float:
        """Seconds in which there is room for one more, by what was written lately."""
        if len(self._recent) < 2 or not self._recently:
            return 1.0
        rate = self._recently / max(self._recent[-1][0] - self._recent[0][0], 0.1)
        return min(max(self._usual / rate, 0.05), 60.0)
