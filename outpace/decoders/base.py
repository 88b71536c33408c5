"""What a decoder sees of the engine: its own request, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from outpace.candidates.cache import CandidateCache, Correction
from outpace.core.types import Ask, Request, Source
from outpace.decoders._costs import Costs

Coroutine = Generator[Ask, Any, None]


class Place(Protocol):
    """One running request. `budget` is the number of nodes that the load allows it in this round, the root included."""

    request: Request
    budget: int
    requests: int  # running at once, this one included
    rows_of_others: int  # of the last pass
    costs: Costs
    sources: Sequence[Source]  # of drafts
    candidates: CandidateCache  # only where the decoder needs a worker

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""

    @property
    def correct(self) -> Callable[[Correction], None]:
        """Tells the drafter's worker where the target went."""
