"""What a drafter that is made of several passes on to all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.orders import Orders
from outpace.core.types import Drafter, DraftState
from outpace.core.untold import Untold


@dataclass
class SeveralState(DraftState):
    """The parts' own states, in the parts' order; `untold`: what each is still to be told, where it is told late."""

    parts: list[Any] = field(default_factory=list)
    untold: list[Untold] = field(default_factory=list)


class Several(Drafter):
    """Who drafts when, and what each is shown, is said in a class for each way."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = parts
        self.shares_time = any(part.shares_time for part in parts)

    def heed(self, state: SeveralState, orders: Orders) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.heed(inner, orders)

    def work_beside(self) -> None:
        for part in self.parts:
            part.work_beside()

    def hear(self, state: SeveralState, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.hear(inner, path, tokens, root_id)

    def amortised(self, seconds: float) -> float:
        for part in self.parts:
            seconds = part.amortised(seconds)
        return seconds

    def share_cores(self, most: int) -> None:
        for part in self.parts:
            part.share_cores(most)

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """Of all parts together."""
        return sum(part.stored_bytes(lengths) for part in self.parts)

    def pause(self, state: SeveralState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            inner.base = None
            part.pause(inner)

    def close(self, state: SeveralState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.close(inner)

    def end(self) -> None:
        for part in self.parts:
            part.end()
