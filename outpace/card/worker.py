"""The base of all workers: the target's side of a drafter that runs in parallel, and the caches that its levels go
to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outpace.card.cache import CandidateCache, CandidateLevel, Correction
from outpace.card.loop import Close, Correct, DraftLoop, Message, Open, Pause, Resume, SetDirectives
from outpace.core.drafting import DraftDirectives
from outpace.core.types import Drafter, Request
from outpace.models.base import Part

T = TypeVar("T")
AnyWorker = TypeVar("AnyWorker", bound="DraftWorker")


class DraftWorker(ABC):
    """Runs a drafter in parallel with the target without ever blocking it. Who calls `start` calls `close`, too.

    Only requests, directives, corrections and levels pass between the two sides; the caches are on the target's side.
    `failure`: the exception that ended the drafter, or keeps it from drafting now; `will_restart`: whether the drafter
    is started again after it. `cores`: CPU cores that the drafter takes from the target while it works.
    `step_seconds`: moving average of the drafter's forwards, 0 if unknown.
    """

    cores = 0
    step_seconds = 0.0
    will_restart = False

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._caches: dict[int, CandidateCache] = {}
        self._resting_keys: set[int] = set()  # requests that are not drafted until the next directive

    def start(self: AnyWorker) -> AnyWorker:
        """Start the thread or the process that drafts, if there is one, and return the worker; call it where `close`
        follows even after an interrupt."""
        self._begin()
        return self

    def open(self, key: int, request: Request, cache: CandidateCache) -> None:
        """Start a request; its levels go to `cache`."""
        self._caches[key] = cache
        self._post(Open(key, request))

    def correct(self, key: int, correction: Correction) -> None:
        """Tell the drafter that a request's root moved; returns at once."""
        self._post(Correct(key, correction))

    def set_directives(self, key: int, directives: DraftDirectives) -> None:
        """Set how a request is drafted from now on; returns at once."""
        (self._resting_keys.add if directives.levels == 0 else self._resting_keys.discard)(key)
        self._post(SetDirectives(key, directives))

    def pause(self, key: int) -> None:
        """Free a request's keys and values until `resume`; returns at once."""
        self._post(Pause(key))

    def resume(self, key: int) -> None:
        """Continue a paused request."""
        self._post(Resume(key))

    def forget(self, key: int) -> int:
        """End a request; return how many of its candidates arrived too late, 0 if it had ended already."""
        self._post(Close(key))
        self._resting_keys.discard(key)
        cache = self._caches.pop(key, None)
        return 0 if cache is None else cache.counts["orphan"]

    @property
    def is_working(self) -> bool:
        """Whether the drafter works now, or will once it has read its messages. Requests whose directives forbid
        drafting do not count."""
        return len(self._caches) > len(self._resting_keys) and self.failure is None

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """Return the most bytes of KV cache that the drafter holds in this process for texts of these lengths."""
        return 0

    @property
    def round_trip_seconds(self) -> float:
        """Seconds that a correction and the levels in answer to it travel; 0 if that is negligible."""
        return 0.0

    def round_trip_of(self, cache: CandidateCache) -> float:
        """Return `round_trip_seconds` for one request."""
        return self.round_trip_seconds

    def wrap_target(self, target: Any) -> Any:
        """Return the model that the engine runs in place of `target`, for workers that simulate concurrency."""
        return target

    @abstractmethod
    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        """Let the drafter add `levels` levels for one request and reach `depth` below its root, for the time of a few
        draft steps at most."""

    @abstractmethod
    def stop(self) -> None:
        """Tell the worker to end and return at once; the garbage collector may call this, under any lock."""

    def close(self) -> None:
        """End the worker and wait for its end."""
        self.stop()

    @abstractmethod
    def _begin(self) -> None:
        """Start what drafts."""

    @abstractmethod
    def _post(self, message: Message) -> None:
        """Send a message to the drafter's side; returns at once."""

    def _publish(self, levels: Sequence[tuple[int, CandidateLevel]]) -> None:
        for key, level in levels:
            cache = self._caches.get(key)
            if cache is not None:
                cache.insert(level)

    def _count_step(self, seconds: float) -> None:
        """Update the moving average `step_seconds` with the duration of a draft step."""
        self.step_seconds += 0.1 * (seconds - self.step_seconds) if self.step_seconds else seconds


class SameThreadWorker(DraftWorker):
    """Runs the drafter's loop in the thread of the engine."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self._loop = DraftLoop(drafter)

    def _begin(self) -> None:
        pass

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        return 0 if self.failure else self._loop.drafter.capabilities.memory(lengths)

    def stop(self) -> None:
        pass  # nothing runs between the calls of the engine

    def close(self) -> None:
        """End the drafter too."""
        self.stop()
        self._loop.drafter.capabilities.save()

    def _post(self, message: Message) -> None:
        if self.failure is None:
            self._loop.post(message)

    def _grow(self) -> list[tuple[int, CandidateLevel]]:
        """Run one draft step; return its levels, none if there is nothing to draft or the drafter failed."""
        return [] if self.failure is not None else self._run_guarded(self._loop.grow) or []

    def _publish(self, levels: Sequence[tuple[int, CandidateLevel]]) -> None:
        self._run_guarded(super()._publish, levels)

    def _run_guarded(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function; if it raises, record the failure of the drafter and return None."""
        try:
            return call(*arguments)
        except BaseException as failure:
            self._loop.drop(failure)
            if not isinstance(failure, Exception):  # an interrupt, after which the engine ends the running requests
                raise
            self.failure = failure
            return None


class ObservedModel:
    """A target that reports its passes; everything else is the wrapped model's."""

    def __init__(self, inner: Any, report: Callable[[int], None]) -> None:
        """`report` is called with the number of rows after each pass, which on a GPU has only been launched then."""
        self._inner, self._report = inner, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(self, forest: Sequence[Part]) -> Any:
        return self._reported(forest, self._inner.score(forest))

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> Any:
        return self._reported(forest, self._inner.score_hidden(forest, layers))

    def score_sparse(self, forest: Sequence[Part]) -> Any:
        return self._reported(forest, self._inner.score_sparse(forest))

    def _reported(self, forest: Sequence[Part], output: Any) -> Any:
        self._report(sum([len(part.tokens) for part in forest]))
        return output
