"""What is measured: anything that continues a prompt's tokens. Our own methods and other engines look alike here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Answered:
    """One answer to one prompt, written alone.

    `decode_seconds` is from the first token's arrival to the last's, `first_token` from the call to the first token's.
    `arrivals` are the seconds after the call at which each round's tokens were there, `counts` how many each brought.
    """

    tokens: tuple[int, ...]
    seconds: float
    first_token: float
    arrivals: tuple[float, ...]
    counts: tuple[int, ...]
    drafted: int | None = None  # candidates that were verified; None where the engine does not tell
    accepted: int | None = None
    by_position: tuple[float, ...] = ()  # that the i-th drafted token is accepted, once those before it were
    hit_rate: float | None = None

    @property
    def decode_seconds(self) -> float:
        return self.arrivals[-1] - self.arrivals[0] if len(self.arrivals) > 1 else 0.0

    @property
    def decoded(self) -> int:
        """Tokens that arrived during `decode_seconds`."""
        return sum(self.counts[1:])


@dataclass(frozen=True)
class PeerSettings:
    """What a peer is opened with. `target` and `draft` are what the user named (None: the shipped model, no draft)."""

    target: str | Path | None
    draft: str | Path | None
    stop_ids: frozenset[int]
    threads: int
    max_context: int


class Peer(Protocol):
    """An engine that is ready to write. Greedy: every engine has that alike."""

    name: str
    precision: str  # as int8, float32, Q8_0: texts are comparable within one precision only

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answered:
        """Continues the prompt until a stop token, which counts, or `max_tokens`."""

    def close(self) -> None:
        """Frees its memory and ends its processes."""
