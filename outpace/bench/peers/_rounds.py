"""What arrived when: the rounds of an answer as another engine gave them, and what they amount to."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import NamedTuple

from outpace.bench.peer import Answered, PeerSettings
from outpace.core.errors import UserError
from outpace.core.stats import positions, rates


class Round(NamedTuple):
    """Tokens that arrived at once, `when` seconds after the call. `drafted` None: the engine drafts nothing."""

    when: float
    tokens: tuple[int, ...]
    drafted: int | None = None
    accepted: int = 0


class Rounds:
    """An answer that grows; it ends with a stop token, which counts, or with `max_tokens`. The clock runs from here."""

    def __init__(self, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._stop_ids, self._left = stop_ids, max_tokens
        self._rounds: list[Round] = []
        self._start = time.perf_counter()
        self.begin()
        self.is_over = False

    def begin(self, drafts: Sequence[int] | None = None) -> None:
        """A new round, in which these drafts are verified; None: the engine drafts nothing."""
        self._drafts, self._tokens = drafts, list[int]()

    def write(self, *tokens: int) -> None:
        """The round's next tokens arrived. What comes after the end of the answer is left out."""
        if not tokens or self.is_over:
            return
        if self._tokens:
            self._rounds.pop()
        for token in tokens:
            self._tokens.append(token)
            self._left -= 1
            self.is_over = token in self._stop_ids or not self._left
            if self.is_over:
                break
        drafted = None if self._drafts is None else len(self._drafts)
        accepted = num_alike(self._drafts or (), self._tokens)
        self._rounds.append(Round(time.perf_counter() - self._start, tuple(self._tokens), drafted, accepted))

    def answered(self) -> Answered:
        """The answer, which ends now."""
        return fold(self._rounds, time.perf_counter() - self._start)


def fold(rounds: Sequence[Round], seconds: float) -> Answered:
    """An answer from its rounds; it took so many seconds."""
    drafted = [(one.drafted, one.accepted) for one in rounds if one.drafted is not None]
    return Answered(
        tokens=tuple(token for one in rounds for token in one.tokens),
        seconds=seconds,
        first_token=rounds[0].when if rounds else seconds,
        arrivals=tuple(one.when for one in rounds),
        counts=tuple(len(one.tokens) for one in rounds),
        drafted=sum(count for count, _ in drafted) if drafted else None,
        accepted=sum(count for _, count in drafted) if drafted else None,
        by_position=rates(positions(drafted)),
    )


def num_alike(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """With how many of the drafts the tokens begin."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count


def check_room(name: str, settings: PeerSettings, prompt: Sequence[int], max_tokens: int) -> None:
    """UserError unless the prompt and the answer fit what the peer was opened for."""
    needed = len(prompt) + max_tokens
    if not prompt or needed > settings.max_context:
        said = f"{len(prompt)} tokens of prompt and {max_tokens} of answer"
        raise UserError(
            f"peer {name} was given {said}, it holds 1 of prompt at least and {settings.max_context} of both"
        )


def check_draft(name: str, settings: PeerSettings) -> str:
    """The draft that the user named; UserError without one, or for one that only outpace can make."""
    draft = settings.draft
    if draft is None:
        raise UserError(f"peer {name} needs a draft, name one with --draft")
    if str(draft).startswith("layers:") or str(draft) == "auto":
        raise UserError(f"peer {name} cannot make the draft {draft}, name a folder, a .gguf file or a hub id")
    return str(draft)


def need(name: str, package: str, command: str) -> None:
    """UserError unless `package` can be imported: says what installs it."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"peer {name} is not installed: run {command}")
