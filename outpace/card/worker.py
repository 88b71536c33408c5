"""What all workers share: a loop that drafts for the running requests, and the caches that its layers go to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from outpace.card.cache import CandidateCache, CandidateLayer, Correction
from outpace.card.loop import Close, Configure, Correct, Message, Open, Pause, Resume
from outpace.core.drafting import DraftDirectives
from outpace.core.types import Request


class DraftWorker(ABC):
    """Runs a drafter beside the target and never holds it up. Whoever starts a worker closes it.

    `failure` is the exception that ended it, or keeps it from drafting just now, if one does. Only requests,
    corrections and layers cross between the two sides; the caches stay on the target's. `cores`: of those that the
    target could use, how many the drafter takes while it works.
    """

    cores = 0
    step_seconds = 0.0  # of the drafter's forwards, on average; 0: not known yet

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._caches: dict[int, CandidateCache] = {}
        self._resting_keys: set[int] = set()  # requests for which nothing is drafted, until another order comes

    def open(self, key: int, request: Request, cache: CandidateCache) -> None:
        """A request starts; its layers go to `cache`."""
        self._caches[key] = cache
        self._post(Open(key, request))

    def correct(self, key: int, correction: Correction) -> None:
        """The target moved a request's root; returns at once."""
        self._post(Correct(key, correction))

    def order(self, key: int, orders: DraftDirectives) -> None:
        """How a request is drafted from now on; returns at once."""
        (self._resting_keys.add if orders.layers == 0 else self._resting_keys.discard)(key)
        self._post(Configure(key, orders))

    def pause(self, key: int) -> None:
        """A request gives its keys and values back until there is room for them; returns at once."""
        self._post(Pause(key))

    def resume(self, key: int) -> None:
        """It goes on."""
        self._post(Resume(key))

    def forget(self, key: int) -> None:
        """A request is over."""
        self._caches.pop(key, None)
        self._resting_keys.discard(key)
        self._post(Close(key))

    @property
    def is_working(self) -> bool:
        """Whether the drafter works at the moment, or will when it has read its messages. What it was told to leave
        alone is no work, though it reads that it was."""
        return len(self._caches) > len(self._resting_keys) and self.failure is None

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """The most bytes of keys and values that the drafter holds in this process for requests whose texts have so
        many tokens each."""
        return 0

    @property
    def num_captures(self) -> int:
        """Number of passes captured so far by the drafter's models in this process."""
        return 0

    def wrap_target(self, target: Any) -> Any:
        """Return the model that the engine runs in place of `target`, for workers that simulate concurrency."""
        return target

    @abstractmethod
    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        """Lets the drafter add `layers` layers for one request, and reach `depth` below its root, within a bound of
        some draft steps."""

    @abstractmethod
    def stop(self) -> None:
        """Tells the worker to end and returns at once, whoever calls: the collector of garbage may, under any lock."""

    def close(self) -> None:
        """Ends the worker and waits for its end."""
        self.stop()

    @abstractmethod
    def _post(self, message: Message) -> None:
        """Hands a message to the drafter's side; returns at once."""

    def _publish(self, layers: Sequence[tuple[int, CandidateLayer]]) -> None:
        for key, layer in layers:
            cache = self._caches.get(key)
            if cache is not None:
                cache.insert(layer)
