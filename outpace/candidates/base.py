"""What a worker offers: it takes messages, runs a drafter beside the target, and never holds the target up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from outpace.candidates.cache import CandidateCache
from outpace.candidates.loop import Message

T = TypeVar("T")


class Worker(Protocol):
    """Whoever starts a worker closes it. `failure` is the exception that ended it, if one did."""

    failure: BaseException | None

    def post(self, message: Message) -> None:
        """Hands over a message; returns at once."""

    def beside(self, target_pass: Callable[[], T], rows: int) -> T:
        """Runs the target's pass over `rows` rows, with the drafter working meanwhile."""

    def wait(self, cache: CandidateCache, layers: int) -> None:
        """Lets the drafter add `layers` layers for one request, within a bound of some draft steps."""

    def close(self) -> None:
        """Ends the worker."""
