"""Admission control: bounds on waiting requests, and an estimate of when a refused client should retry."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from outpace.server.choices import ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits

MAX_RETRY_AFTER = 10.0  # seconds, or the time of one answer if that is longer
UNKNOWN_SECONDS = 1.0  # per answer, before the first measurement
SAFETY = 1.25  # expected waits vary: without a margin, half of the longest ones would exceed the limit
COUNT_SECONDS = 0.01  # for which counts are cached
WINDOW = 30.0  # seconds of output from which throughput is measured
LEAST_SECONDS = 1.0  # of waiting before throughput is known
USUAL_TOKENS = 128.0  # of an answer, before one has ended
DECAY = 0.9  # of the mean answer length


class QueueEstimator:
    """Throughput while requests wait, and the usual length of an answer.

    Only time in which requests wait counts: an idle server writes nothing, and one with few requests less than it can.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: deque[tuple[float, float, int]] = deque()  # end of a span with waiting requests, seconds, tokens
        self._seconds, self._tokens = 0.0, 0  # sums over the spans
        self._since: float | None = None  # start of the current span; None: no request waits
        self._usual = USUAL_TOKENS

    @property
    def is_crowded(self) -> bool:
        """Whether requests waited at the last step."""
        return self._since is not None

    def record(self, tokens: int, has_waiting: bool) -> None:
        """Record a step that wrote `tokens`. It counts if requests waited before and after it, since most new requests
        wait for one step anyway."""
        now = self._clock()
        if self._since is not None and has_waiting:
            self._spans.append((now, now - self._since, tokens))
            self._seconds += now - self._since
            self._tokens += tokens
        self._since = now if has_waiting else None
        self._drop_old(now)

    def record_length(self, tokens: int) -> None:
        self._usual = DECAY * self._usual + (1 - DECAY) * tokens

    def expected_tokens(self, most: float = math.inf) -> float:
        """Return the expected length of an answer of at most `most` tokens."""
        return min(self._usual, most)

    def seconds(self, tokens: float) -> float | None:
        """Return the time to write `tokens` under load; None without recent measurements.

        Fewer measured tokens than one answer's need half a window of time to count.
        """
        now = self._clock()
        self._drop_old(now)
        measured = self._seconds + (0.0 if self._since is None else now - self._since)
        if measured < (LEAST_SECONDS if self._tokens >= self._usual else WINDOW / 2):
            return None
        return tokens * measured / max(self._tokens, 1)

    def _drop_old(self, now: float) -> None:
        while self._spans and self._spans[0][0] < now - WINDOW:
            _, seconds, tokens = self._spans.popleft()
            self._seconds = self._seconds - seconds if self._spans else 0.0  # exactly 0: rounding errors would add up
            self._tokens -= tokens


class QueueCounts(NamedTuple):
    """Waiting and running choices, and the tokens that the waiting ones are expected to write."""

    waiting: int
    running: int
    waiting_tokens: float


class Refusal(NamedTuple):
    """Why a request is refused, and the least seconds until a retry can succeed."""

    message: str
    code: str
    seconds: float = 0.0


class Admission:
    """All requests that have not ended. Only the event loop uses it."""

    def __init__(
        self,
        limits: ServerLimits,
        batch: int,
        on_refusal: Callable[[str], None] = lambda code: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_refusal` is called with the code of each refusal."""
        self._limits, self._batch, self._on_refusal, self._clock = limits, batch, on_refusal, clock
        self.groups: set[ChoiceGroup] = set()
        self._keys: Counter[str] = Counter()
        self._estimator = QueueEstimator(clock)
        self.num_reserved = 0  # requests that were received and not admitted yet
        self._counts, self._counts_until = QueueCounts(0, 0, 0.0), 0.0  # cached
        self._next_retry = 0.0  # when the last refused client should retry

    def count(self) -> QueueCounts:
        """Count the choices that wait for a slot in the engine, and those that it works on."""
        choices = [choice for group in self.groups for choice in group.choices if choice.ended is None]
        limits = [choice.prepared.request.max_tokens for choice in choices if choice.is_waiting]
        tokens = sum(self._estimator.expected_tokens(limit) for limit in limits)
        return QueueCounts(len(limits), len(choices) - len(limits), tokens)

    @property
    def is_full(self) -> bool:
        return self._refusal() is not None

    def _refusal(self) -> Refusal | None:
        """Return why one more request would be refused, or None. Counts are cached, since a flood asks very often."""
        if not self.groups and not self.num_reserved:
            return None
        if self._clock() >= self._counts_until:
            self._update_counts()
        waiting = self._counts.waiting + self.num_reserved
        if waiting >= self._max_waiting(self._counts.running):
            return Refusal(f"the queue is full: {waiting} answers are waiting", "queue_full")
        seconds, most = self._seconds_to_start(self._counts), self._limits.queue_timeout
        if seconds <= most:
            return None
        why = f"{waiting} answers are waiting, which may take {seconds:.0f} seconds, and {most:g} are allowed"
        return Refusal(f"the queue is slow: {why}", "queue_slow", seconds - most)

    def _seconds_to_start(self, counts: QueueCounts) -> float:
        """Estimate when the engine would start a new request; 0 if unknown.

        By then all waiting answers are written and one more has ended. If the last step left no request waiting, free
        slots are filled at once.
        """
        waiting = counts.waiting + self.num_reserved
        tokens = counts.waiting_tokens + self.num_reserved * self._estimator.expected_tokens()
        if not self._estimator.is_crowded:
            free = max(0, self._batch - counts.running)
            if waiting < free:
                return 0.0
            tokens *= (waiting - free) / max(waiting, 1)
        return SAFETY * (self._estimator.seconds(tokens + self._estimator.expected_tokens()) or 0.0)

    def _max_waiting(self, running: int) -> int:
        """Return how many choices may wait: the queue's bound, and those that free slots take at once."""
        return self._limits.max_queue + max(0, self._batch - running)

    def check(self) -> None:
        """Raise ApiError 429 if one more request would be refused."""
        if refusal := self._refusal():
            raise self._error(refusal)

    def reserve(self) -> Reservation:
        """Reserve a place for a request until it is admitted; raise ApiError 429 if there is none."""
        self.check()
        return Reservation(self)

    def admit(self, group: ChoiceGroup) -> None:
        """Add a request; raise ApiError 429 if the queue has no space. An idle server accepts any request."""
        limits, more = self._limits, len(group.choices)
        if limits.max_requests_per_key and self._keys[group.key] >= limits.max_requests_per_key:
            raise self._error(
                Refusal(f"this key has its limit of {limits.max_requests_per_key} concurrent requests", "key_limit")
            )
        waiting = [choice for other in self.groups for choice in other.choices if choice.is_waiting]
        if self.groups and len(waiting) + more > self._max_waiting(self.count().running):
            raise self._error(Refusal(f"the queue is full: {len(waiting)} answers are waiting", "queue_full"))
        tokens = sum(len(choice.prepared.request.prompt) for choice in waiting)
        if waiting and tokens + group.prompt_tokens > limits.max_queued_tokens:
            raise self._error(Refusal(f"the queue is full: prompts of {tokens} tokens are waiting", "queue_full"))
        self.groups.add(group)
        self._counts_until = 0.0
        self._keys[group.key] += 1

    def remove(self, group: ChoiceGroup) -> None:
        self.groups.remove(group)
        self._counts_until = 0.0
        self._keys[group.key] -= 1
        self._keys += Counter()  # drops keys with count 0
        for choice in group.choices:
            if choice.ended and choice.ended.tokens:
                self._estimator.record_length(choice.ended.tokens)
        if not self.groups:
            self._estimator.record(0, False)

    def record(self, tokens: int) -> None:
        self._update_counts()
        self._estimator.record(tokens, self._counts.waiting > 0)

    def _update_counts(self) -> None:
        self._counts, self._counts_until = self.count(), self._clock() + COUNT_SECONDS

    def timeout_error(self, group: ChoiceGroup) -> ApiError | None:
        """Return the error for a request at its queue timeout; None if the engine has started it."""
        if not group.is_waiting:
            return None
        message = f"the request waited {self._limits.queue_timeout:g} seconds in the queue"
        return self._error(Refusal(message, "queue_timeout"))

    def _error(self, refusal: Refusal) -> ApiError:
        self._on_refusal(refusal.code)
        retry_after = self.retry_after(refusal.seconds)
        return ApiError(429, f"{refusal.message}; retry later", code=refusal.code, retry_after=retry_after)

    def retry_after(self, at_least: float = 0.0) -> float:
        """Return the seconds after which a client that is refused now should retry.

        Each refused client gets a later time than the previous one; otherwise all would retry at once and be refused.
        """
        now, each = self._clock(), self._estimator.seconds(self._estimator.expected_tokens())
        each = UNKNOWN_SECONDS if each is None else min(max(each, 0.05), 60.0)
        most = max(MAX_RETRY_AFTER, at_least + each)
        self._next_retry = min(max(self._next_retry, now + at_least) + each, now + most)
        return self._next_retry - now


class Reservation:
    """A request's place in the queue from its arrival until it is admitted or refused."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._is_held = admission, True
        admission.num_reserved += 1

    def release(self) -> None:
        """Give the place back. Further calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._admission.num_reserved -= 1
