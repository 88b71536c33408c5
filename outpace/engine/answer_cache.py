"""A cache of earlier texts: what followed a prompt there predicts its answer, and the drafter `prediction` copies it.

A prompt that an earlier text begins with is sent when a question is repeated, an answer regenerated, or a completion
continued. The target then writes the rest of that text again: always if greedy, with the same seed if sampled. This
holds only for rules whose text does not depend on drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from outpace.core.cache_salt import PerSalt
from outpace.core.types import Request

_TEXTS = 256  # for each reuse key
_TOKENS = 131_072  # in all texts of a reuse key together

Way = tuple[Any, ...]


class _CachedText(NamedTuple):
    """A text, four bytes for each token, and how its tokens were picked."""

    way: Way
    text: bytes


class AnswerCache:
    """The latest finished texts, separately for each reuse key, in bounded memory."""

    def __init__(self) -> None:
        self._kept: PerSalt[list[_CachedText]] = PerSalt(list)

    def find(self, request: Request) -> tuple[int, ...]:
        """Return what followed this prompt in the latest text that begins with it and was picked in the same way."""
        if not request.rule.traits.same_text:
            return ()
        prompt, way = _packed(request.prompt), _way(request)
        for kept in reversed(self._kept.of(request.cache_salt)):
            if len(kept.text) > len(prompt) and kept.way == way and kept.text.startswith(prompt):
                return tuple(array("i", kept.text[len(prompt) :]))
        return ()

    def store(self, request: Request, tokens: Sequence[int]) -> None:
        """Store a text, prompt and answer, in place of its prefixes; drop the oldest texts beyond the limits."""
        if not (request.rule.traits.same_text and len(request.prompt) < len(tokens) <= _TOKENS):
            return
        kept, new = self._kept.of(request.cache_salt), _CachedText(_way(request), _packed(tokens))
        kept[:] = [one for one in kept if one.way != new.way or not new.text.startswith(one.text)]
        kept.append(new)
        held = sum(len(one.text) for one in kept)
        while len(kept) > _TEXTS or held > _TOKENS * len(_packed([0])):
            held -= len(kept.pop(0).text)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _way(request: Request) -> Way:
    """Return how tokens are picked as far as it changes a text; if greedy, neither seed nor filters do."""
    noise = (request.sampling, request.seed, request.choice)
    return (type(request.rule), request.adjustments, *(() if request.sampling.is_greedy else noise))
