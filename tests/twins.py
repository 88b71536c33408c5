"""Slow twins, written for reading: adjustments, log-probabilities and stop strings token by token, in plain Python.

And the requests with text that are held against them: through the engine, with letters for the toy's tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from doubles import QuickToy, probabilities, within

from outpace.api.text import StopStrings, TextAssembler
from outpace.card.inline import InlineWorker
from outpace.card.thread import ThreadWorker
from outpace.core import registry
from outpace.core.constraints import TokenTexts
from outpace.core.noise import exponential, row_key, uniform
from outpace.core.stats import RoundStats
from outpace.core.types import Request
from outpace.engine.engine import Engine, EngineOptions

LETTERS = ("a", "b", "c", "d", "ab", "bc", "ca", "aa", " ", "abc", "e ", "é", "cab", "f", ".", "ba")
LETTER_BYTES = [letter.encode() for letter in LETTERS]
TEXTS = TokenTexts(LETTER_BYTES)
WIDE = EngineOptions(nodes=8, rows=1 << 12, chunk=6, batch=256)
Record = tuple[int, float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Wish:
    """A request, and where its text ends."""

    request: Request
    stops: tuple[str, ...] = ()
    include: bool = False

    @property
    def min_tokens(self) -> int:
        return self.request.adjustments.min_tokens if self.request.adjustments else 0


class Written(NamedTuple):
    """An answer: what was written, why it ended, and its log-probabilities."""

    tokens: list[int]
    text: str
    reason: str | None
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    steps: list[RoundStats]


class LetterStream:
    """A text stream whose tokens are letters."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in ids)

    def finish(self) -> str:
        return ""


def answer_all(
    wishes: Sequence[Wish],
    method: str = "autoregressive",
    drafter: Any = None,
    worker: str | None = None,
    *,
    target: QuickToy,
    engine: EngineOptions = WIDE,
    **options: Any,
) -> list[Written]:
    """All of them in one engine."""

    def run() -> list[Written]:
        beside = {"inline": InlineWorker, "thread": ThreadWorker}[worker](drafter).start() if worker else None
        decoder = registry.find("decoders", method)
        with Engine(target, None if beside else drafter, beside, engine) as parts:
            answers = [
                TextAssembler(
                    LetterStream(), StopStrings(wish.stops, wish.include), wish.request.stop_ids, wish.min_tokens
                )
                for wish in wishes
            ]
            runs = [
                parts.submit(wish.request, decoder, decoder.Options(**options), answer.watch)
                for wish, answer in zip(wishes, answers, strict=True)
            ]
            while any(run.finish_reason is None for run in runs):
                parts.step()
        written = []
        for run, answer in zip(runs, answers, strict=True):
            if run.error is not None:
                raise run.error
            answer.finish()
            text = "".join(piece.text for piece in answer.pieces)
            parts_of = (run.finish_reason, run.history.logprobs, run.history.prompt_logprobs, run.history.steps)
            written.append(Written(run.tokens, text, *parts_of))
        return written

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a drafter that failed and was given up proves nothing
        return within(120.0, run) if worker == "thread" else run()


def adjusted_slowly(
    logits: Sequence[float], request: Request, before: Sequence[int], texts: Sequence[bytes] = LETTER_BYTES
) -> list[float]:
    """One row's logits as the request adjusts them; `before` is the text before the token that it decides, `texts` what
    each token adds to it."""
    settings, row = request.adjustments, list(logits)
    answer = list(before[len(request.prompt) :])
    if settings is None:
        return row
    for token, bias in settings.logit_bias:
        if token < len(row):
            row[token] += bias
    for token in range(len(row)):
        if token in before:
            penalty = settings.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if token in answer:
            row[token] -= settings.presence_penalty + settings.frequency_penalty * answer.count(token)
        if token in request.stop_ids and len(answer) < settings.min_tokens:
            row[token] = -math.inf
        if settings.allowed is not None and token not in settings.allowed:
            row[token] = -math.inf
        if settings.banned and completes(settings.banned.strings, [texts[other] for other in answer], texts[token]):
            row[token] = -math.inf
    return row


def completes(strings: Sequence[str], before: Sequence[bytes], text: bytes) -> bool:
    """Whether the text ends one of the strings, somewhere in it."""
    old, new = b"".join(before), b"".join([*before, text])
    places = [place for string in strings for place in occurrences(new, string.encode())]
    return any(end > len(old) for end in places)


def occurrences(text: bytes, string: bytes) -> list[int]:
    """Where it ends."""
    return [place + len(string) for place in range(len(text)) if text.startswith(string, place)]


def log_softmax_slowly(row: Sequence[float]) -> list[float]:
    """log p, by sums of Python's own."""
    top = max(row)
    total = top + math.log(math.fsum(math.exp(value - top) for value in row))
    return [value - total for value in row]


def processed_slowly(
    logits: Sequence[float], request: Request, before: Sequence[int], texts: Sequence[bytes] = LETTER_BYTES
) -> list[float]:
    """p after adjustments, temperature and filters."""
    row = adjusted_slowly(logits, request, before, texts)
    return probabilities(torch.tensor(row, dtype=torch.float64), request.sampling)


def records_slowly(logits: Sequence[float], request: Request, before: Sequence[int]) -> list[float]:
    """The log-probabilities that the request's records take their numbers from."""
    assert request.logprobs is not None
    if not request.logprobs.processed:
        return log_softmax_slowly(logits)
    if request.sampling.is_greedy:
        return log_softmax_slowly(adjusted_slowly(logits, request, before))
    return [math.log(p) if p else -math.inf for p in processed_slowly(logits, request, before)]


def record_of(token: int, log_p: Sequence[float], top: int) -> Record:
    best = sorted(range(len(log_p)), key=lambda other: -log_p[other])[:top]
    return token, log_p[token], tuple((other, log_p[other]) for other in best if log_p[other] > -math.inf)


@lru_cache(1 << 14)
def _race(key: int, vocab: int) -> list[float]:
    """A row of exponential noise: the same one for each text that is written again with another option."""
    row: list[float] = exponential([key], vocab)[0].tolist()
    return row


def pick_slowly(logits: Sequence[float], request: Request, before: Sequence[int]) -> int:
    """The token that the request's rule writes after `before`."""
    name = type(request.rule).__name__
    if name == "Greedy":
        row = adjusted_slowly(logits, request, before)
        return row.index(max(row))
    p = processed_slowly(logits, request, before)
    if name == "Gumbel":
        race = _race(row_key(request.seed, request.choice, len(before)), len(p))
        return max(range(len(p)), key=lambda token: p[token] / race[token])
    u, below = uniform(request.seed, request.choice, len(before)), 0.0
    for token, chance in enumerate(p):
        below += chance
        if u < below:
            return token
    return max(token for token, chance in enumerate(p) if chance)


def cut_slowly(texts: Sequence[str], stops: Sequence[str], include: bool, least: int = 0) -> tuple[int, str, bool]:
    """How many of the tokens' texts come before the end, what is shown of them, whether a stop string ends them: one
    that is completed by a text after the first `least`."""
    for count in range(least + 1, len(texts) + 1):
        before, whole = "".join(texts[: count - 1]), "".join(texts[:count])
        ends = [(place, stop) for stop in stops for place in range(len(whole)) if whole.startswith(stop, place)]
        found = [(place, -len(stop)) for place, stop in ends if place + len(stop) > len(before)]
        if found:
            place, length = min(found)
            return count, whole[: place - length if include else place], True
    return len(texts), "".join(texts), False


def write_slowly(target: QuickToy, wish: Wish) -> Written:
    """The answer token by token, without engine, tree, batch or tensors of many rows."""
    request, text = wish.request, list(wish.request.prompt)
    start, texts, reason = len(text), [], "length"
    while len(text) - start < request.max_tokens:
        text.append(pick_slowly(target._row(text).tolist(), request, text))
        texts.append("" if text[-1] in request.stop_ids else LETTERS[text[-1]])
        if cut_slowly(texts, wish.stops, wish.include, wish.min_tokens)[2] or text[-1] in request.stop_ids:
            reason = "stop"
            break
    own, prompt = [], []
    if request.logprobs is not None:
        for place in range(start, len(text)):
            log_p = records_slowly(target._row(text[:place]).tolist(), request, text[:place])
            own.append(record_of(text[place], log_p, request.logprobs.top))
        for place in range(1, start if request.logprobs.prompt else 0):
            log_p = log_softmax_slowly(target._row(text[:place]).tolist())
            prompt.append(record_of(text[place], log_p, request.logprobs.top))
    return Written(
        text[start:], cut_slowly(texts, wish.stops, wish.include, wish.min_tokens)[1], reason, own, prompt, []
    )


def nearly(mine: Sequence[Any], others: Sequence[Any], within_: float) -> bool:
    """Whether two lists of records name the same tokens, with numbers that differ by rounding only."""
    if len(mine) != len(others):
        return False
    for (token, value, top), (other_token, other_value, other_top) in zip(mine, others, strict=True):
        if token != other_token or len(top) != len(other_top) or not close(value, other_value, within_):
            return False
        for (best, value_of), (other_best, value_of_other) in zip(top, other_top, strict=True):
            if not close(value_of, value_of_other, within_):
                return False
            if best != other_best and not any(close(value_of, v, within_) for t, v in other_top if t == best):
                return False
    return True


def close(one: float, other: float, within_: float) -> bool:
    return one == other or abs(one - other) <= within_
