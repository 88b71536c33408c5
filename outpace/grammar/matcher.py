"""A compiled grammar as the constraint of one answer: walkers that stand in the text and step forward and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from outpace.core.constraints import Constraint
from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer

_AHEAD = 64  # forced tokens that are told at most
_WALKERS = 4  # of one answer that are kept


class _Walker:
    """One matcher, and the text behind which it stands. `text` only ever grows, so what was read of it stays read.

    The matcher itself is never asked what it allows: it is copied, and the copy is asked. llguidance 1.9 keeps the last
    mask and finds it again by the number of rows and the lexer's state. `rollback` does not drop it, so a matcher that
    was asked, rolled back and led to another place of the same number answers with the mask of the first place."""

    def __init__(self, matcher: Any, start: int) -> None:
        self.matcher, self.start = matcher, start
        self.text: Sequence[int] | None = None
        self.tokens: list[int] = []  # of the answer, that were read

    def follow(self, text: Sequence[int]) -> None:
        """Goes to the end of a text; UserError where the grammar refuses it."""
        same = len(self.tokens)
        if text is not self.text or len(text) < self.start + same:
            same = _common(self.tokens, list(text[self.start :]))
            self._back(len(self.tokens) - same)
            del self.tokens[same:]
            self.text = text
        fresh = list(text[self.start + same :])
        count = self.matcher.try_consume_tokens(fresh) if fresh else 0
        self.tokens += fresh[:count]
        self.check(self.matcher)
        if count < len(fresh):
            raise UserError(f"the grammar refuses token {fresh[count]}, number {len(self.tokens)} of the answer")

    def check(self, matcher: Any) -> None:
        """UserError where the grammar became too much for its limits."""
        if matcher.is_error():
            words = " ".join(matcher.get_error().partition("<state>")[0].split())
            raise UserError(f"the grammar failed after {len(self.tokens)} tokens: {words[:200]}")

    def beyond(self, path: Sequence[int]) -> Any:
        """A copy of the matcher that stands behind drafted tokens; None where they are refused."""
        matcher = self.matcher.deep_copy()
        count = matcher.try_consume_tokens(list(path)) if path else 0
        self.check(matcher)
        return matcher if count == len(path) else None

    def _back(self, count: int) -> None:
        if count:
            self.matcher.rollback(count)


class _Answer(NamedTuple):
    """Of a question about a text, `length` tokens of which stood when it was asked, and drafted tokens behind it."""

    text: Sequence[int]
    length: int
    path: tuple[int, ...]
    found: int

    def holds(self, text: Sequence[int], path: tuple[int, ...]) -> bool:
        """Whether this is the same question, be it that what was drafted is written by now."""
        more = len(text) - self.length
        return text is self.text and 0 <= more <= len(self.path) and (*text[self.length :], *path) == self.path


class GrammarConstraint(Constraint):
    """What a grammar allows of one request's answer, which begins behind `start` tokens. Several threads may ask: each
    takes a walker for the time of its question.

    Each token is asked about when it is picked and when it is written: the last answers are kept."""

    def __init__(self, matcher: Any, start: int, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """`matcher` stands at the grammar's beginning and is copied; `ends` are the tokens that end an answer."""
        self._first, self._start, self._tokenizer, self._ends = matcher, start, tokenizer, ends
        self._idle: deque[_Walker] = deque()
        self._allowed = self._over = _Answer((), -1, (), 0)  # the last answers; none holds for any question yet
        self._other: int | None = None  # a token that was allowed somewhere and is no end: asked for before all others

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        known, path = self._allowed, tuple(path)
        if known.length == len(text) and known.holds(text, path):
            return known.found
        with self._walker(text) as walker:
            count: int = walker.matcher.validate_tokens(list(path)) if path else 0
            if count and path[count - 1] in self._ends:  # nothing may follow a complete text, not even its end
                count -= self._is_complete(walker.beyond(path[: count - 1]))
            self._allowed = _Answer(text, len(text), path, count)
            return count

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        with self._asked(text, path) as matcher:
            return unpacked(matcher.compute_bitmask()) if matcher and not self._is_complete(matcher) else None

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        known, path = self._over, tuple(path)
        if known.holds(text, path):
            return bool(known.found)
        with self._asked(text, path) as matcher:
            is_over = bool(matcher) and self._is_complete(matcher)
            self._over = _Answer(text, len(text), path, is_over)
            return is_over

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        with self._asked(text, path) as matcher:
            if not matcher or self._is_complete(matcher):
                return []
            written = matcher.compute_ff_bytes().decode("utf-8", "ignore")
            tokens: list[int] = matcher.compute_ff_tokens()
            return self._whole(tokens, written)[:_AHEAD]

    def _is_complete(self, matcher: Any) -> bool:
        """Whether nothing but an end may follow. llguidance says that it stopped, but sometimes only later."""
        if matcher.is_stopped() or not matcher.is_accepting():
            return bool(matcher.is_stopped())
        if self._other is not None and matcher.validate_tokens([self._other]):
            return False
        following = np.flatnonzero(unpacked(matcher.compute_bitmask()))[: len(self._ends) + 1].tolist()
        self._other = next((token for token in following if token not in self._ends), self._other)
        return self._ends.issuperset(following)

    def _whole(self, tokens: list[int], written: str) -> list[int]:
        """The tokens of all forced text: llguidance leaves out the last ones, which what follows may change."""
        known = self._tokenizer.decode(tokens, skip_special=False)
        rest = written[len(known) :]
        return [*tokens, *self._tokenizer.continuation(rest)] if rest and written.startswith(known) else tokens

    @contextmanager
    def _walker(self, text: Sequence[int]) -> Iterator[_Walker]:
        """A walker at the end of a text. One that failed is not used again."""
        walker = self._taken(text)
        walker.follow(text)
        yield walker
        walker.check(walker.matcher)
        self._idle.append(walker)

    @contextmanager
    def _asked(self, text: Sequence[int], path: Sequence[int]) -> Iterator[Any]:
        """A matcher behind the text and the path, for one question; None where the path is refused."""
        with self._walker(text) as walker:
            matcher = walker.beyond(path)
            yield matcher
            if matcher:
                walker.check(matcher)

    def _taken(self, text: Sequence[int]) -> _Walker:
        """The walker that knows this text, if it is idle: the target and its drafter each grow a list of their own."""
        with suppress(IndexError):  # another thread may take the last one
            for _ in range(len(self._idle)):
                walker = self._idle.popleft()
                if walker.text is text:
                    return walker
                self._idle.append(walker)
            if len(self._idle) >= _WALKERS:
                return self._idle.popleft()
        return _Walker(self._first.deep_copy(), self._start)


def _common(one: list[int], other: list[int]) -> int:
    """With how many equal tokens both begin."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(place for place in range(count) if one[place] != other[place])


def unpacked(bits: bytes) -> np.ndarray:
    """A mask of one bit a token as bool [vocab, or a little more]."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(bool)
