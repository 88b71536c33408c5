"""The choices of a request as the event loop sees them: what came and was not taken yet is one pending delta each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from outpace.api.llm import PreparedRequest
from outpace.core.stats import RoundStats, RunStats, merge_stats, summarize
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import History, Round, TokenSequence


@dataclass(frozen=True)
class Delta:
    """What was written since the last look. `sources`: who wrote each token, a drafter or the target."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[tuple[Round, RoundStats], ...] = ()  # where they are asked for

    @staticmethod
    def merged(parts: Sequence[Delta]) -> Delta:
        """Several in order as one."""
        return Delta(
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.tokens),
            tuple(source for part in parts for source in part.sources),
            tuple(record for part in parts for record in part.logprobs),
            tuple(one for part in parts for one in part.rounds),
        )


@dataclass(frozen=True)
class Ended:
    """How a choice ended: `reason` is the engine's, `stop` the stop string or token that ended the text. `speedup`:
    what all wrote lately over what plain decoding would have, 0 where it is not known."""

    reason: str
    stop: str | int | None
    error: Exception | None
    history: History
    tokens: int
    speedup: float = 0.0

    @cached_property
    def figures(self) -> RunStats:
        """What was drafted and accepted."""
        return summarize(self.history.steps)


def no_thoughts(tokens: Sequence[int]) -> int:
    """Tokens of the thought of an answer without one."""
    return 0


class Choice:
    """One answer that is computed. `indices`: under which numbers the client gets it, more than one where choices
    are alike."""

    def __init__(self, asked: PreparedRequest, indices: Sequence[int], stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids`: those that the client named, one of which it is told if that ends the text."""
        self.asked, self.indices, self.stop_ids = asked, tuple(indices), frozenset(stop_ids)
        self.run: TokenSequence | None = None  # set by the engine's thread
        self.ended: Ended | None = None
        self.written = 0  # tokens that were taken
        self._pending: list[Delta] = []

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun with it."""
        return self.run is not None and bool(self.run.history.began)

    @property
    def is_waiting(self) -> bool:
        """Whether it has no room in the engine yet."""
        return self.ended is None and not self.has_begun

    @property
    def tokens(self) -> Sequence[int]:
        """Those that were taken, all of them once it has ended."""
        count = self.ended.tokens if self.ended else self.written
        return self.run.tokens[:count] if self.run else ()

    def add(self, delta: Delta | None, ended: Ended | None) -> None:
        """Something came."""
        if delta is not None:
            self._pending.append(delta)
        self.ended = ended or self.ended

    def take(self) -> Delta | None:
        """All that came since the last time, as one delta."""
        if not self._pending:
            return None
        delta = Delta.merged(self._pending)
        self._pending.clear()
        self.written += len(delta.tokens)
        return delta


class Group:
    """The choices of one request. `key` is whose it is; `is_gone` once the client has left."""

    def __init__(
        self,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        key: str,
        thoughts: Callable[[Sequence[int]], int] = no_thoughts,
    ) -> None:
        """`thoughts` counts the tokens of an answer that belong to its thought."""
        self.choices, self.prompts, self.key, self._thoughts = tuple(choices), prompts, key, thoughts
        self.began = time.monotonic()
        self.is_gone = False
        self.failure: Exception | None = None  # that ends it from outside: a time limit, the server's end
        self._has_changed = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        return all(choice.ended is not None for choice in self.choices)

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has begun with none of its choices."""
        return all(choice.is_waiting for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun with one of its choices."""
        return any(choice.has_begun for choice in self.choices)

    @property
    def error(self) -> Exception | None:
        """What went wrong with it, or with one of its choices."""
        return self.failure or next((c.ended.error for c in self.choices if c.ended and c.ended.error), None)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def thought_tokens(self) -> int:
        """Of all answers that the client gets."""
        if self._thoughts is no_thoughts:
            return 0
        return sum(len(choice.indices) * self._thoughts(choice.tokens) for choice in self.choices)

    @property
    def figures(self) -> RunStats:
        """Of all choices that have ended."""
        return merge_stats([choice.ended.figures for choice in self.choices if choice.ended])

    def wake(self) -> None:
        """Whoever waits for the group looks again."""
        self._has_changed = True
        self._look()

    def _look(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, seconds: float) -> bool:
        """Waits until something changed, at most so long, or less. One waits at a time. A stream comes here once a
        round, so there is no task and no timer for each time: one timer runs on, until it is `let_go`."""
        if not self._has_changed:
            loop = asyncio.get_running_loop()
            if self._timer is None:
                self._timer = loop.call_later(seconds, self._tick)
            self._waiter = loop.create_future()
            await self._waiter
        came, self._has_changed = self._has_changed, False
        return came

    def _tick(self) -> None:
        self._timer = None
        self._look()

    def let_go(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, error: Exception) -> None:
        """Ends it from outside, once."""
        self.failure = self.failure or error
        self.wake()
