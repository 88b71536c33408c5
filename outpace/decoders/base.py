"""What a decoder sees of the engine: its own request, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.candidates.cache import CandidateCache, Correction
from outpace.core.orders import Orders
from outpace.core.types import Ask, Request, Source
from outpace.decoders._costs import Costs

Coroutine = Generator[Ask, Any, None]


def _to_nobody(message: Correction | Orders) -> None:
    """There is no worker."""


@dataclass(eq=False)
class Place:
    """One running request as its decoder sees it. `budget` is the number of nodes that the load allows it in this
    round, the root included."""

    request: Request
    committed: Sequence[int]  # the prompt, and what was written so far
    costs: Costs = field(repr=False)  # the engine's
    sources: Sequence[Source] = ()  # of drafts in turn
    budget: int = 1
    requests: int = 1  # running at once, this one included
    rows_of_others: int = 0  # of the last pass
    left: int = 1  # tokens that may still be written
    candidates: CandidateCache = field(init=False, repr=False)  # where the decoder needs a worker, and there alone
    correct: Callable[[Correction], None] = field(default=_to_nobody, repr=False)  # tells the worker where it went
    turn_seconds: Callable[[], float] = field(default=float, repr=False)  # of the worker's forwards, on average
    order: Callable[[Orders], None] = field(default=_to_nobody, repr=False)  # tells it how to go on

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""
        return self.committed[-1]
