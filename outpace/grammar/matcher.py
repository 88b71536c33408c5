"""A compiled grammar as the constraint of one answer: cursors that move forward and back in the text."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from outpace.core.constraints import Constraint
from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer

MAX_DIGITS = 20  # in a row in a JSON number
_MAX_FORCED = 64  # most forced tokens per call
_MAX_CURSORS = 4  # most idle cursors per answer


class _Cursor:
    """A matcher and the text that it has consumed. `text` only grows, so it is not read again.

    The matcher itself never computes a mask: a copy does. llguidance 1.9 caches the last mask by the number of rows and
    the lexer's state, and `rollback` does not drop it. So a matcher that computed a mask, rolled back and reached
    another position with the same number would return the first mask. A model's output may have more rows than the
    vocabulary has tokens. Such an id would end a matcher with an error, so it is refused before.
    """

    def __init__(self, matcher: Any, start: int, num_tokens: int) -> None:
        self.matcher, self.start, self.num_tokens = matcher, start, num_tokens
        self.text: Sequence[int] | None = None
        self.tokens: list[int] = []  # of the answer, consumed so far

    def follow(self, text: Sequence[int]) -> None:
        """Move to the end of a text; raise UserError if the grammar refuses it."""
        same = len(self.tokens)
        if text is not self.text or len(text) < self.start + same:
            answer = list(text[self.start :])
            same = min(len(self.tokens), len(answer))
            if self.tokens[:same] != answer[:same]:
                same = next(place for place in range(same) if self.tokens[place] != answer[place])
            if same < len(self.tokens):
                self.matcher.rollback(len(self.tokens) - same)
                del self.tokens[same:]
            self.text = text
        fresh = list(text[self.start + same :])
        count = self.matcher.try_consume_tokens(fresh) if fresh else 0
        self.tokens += fresh[:count]
        self.check(self.matcher)
        if count < len(fresh):
            raise UserError(f"the grammar refuses token {fresh[count]}, number {len(self.tokens)} of the answer")

    def check(self, matcher: Any) -> None:
        """Raise UserError if the grammar exceeded its limits."""
        if matcher.is_error():
            words = " ".join(matcher.get_error().partition("<state>")[0].split())
            raise UserError(f"the grammar failed after {len(self.tokens)} tokens: {words[:200]}")

    def known(self, path: Sequence[int]) -> list[int]:
        """Return the drafted tokens before the first one that is not in the vocabulary."""
        return list(itertools.takewhile(lambda token: token < self.num_tokens, path))

    def beyond(self, path: Sequence[int]) -> Any:
        """Return a copy of the matcher after drafted tokens; None if they are refused."""
        if len(self.known(path)) < len(path):
            return None
        matcher = self.matcher.deep_copy()
        count = matcher.try_consume_tokens(list(path)) if path else 0
        self.check(matcher)
        return matcher if count == len(path) else None


class DigitLimit:
    """Ends JSON numbers after `MAX_DIGITS` digits in a row, which llguidance's grammars cannot.

    A model that may not write another property often repeats digits instead, up to its limit of tokens.
    """

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        """Take the bytes of all tokens, and the ids of special ones."""
        texts = {index: text for index, text in enumerate(tokens) if index not in special}
        more = [index for index, text in texts.items() if text[0] in b"0123456789.eE"]
        self._more = np.array(more, dtype=np.intp)  # they continue a number
        others = [index for index, text in texts.items() if text[0] not in b"0123456789.eE,]} \n\r\t"]
        self._others = np.array(others, dtype=np.intp)  # they cannot follow a digit of a number
        ends = {index: len(text) - len(text.rstrip(b"0123456789")) for index, text in texts.items()}
        self._ends = {index: (count, count == len(texts[index])) for index, count in ends.items() if count}

    def count(self, tokens: Iterable[int], before: int = 0) -> int:
        """Return the number of digits at the end of tokens that follow `before` digits."""
        for token in tokens:
            more, is_whole = self._ends.get(token, (0, False))
            before = before + more if is_whole else more
        return before

    def last(self, text: Sequence[int], start: int) -> int:
        """Return the number of digits at the end of a text, as far as they are after `start`."""
        place = len(text)
        while place > start and self._ends.get(text[place - 1], (0, False))[1]:
            place -= 1
        return self.count(text[max(place - 1, start) :])

    def limited(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask that ends a number; the same mask if it is not that of a number, or allows no end."""
        found = mask.copy()
        found[self._more] = False
        return mask if mask[self._others].any() or not found.any() else found


class _CachedResult(NamedTuple):
    """The cached result for the first `length` tokens of a text, and drafted tokens after them."""

    text: Sequence[int]
    length: int
    path: tuple[int, ...]
    found: int

    def holds(self, text: Sequence[int], path: tuple[int, ...]) -> bool:
        """Return whether this is the same question, even if drafted tokens have been written since."""
        more = len(text) - self.length
        return text is self.text and 0 <= more <= len(self.path) and (*text[self.length :], *path) == self.path


class GrammarConstraint(Constraint):
    """Restricts one request's answer, which begins after `start` tokens, to a grammar. Thread-safe.

    Each call borrows a cursor. Each token is checked when it is picked and when it is written, so the last results are
    cached.
    """

    def __init__(
        self,
        matcher: Any,
        start: int,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        num_tokens: int,
        digits: DigitLimit | None = None,
    ) -> None:
        """Take a matcher at the beginning of the grammar, which is copied, the tokens that end an answer, and the size
        of the vocabulary."""
        self._num_tokens = num_tokens
        self._first, self._start, self._tokenizer, self._ends = matcher, start, tokenizer, ends
        self._digits = digits
        self._idle: deque[_Cursor] = deque()
        self._allowed = self._over = _CachedResult((), -1, (), 0)  # the last results; these match no question
        self._other: int | None = None  # a token allowed earlier that is no end: it is tried first

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        known, path = self._allowed, tuple(path)
        if known.length == len(text) and known.holds(text, path):
            return known.found
        with self._cursor(text) as cursor:
            count: int = cursor.matcher.validate_tokens(cursor.known(path)) if path else 0
            if count and path[count - 1] in self._ends:  # nothing may follow a complete text, not even an end
                count -= self._is_complete(cursor.beyond(path[: count - 1]))
            if self._digits is not None:
                count = self._within_digits(cursor, text, path[:count], self._digits)
            self._allowed = _CachedResult(text, len(text), path, count)
            return count

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        with self._matcher_after(text, path) as matcher:
            if not matcher or self._is_complete(matcher):
                return None
            mask = unpacked(matcher.compute_bitmask())
            digits = self._digits
            if digits is None or digits.count(path, digits.last(text, self._start)) < MAX_DIGITS:
                return mask
            return digits.limited(mask)

    def _within_digits(self, cursor: _Cursor, text: Sequence[int], path: Sequence[int], digits: DigitLimit) -> int:
        """Return how many tokens of a path, all allowed by the grammar, the limit of digits allows."""
        count = digits.last(text, self._start)
        for place, token in enumerate(path):
            if (
                count >= MAX_DIGITS
                and not digits.limited(unpacked(cursor.beyond(path[:place]).compute_bitmask()))[token]
            ):
                return place
            count = digits.count([token], count)
        return len(path)

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        known, path = self._over, tuple(path)
        if known.holds(text, path):
            return bool(known.found)
        with self._matcher_after(text, path) as matcher:
            is_over = bool(matcher) and self._is_complete(matcher)
            self._over = _CachedResult(text, len(text), path, is_over)
            return is_over

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        with self._matcher_after(text, path) as matcher:
            if not matcher or self._is_complete(matcher):
                return []
            written = matcher.compute_ff_bytes().decode("utf-8", "ignore")
            tokens: list[int] = matcher.compute_ff_tokens()
            return self._whole(tokens, written)[:_MAX_FORCED]

    def _is_complete(self, matcher: Any) -> bool:
        """Return whether only an end may follow. llguidance reports that it stopped, but sometimes late."""
        if matcher.is_stopped() or not matcher.is_accepting():
            return bool(matcher.is_stopped())
        if self._other is not None and matcher.validate_tokens([self._other]):
            return False
        following = np.flatnonzero(unpacked(matcher.compute_bitmask()))[: len(self._ends) + 1].tolist()
        self._other = next((token for token in following if token not in self._ends), self._other)
        return self._ends.issuperset(following)

    def _whole(self, tokens: list[int], written: str) -> list[int]:
        """Return tokens for all forced text: llguidance omits the last ones, which later text may change."""
        known = self._tokenizer.decode(tokens, skip_special=False)
        rest = written[len(known) :]
        return [*tokens, *self._tokenizer.continuation(rest)] if rest and written.startswith(known) else tokens

    @contextmanager
    def _cursor(self, text: Sequence[int]) -> Iterator[_Cursor]:
        """Borrow a cursor at the end of a text. One that failed is not used again."""
        cursor = self._take_cursor(text)
        cursor.follow(text)
        yield cursor
        cursor.check(cursor.matcher)
        self._idle.append(cursor)

    @contextmanager
    def _matcher_after(self, text: Sequence[int], path: Sequence[int]) -> Iterator[Any]:
        """Yield a matcher after the text and the path; None if the path is refused."""
        with self._cursor(text) as cursor:
            matcher = cursor.beyond(path)
            yield matcher
            if matcher:
                cursor.check(matcher)

    def _take_cursor(self, text: Sequence[int]) -> _Cursor:
        """Return the idle cursor of this text, if any: the target and its drafter each grow their own list."""
        with suppress(IndexError):  # another thread may take the last cursor
            for _ in range(len(self._idle)):
                cursor = self._idle.popleft()
                if cursor.text is text:
                    return cursor
                self._idle.append(cursor)
            if len(self._idle) >= _MAX_CURSORS:
                return self._idle.popleft()
        return _Cursor(self._first.deep_copy(), self._start, self._num_tokens)


def unpacked(bits: bytes) -> np.ndarray:
    """Unpack a mask of one bit per token to bool [vocab, or slightly more]."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(bool)
