"""The choices of a request as the event loop sees them. Output that no response has read yet is one pending delta."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from outpace.api.llm import PreparedRequest
from outpace.core.stats import RoundStats, RunStats, merge_stats, summarize
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import History, RoundRecord, TokenSequence


class ChoiceDelta(NamedTuple):
    """Output since the last read. `sources` names the drafter of each token, or the target."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[tuple[RoundRecord, RoundStats], ...] = ()  # if the request wants them


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended.

    `reason` is the engine's finish reason, `stop` the stop string or stop token that ended the text, `tokens` the
    length. `speedup` compares all recent output with plain decoding; 0 if unknown.
    """

    reason: str
    stop: str | int | None
    error: Exception | None
    history: History
    tokens: int
    speedup: float = 0.0

    @cached_property
    def figures(self) -> RunStats:
        return summarize(self.history.steps)


class Choice:
    """One computed answer. `indices` are its indices in the response: several if equal choices are computed once."""

    def __init__(self, prepared: PreparedRequest, indices: Sequence[int], stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids` are the client's own stop tokens: the response reports the one that ended the text."""
        self.prepared, self.indices, self.stop_ids = prepared, tuple(indices), frozenset(stop_ids)
        self.group: ChoiceGroup | None = None
        self.run: TokenSequence | None = None  # set by the engine's thread, as the next two
        self.num_sent = 0  # tokens that the thread has delivered
        self.is_start_sent = False
        self.ended: ChoiceEnd | None = None
        self.num_read = 0  # tokens that `take` returned
        self._pending: list[ChoiceDelta] = []

    @property
    def has_begun(self) -> bool:
        return self.run is not None and bool(self.run.history.began)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a slot in the engine."""
        return self.ended is None and not self.has_begun

    @property
    def num_tokens(self) -> int:
        """Tokens that were read; all of them once it has ended."""
        return self.ended.tokens if self.ended else self.num_read

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that `num_tokens` counts."""
        return self.run.tokens[: self.num_tokens] if self.run else ()

    def add(self, delta: ChoiceDelta | None, ended: ChoiceEnd | None) -> None:
        if delta is not None:
            self._pending.append(delta)
        self.ended = ended or self.ended

    def take(self) -> ChoiceDelta | None:
        """Return all output since the last call as one delta."""
        if not self._pending:
            return None
        texts, *columns = zip(*self._pending, strict=True)
        delta = ChoiceDelta("".join(texts), *(tuple(chain.from_iterable(column)) for column in columns))
        self._pending.clear()
        self.num_read += len(delta.tokens)
        return delta


class ChoiceGroup:
    """The choices of one request. `key` identifies its API key; `is_gone` is set when the client disconnects."""

    def __init__(
        self,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        key: str,
        count_thoughts: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        """`count_thoughts` counts the reasoning tokens of an answer, if the model reasons."""
        self.choices, self.prompts, self.key, self._count_thoughts = tuple(choices), prompts, key, count_thoughts
        self.is_gone = False
        self.failure: Exception | None = None  # from outside the engine: a timeout, a shutdown
        self.deadlines: tuple[asyncio.TimerHandle, ...] = ()
        for choice in choices:
            choice.group = self
        self._has_changed = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        return all(choice.ended is not None for choice in self.choices)

    @property
    def is_waiting(self) -> bool:
        """Whether all of its choices wait for a slot."""
        return all(choice.is_waiting for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        return any(choice.has_begun for choice in self.choices)

    @property
    def error(self) -> Exception | None:
        """The first error of the request or of one of its choices."""
        return self.failure or next((c.ended.error for c in self.choices if c.ended and c.ended.error), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def thought_tokens(self) -> int:
        """Reasoning tokens of all choices in the response."""
        count = self._count_thoughts
        return sum(len(choice.indices) * count(choice.tokens) for choice in self.choices) if count else 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that the prefix cache gave to every choice."""
        least: dict[tuple[int, ...], int] = {}
        for choice in self.choices:
            if choice.run is not None:
                prompt = choice.prepared.request.prompt
                least[prompt] = min(least.get(prompt, len(prompt)), choice.run.history.reused)
        return sum(least.values())

    @property
    def figures(self) -> RunStats:
        return merge_stats([choice.ended.figures for choice in self.choices if choice.ended])

    def wake(self) -> None:
        self._has_changed = True
        self._finish_wait()

    async def wait(self, seconds: float) -> bool:
        """Wait until `wake`, at most that many seconds; return whether something changed.

        Only one task may wait at a time. A stream waits once a round, so one timer runs on from call to call, until
        `cancel_timer`, instead of a new one for each: a wait may therefore end early.
        """
        if not self._has_changed:
            loop = asyncio.get_running_loop()
            if self._timer is None:
                self._timer = loop.call_later(seconds, self._on_timer)
            self._waiter = loop.create_future()
            await self._waiter
        changed, self._has_changed = self._has_changed, False
        return changed

    def _on_timer(self) -> None:
        self._timer = None
        self._finish_wait()

    def _finish_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it has failed already."""
        self.failure = self.failure or error
        self.wake()
