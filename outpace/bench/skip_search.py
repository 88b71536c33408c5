"""Searches the sublayers that a self-speculative draft skips, by local search over a calibration set.

Draft & Verify, arXiv:2309.08168, section 3: one switch for each attention and MLP sublayer between the first layer and
the last; the objective is the speed. The target answers the calibration prompts once. For each set of skipped sublayers
the draft is replayed over the answers, and its rounds are priced with passes timed beforehand, so that a trial takes a
few forwards and no timing of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from outpace.api.llm import LLM
from outpace.bench.tune import texts_of
from outpace.core.errors import UserError
from outpace.core.options import CheckedOptions, whole
from outpace.core.theory import count_rounds
from outpace.core.types import Request
from outpace.drafters.layer_skip import (
    Sublayers,
    SublayerSearch,
    check_target,
    find_agreements,
    searchable_layers,
)
from outpace.models.base import Model, chain
from outpace.models.load import Loaded, Progress
from outpace.rules.greedy import Greedy

WINDOW = 50  # answer tokens that a draft predicts in one forward
MAX_DRAFT_LENGTH = 8
PROMPT_TOKENS = 256  # last tokens of each calibration prompt that are used
PASSES = 9  # timed passes of each kind


@dataclass(frozen=True)
class SearchOptions(CheckedOptions):
    """The first `prompts` texts are answered with `max_tokens` each; `trials` sets are tried."""

    prompts: int = whole(8, 1)
    max_tokens: int = whole(96, 8)
    trials: int = whole(200, 1)


class SublayerTimes(NamedTuple):
    """Seconds of a target pass by rows, and the seconds that skipping one sublayer saves in a pass of one row."""

    rows: Sequence[float]  # for 1, 2, ... MAX_DRAFT_LENGTH + 1 rows
    attention: float
    mlp: float

    def draft(self, sublayers: Sublayers) -> float:
        saved = self.attention * len(sublayers.attention) + self.mlp * len(sublayers.mlp)
        return max(self.rows[0] - saved, 1e-9)


class SearchResult(NamedTuple):
    """The best set, its predicted speedup with drafts of `draft_length`, and the share of tokens it predicts."""

    sublayers: Sublayers
    speed: float
    draft_length: int
    agreement: float
    trials: int
    tokens: int
    times: SublayerTimes


class _Answer(NamedTuple):
    """A prompt with the target's answer, and a session with the KV cache of both."""

    session: Any
    request: Request
    text: list[int]


def calibration_texts(corpus: Sequence[Path]) -> list[str]:
    """Read the texts of a corpus; UserError without any."""
    if not corpus:
        raise UserError("the search for sublayers needs calibration texts, name one with --corpus")
    return texts_of(corpus)


def find_sublayers(target: Loaded, texts: Sequence[str], options: SearchOptions, progress: Progress) -> SearchResult:
    """Find the set with the highest predicted speedup on the calibration texts.

    UserError for a target whose sublayers cannot be skipped.
    """
    model: Model = target.model
    check_target(model)
    layers = searchable_layers(model.num_layers)
    prompts = [target.tokenizer.encode_prompt(text)[-PROMPT_TOKENS:] for text in texts[: options.prompts]]
    answers = _answers(target, prompts, options, progress)
    times = _time_sublayers(model, answers[0].session)

    @cache
    def evaluate(sublayers: Sublayers) -> tuple[float, int, float]:
        if not sublayers.size:
            return 0.0, 1, 1.0
        less = model.skip_sublayers(*sublayers)
        runs = [_agreed(less, answer) for answer in answers]
        return *predict_speedup(runs, sublayers, times), sum(map(sum, runs)) / sum(map(len, runs))

    others = _starts(layers, lambda sublayers: evaluate(sublayers)[0])
    search = SublayerSearch(Sublayers(), model.num_layers, options.trials, others=others)
    while not search.is_over:
        sublayers = search.propose()
        search.learn(sublayers, evaluate(sublayers)[0])
        progress("trials", search.count / options.trials)
    tokens = sum(len(answer.text) - len(answer.request.prompt) for answer in answers)
    return SearchResult(search.best, *evaluate(search.best), search.count, tokens, times)


def _starts(layers: Sequence[int], speed: Callable[[Sublayers], float]) -> Iterator[Sublayers]:
    """Yield each single sublayer, then the best two of them, the best three, ..."""
    singles = [Sublayers(**{kind: (layer,)}) for kind in Sublayers._fields for layer in layers]
    yield from singles
    joined = Sublayers()
    for one in sorted(singles, key=speed, reverse=True):
        joined = Sublayers(*(tuple(sorted(old + new)) for old, new in zip(joined, one, strict=True)))
        if joined.size > 1:
            yield joined


def predict_speedup(runs: Sequence[Sequence[bool]], sublayers: Sublayers, times: SublayerTimes) -> tuple[float, int]:
    """Return the speedup over plain decoding with the best draft length, and that length.

    `runs` says for each answer's tokens whether the draft predicted them.
    """
    tokens, best = sum(map(len, runs)), (0.0, 1)
    for length in range(1, MAX_DRAFT_LENGTH + 1):
        rounds = sum(count_rounds([run[place : place + length] for place in range(len(run))]) for run in runs)
        seconds = rounds * (times.rows[length] + length * times.draft(sublayers))
        best = max(best, (tokens * times.rows[0] / seconds, length))
    return best


def _answers(
    target: Loaded, prompts: Sequence[Sequence[int]], options: SearchOptions, progress: Progress
) -> list[_Answer]:
    """Return the target's greedy answers with their KV caches."""
    rule, found = Greedy(), []
    with closing(LLM(target, method="autoregressive", profile=False)) as llm:
        for place, prompt in enumerate(prompts):
            result = llm.generate([list(prompt)], max_tokens=options.max_tokens)[0]
            text = [*prompt, *result.tokens]
            if len(result.tokens) > 1:
                session = target.model.open(len(text), WINDOW)
                target.model.score_sparse([chain(session, text[:-1])])
                session.keep(range(len(text) - 1))
                found.append(_Answer(session, Request(tuple(prompt), rule), text))
            progress("answers", (place + 1) / len(prompts))
    if not found:
        raise UserError("the target answers none of the calibration texts with two tokens or more: give others")
    return found


def _agreed(model: Model, answer: _Answer) -> list[bool]:
    """Return whether the draft predicts each of the answer's tokens but the first, with one forward per window."""
    session, request, text = answer
    first, found = len(request.prompt) + 1, list[bool]()
    for start in range(first, len(text), WINDOW):
        end = min(start + WINDOW, len(text))
        found += find_agreements(model, session, request, text[:end], end - start)
    return found


def _time_sublayers(model: Model, session: Any) -> SublayerTimes:
    """Return the median times of passes after an answer's text; the kinds of passes alternate."""
    layers = searchable_layers(model.num_layers)
    kinds = [(model, rows) for rows in range(1, MAX_DRAFT_LENGTH + 2)]
    kinds += [(model.skip_sublayers(layers, ()), 1), (model.skip_sublayers((), layers), 1)]
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(PASSES):
        for (one, rows), taken in zip(kinds, seconds, strict=True):
            began = time.perf_counter()
            one.score_sparse([chain(session, [0] * rows, range(rows))])
            taken.append(time.perf_counter() - began)
            session.keep(())
    *by_rows, attention, mlp = (median(taken) for taken in seconds)
    saved = ((by_rows[0] - less) / len(layers) for less in (attention, mlp))
    return SublayerTimes(by_rows, *(max(one, 0.0) for one in saved))
