"""Records the rounds of another engine's answer, and checks that a peer can run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile

from outpace.bench.peer import PeerSettings, TimedAnswer
from outpace.core.errors import UserError
from outpace.core.stats import positions


class RoundRecorder:
    """Records when the tokens of an answer arrive; the clock starts with the object.

    The answer ends with a stop token, which is included, or after `max_tokens`; later tokens are ignored.
    """

    def __init__(self, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._stop_ids, self._left = stop_ids, max_tokens
        self._rounds: list[_Round] = []
        self._start = time.perf_counter()
        self.is_over = False

    def begin(self, drafts: Sequence[int] | None = None) -> None:
        """Begin a round that verifies these drafts; None if the engine drafts nothing."""
        self._rounds.append(_Round(drafts))

    def write(self, *tokens: int) -> None:
        for token in tokens:
            if self.is_over:
                return
            self._rounds[-1].tokens.append(token)
            self._rounds[-1].arrival = time.perf_counter() - self._start
            self._left -= 1
            self.is_over = token in self._stop_ids or not self._left

    def finish(self) -> TimedAnswer:
        seconds = time.perf_counter() - self._start
        rounds = [one for one in self._rounds if one.tokens]
        drafted = [(len(one.drafts), num_accepted(one.drafts, one.tokens)) for one in rounds if one.drafts is not None]
        return TimedAnswer(
            tokens=tuple(token for one in rounds for token in one.tokens),
            seconds=seconds,
            first_token=rounds[0].arrival if rounds else seconds,
            arrivals=tuple(one.arrival for one in rounds),
            counts=tuple(len(one.tokens) for one in rounds),
            drafted=sum(count for count, _ in drafted) if drafted else None,
            accepted=sum(count for _, count in drafted) if drafted else None,
            positions=positions(drafted),
        )


@dataclass
class _Round:
    """A round's drafts and emitted tokens, and when the last of them arrived."""

    drafts: Sequence[int] | None
    tokens: list[int] = field(default_factory=list)
    arrival: float = 0.0


def num_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of drafts and tokens."""
    pairs = zip(drafts, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_length(name: str, settings: PeerSettings, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise UserError unless the prompt and the answer fit the context that the peer was opened with."""
    if not prompt or len(prompt) + max_tokens > settings.max_context:
        given = f"{len(prompt)} tokens of prompt and {max_tokens} of answer"
        raise UserError(f"peer {name} was given {given}, it holds 1 to {settings.max_context} of both")


def check_draft(name: str, settings: PeerSettings) -> str:
    """Return the draft that the user named; UserError without one, or for one that only outpace can make."""
    draft = settings.draft
    if draft is None:
        raise UserError(f"peer {name} needs a draft, name one with --draft")
    if str(draft).startswith("layers:") or str(draft) == "auto":
        raise UserError(f"peer {name} cannot make the draft {draft}, name a folder, a .gguf file or a hub id")
    return str(draft)


def require(name: str, package: str, command: str) -> None:
    """Raise UserError with the install command unless `package` can be imported."""
    if find_spec(package) is None:
        raise UserError(f"peer {name} is not installed: run {command}")
