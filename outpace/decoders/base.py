"""What a decoder sees of the engine: its own request, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.card.cache import CandidateCache, Correction
from outpace.core.drafting import DraftDirectives
from outpace.core.types import Ask, Request, Source
from outpace.planning.cost_model import CostModel

Coroutine = Generator[Ask, Any, None]


def _to_nobody(message: Correction | DraftDirectives) -> None:
    """There is no worker."""


@dataclass
class BatchRows:
    """The rows of the pass that is being put together: of each request what it asks for in this round, or, until it
    has chosen, what it had in the last pass. Who plans later knows what was planned before."""

    rows: int = 0


@dataclass(eq=False)
class RequestContext:
    """One running request as its decoder sees it. `budget` is the number of nodes that the load allows it in this
    round, the root included."""

    request: Request
    committed: Sequence[int]  # the prompt, and what was written so far
    costs: CostModel = field(repr=False)  # the engine's
    sources: Sequence[Source] = ()  # of drafts in turn
    budget: int = 1
    requests: int = 1  # running at once, this one included
    rows: int = 1  # of this request, see `BatchRows`
    load: BatchRows = field(default_factory=lambda: BatchRows(1), repr=False)  # of all requests
    left: int = 1  # tokens that may still be written
    carries: Collection[str] | None = None  # whole rounds may be asked for, with copies by these sources; None: not
    candidates: CandidateCache = field(init=False, repr=False)  # where the decoder needs a worker, and there alone
    correct: Callable[[Correction], None] = field(default=_to_nobody, repr=False)  # tells the worker where it went
    step_seconds: Callable[[], float] = field(default=float, repr=False)  # of the worker's forwards, on average
    order: Callable[[DraftDirectives], None] = field(default=_to_nobody, repr=False)  # tells it how to go on

    @property
    def rows_of_others(self) -> int:
        """Rows that the pass has for other requests."""
        return self.load.rows - self.rows

    def asks_for(self, rows: int) -> None:
        """It is known how many rows this request has in the pass."""
        self.load.rows += rows - self.rows
        self.rows = rows

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""
        return self.committed[-1]
