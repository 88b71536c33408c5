"""What followed a prompt in an earlier text: a guess of its answer, which the drafter `prediction` copies.

Whoever asks again, regenerates an answer, or types on what was completed for him sends a prompt that an earlier text
begins with, and the target writes the rest of that text again: greedily always, sampled with the same seed. So it is of
rules alone whose text no draft changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from outpace.core.cache_salt import PerSalt
from outpace.core.types import Request

_TEXTS = 256  # of each reuse key
_TOKENS = 131_072  # in all of them together

Way = tuple[Any, ...]


class _Kept(NamedTuple):
    """A text, four bytes a token, and how its tokens were picked."""

    way: Way
    text: bytes


class AnswerCache:
    """The texts that ended last, apart for each reuse key, in bounded memory."""

    def __init__(self) -> None:
        self._kept: PerSalt[list[_Kept]] = PerSalt(list)

    def find(self, request: Request) -> tuple[int, ...]:
        """What stood behind this prompt in the latest text that begins with it and was picked in the same way."""
        if not request.rule.traits.same_text:
            return ()
        prompt, way = _packed(request.prompt), _way(request)
        for kept in reversed(self._kept.of(request.cache_salt)):
            if len(kept.text) > len(prompt) and kept.way == way and kept.text.startswith(prompt):
                return tuple(array("i", kept.text[len(prompt) :]))
        return ()

    def keep(self, request: Request, tokens: Sequence[int]) -> None:
        """Remembers a text, prompt and answer, in place of those that it begins with; the oldest go where there are too
        many."""
        if not (request.rule.traits.same_text and len(request.prompt) < len(tokens) <= _TOKENS):
            return
        kept, new = self._kept.of(request.cache_salt), _Kept(_way(request), _packed(tokens))
        kept[:] = [one for one in kept if one.way != new.way or not new.text.startswith(one.text)]
        kept.append(new)
        held = sum(len(one.text) for one in kept)
        while len(kept) > _TEXTS or held > _TOKENS * len(_packed([0])):
            held -= len(kept.pop(0).text)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _way(request: Request) -> Way:
    """How tokens are picked, as far as it changes a text: greedily neither seed nor filters do."""
    noise = (request.sampling, request.seed, request.choice)
    return (type(request.rule), request.adjustments, *(() if request.sampling.is_greedy else noise))
