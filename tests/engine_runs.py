"""Submit requests to an engine and run them to their ends."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from outpace.core.types import Request
from outpace.decoders.autoregressive import Autoregressive
from outpace.engine.engine import Engine
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import TokenSequence

_pause = Scheduler._pause


def _count_pause(scheduler: Scheduler, sequence: TokenSequence) -> None:
    sequence.context.test_pauses = num_pauses(sequence) + 1
    _pause(scheduler, sequence)


Scheduler._pause = _count_pause  # type: ignore[method-assign]


def num_pauses(sequence: TokenSequence) -> int:
    """Return how often a request was paused because memory was used up."""
    return getattr(sequence.context, "test_pauses", 0)


def submit(
    engine: Engine, *requests: Request, method: ModuleType = Autoregressive, **more: object
) -> list[TokenSequence]:
    """Submit requests with the default options of a method; `more` are arguments of `Engine.submit`."""
    return [engine.submit(request, method, method.Options(), **more) for request in requests]


def finish(
    engine: Engine, *runs: TokenSequence, most: int = 2000, after_step: Callable[[], None] | None = None
) -> list[list[int]]:
    """Run steps until all these requests have ended, at most `most`, and return their texts."""
    for _ in range(most):
        if all(run.finish_reason for run in runs):
            return [run.tokens for run in runs]
        engine.step()
        if after_step:
            after_step()
    raise AssertionError("the requests did not end")
