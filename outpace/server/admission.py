"""Admission control: bounds on waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from outpace.server.choices import ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits

RETRY_SECONDS = 1.0  # after which a refused client should retry


class QueueCounts(NamedTuple):
    """Choices that wait for a slot in the engine, and those that it works on."""

    waiting: int
    running: int


class Admission:
    """All requests that have not ended. Only the event loop uses it."""

    def __init__(self, limits: ServerLimits, batch: int, on_refusal: Callable[[str], None] = lambda code: None) -> None:
        """`on_refusal` is called with the code of each refusal."""
        self._limits, self._batch, self._on_refusal = limits, batch, on_refusal
        self.groups: set[ChoiceGroup] = set()
        self._keys: Counter[str] = Counter()
        self.num_reserved = 0  # requests whose body was received and which were not admitted yet

    def count(self) -> QueueCounts:
        """Count the choices of all requests."""
        states = [choice.is_waiting for group in self.groups for choice in group.choices if choice.ended is None]
        return QueueCounts(sum(states), len(states) - sum(states))

    def check(self) -> None:
        """Raise ApiError 429 if one more request would be refused. An idle server accepts any request."""
        if not self.groups and not self.num_reserved:
            return
        counts = self.count()
        waiting = counts.waiting + self.num_reserved
        if waiting >= self._max_waiting(counts.running):
            raise self._error(f"the queue is full: {waiting} answers are waiting", "queue_full")

    def reserve(self) -> None:
        """Count a request as waiting until `release`; raise ApiError 429 if there is no place."""
        self.check()
        self.num_reserved += 1

    def release(self) -> None:
        self.num_reserved -= 1

    def admit(self, group: ChoiceGroup) -> None:
        """Add a request; raise ApiError 429 if the queue has no space."""
        limits = self._limits
        if limits.max_requests_per_key and self._keys[group.key] >= limits.max_requests_per_key:
            message = f"this key has its limit of {limits.max_requests_per_key} concurrent requests"
            raise self._error(message, "key_limit")
        waiting = [choice for other in self.groups for choice in other.choices if choice.is_waiting]
        if self.groups and len(waiting) + len(group.choices) > self._max_waiting(self.count().running):
            raise self._error(f"the queue is full: {len(waiting)} answers are waiting", "queue_full")
        tokens = sum(len(choice.prepared.request.prompt) for choice in waiting)
        if waiting and tokens + group.prompt_tokens > limits.max_queued_tokens:
            raise self._error(f"the queue is full: prompts of {tokens} tokens are waiting", "queue_full")
        self.groups.add(group)
        self._keys[group.key] += 1

    def remove(self, group: ChoiceGroup) -> None:
        self.groups.remove(group)
        self._keys[group.key] -= 1
        self._keys += Counter()  # drops keys with count 0

    def timeout_error(self, group: ChoiceGroup) -> ApiError | None:
        """Return the error for a request at its queue timeout; None if the engine has started it."""
        if not group.is_waiting:
            return None
        return self._error(f"the request waited {self._limits.queue_timeout:g} seconds in the queue", "queue_timeout")

    def _max_waiting(self, running: int) -> int:
        """Return how many choices may wait: the queue's bound, and those that free slots take at once."""
        return self._limits.max_queue + max(0, self._batch - running)

    def _error(self, message: str, code: str) -> ApiError:
        self._on_refusal(code)
        return ApiError(429, f"{message}; retry later", code=code, retry_after=RETRY_SECONDS)
