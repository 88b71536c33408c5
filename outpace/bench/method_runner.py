"""Runs one of outpace's own methods in the bench, through the interface of a peer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.contenders import GUESS, PLAIN, TEMPERATURE, Contender
from outpace.bench.peer import TimedAnswer
from outpace.engine.sequence import TokenSequence


class MethodRunner:
    """An LLM for one method over the shared models.

    The prefix cache and the saved profile are off by default, so that no answer depends on earlier ones.
    """

    def __init__(self, contender: Contender, models: LLM, params: SamplingParams, max_batch: int) -> None:
        """`models` holds the loaded target and draft; at most `max_batch` answers are written at once."""
        self.name, self.params, self.precision = contender.label, params, models.target.precision
        draft = None if contender.name == PLAIN else models.draft
        options: dict[str, Any] = {"batch": max(max_batch, 1), "reuse": False, "profile": False, **contender.options}
        for name in (GUESS, TEMPERATURE):
            options.pop(name, None)
        if contender.temperature is not None:
            self.params = replace(params, temperature=contender.temperature)
        self.llm = LLM(models.target, draft, method=contender.name, **options)

    def close(self) -> None:
        self.llm.close()

    def answer(self, prompt: Sequence[int], max_tokens: int, prediction: Sequence[int] = ()) -> TimedAnswer:
        """Answer like `Peer.answer`, text included; `prediction` is the answer that the caller expects."""
        params = replace(self.params, max_tokens=max_tokens, prediction=tuple(prediction))
        called = time.perf_counter()
        arrivals: list[float] = []
        counts: list[int] = []
        with closing(self.llm.stream(list(prompt), params)) as stream:
            run: TokenSequence = self.llm.engine.waiting[-1]
            for _ in stream:  # a round's drafted tokens are one piece, its last token another
                now = time.perf_counter() - called
                fresh = run.history.steps[len(counts) :]  # several where one step ran several plain rounds
                before = arrivals[-1] if arrivals else now
                arrivals += [before + (now - before) * place / len(fresh) for place in range(1, len(fresh) + 1)]
                counts += [step.emitted for step in fresh]
            result = stream.finish()
        figures, history = result.figures, run.history
        later, emitted = history.steps[1:], Counter(history.sources)
        lengths = Counter(step.depth_offered for step in later)
        return TimedAnswer(
            tokens=result.tokens,
            seconds=time.perf_counter() - called,
            first_token=arrivals[0],
            arrivals=tuple(arrivals),
            counts=tuple(counts),
            drafted=figures.drafted,
            accepted=figures.accepted,
            positions=figures.positions,
            hits=figures.hits,
            misses=figures.misses,
            relaxed=None if result.lossless else figures.relaxed,
            lengths=tuple(lengths[length] for length in range(max(lengths, default=-1) + 1)),
            draft_seconds=sum(step.draft_seconds for step in later),
            target_seconds=sum(step.target_seconds for step in later),
            sources=tuple((name, verified, emitted[name]) for name, verified in history.drafted.items()),
        )

    def answer_batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[tuple[int, ...]], float]:
        """Answer all prompts concurrently; return their tokens and the seconds until the last answer ended."""
        called = time.perf_counter()
        results = self.llm.generate([list(prompt) for prompt in prompts], replace(self.params, max_tokens=max_tokens))
        return [result.tokens for result in results], time.perf_counter() - called
