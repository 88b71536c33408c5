"""Records the rounds of another engine's answer, and checks that a peer can run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence

from outpace.bench.peer import PeerSettings, TimedAnswer
from outpace.core.errors import UserError
from outpace.core.stats import positions, rates


class RoundRecorder:
    """Records when the tokens of an answer arrive; the clock starts with the object.

    The answer ends with a stop token, which is included, or after `max_tokens`; later tokens are ignored.
    """

    def __init__(self, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._stop_ids, self._left = stop_ids, max_tokens
        self._arrivals: list[float] = []
        self._rounds: list[tuple[list[int], Sequence[int] | None]] = []  # tokens, drafts
        self._start = time.perf_counter()
        self._is_new = True
        self._drafts: Sequence[int] | None = None
        self.is_over = False

    def begin(self, drafts: Sequence[int] | None = None) -> None:
        """Begin a round that verifies these drafts; None if the engine drafts nothing."""
        self._is_new, self._drafts = True, drafts

    def write(self, *tokens: int) -> None:
        """Add tokens to the current round."""
        if not tokens or self.is_over:
            return
        if self._is_new:
            self._rounds.append(([], self._drafts))
            self._arrivals.append(0.0)
            self._is_new = False
        for token in tokens:
            self._rounds[-1][0].append(token)
            self._left -= 1
            self.is_over = token in self._stop_ids or not self._left
            if self.is_over:
                break
        self._arrivals[-1] = time.perf_counter() - self._start

    def finish(self) -> TimedAnswer:
        """Return the answer, which ends now."""
        seconds = time.perf_counter() - self._start
        drafted = [(len(drafts), num_accepted(drafts, tokens)) for tokens, drafts in self._rounds if drafts is not None]
        return TimedAnswer(
            tokens=tuple(token for tokens, _ in self._rounds for token in tokens),
            seconds=seconds,
            first_token=self._arrivals[0] if self._arrivals else seconds,
            arrivals=tuple(self._arrivals),
            counts=tuple(len(tokens) for tokens, _ in self._rounds),
            drafted=sum(count for count, _ in drafted) if drafted else None,
            accepted=sum(count for _, count in drafted) if drafted else None,
            by_position=rates(positions(drafted)),
        )


def num_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of drafts and tokens."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count


def check_length(name: str, settings: PeerSettings, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise UserError unless the prompt and the answer fit the context that the peer was opened with."""
    if not prompt or len(prompt) + max_tokens > settings.max_context:
        given = f"{len(prompt)} tokens of prompt and {max_tokens} of answer"
        raise UserError(
            f"peer {name} was given {given}, it holds 1 of prompt at least and {settings.max_context} of both"
        )


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
    if importlib.util.find_spec(package) is None:
        raise UserError(f"peer {name} is not installed: run {command}")
