"""Our own methods, seen as any other engine is: one LLM a method over one loaded target and draft."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.contenders import GUESS, Contender
from outpace.bench.peer import Answered
from outpace.core.stats import Positions
from outpace.engine.sequence import History, TokenSequence
from outpace.models.base import chain

CHUNK = 256  # tokens that a pass reads where two tokens' scores are looked up


@dataclass(frozen=True)
class OwnAnswered(Answered):
    """With the counts behind `by_position`, what CARD's cache held, and where the time of the rounds after the first
    went. `relaxed`: tokens that the exact rule would have rejected, None where the rule is exact. `lengths`: how many
    of these rounds verified a branch of length 0, 1, ... `sources`: of each drafter its name, its tokens that were
    judged, and those that were written."""

    positions: Positions = ()
    hits: int = 0
    misses: int = 0
    relaxed: int | None = None
    lengths: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    sources: tuple[tuple[str, int, int], ...] = ()


class MethodRunner:
    """One of our methods. Keys and values are not reused between answers, so each reads its own prompt; a planner knows
    nothing of earlier runs, unless its options say so."""

    def __init__(self, contender: Contender, models: LLM, params: SamplingParams, most: int) -> None:
        """`models` has them loaded; `most` answers are written at once at most."""
        self.name, self.params, self.precision = contender.label, params, models.target.precision
        draft = None if contender.name == "autoregressive" else models.draft
        options: dict[str, Any] = {"batch": max(most, 1), "reuse": False, "profile": False, **contender.options}
        options.pop(GUESS, None)
        self.llm = LLM(models.target, draft, method=contender.name, **options)

    def close(self) -> None:
        """Ends the method's worker."""
        self.llm.close()

    def answer(self, prompt: Sequence[int], max_tokens: int, prediction: Sequence[int] = ()) -> OwnAnswered:
        """As `Peer.answer`; text is made too, as a user has it. `prediction`: what the caller expects to be written."""
        params = replace(self.params, max_tokens=max_tokens, prediction=tuple(prediction))
        called = time.perf_counter()
        arrivals: list[float] = []
        counts: list[int] = []
        with closing(self.llm.stream(list(prompt), params)) as stream:
            run: TokenSequence = self.llm.engine.waiting[-1]
            for _ in stream:  # a round's drafted tokens are one piece, its last token another
                now = time.perf_counter() - called
                fresh = run.history.steps[len(counts) :]  # several where plain rounds came in one
                before = arrivals[-1] if arrivals else now
                arrivals += [before + (now - before) * place / len(fresh) for place in range(1, len(fresh) + 1)]
                counts += [step.emitted for step in fresh]
            result = stream.finish()
        later = run.history.steps[1:]
        offered = [step.depth_offered for step in later]
        return OwnAnswered(
            tokens=result.tokens,
            seconds=time.perf_counter() - called,
            first_token=arrivals[0],
            arrivals=tuple(arrivals),
            counts=tuple(counts),
            drafted=result.figures.drafted,
            accepted=result.figures.accepted,
            by_position=result.figures.acceptance_by_position,
            hit_rate=result.figures.hit_rate,
            positions=result.figures.positions,
            hits=result.figures.hits,
            misses=result.figures.misses,
            relaxed=None if result.lossless else result.figures.relaxed,
            lengths=tuple(offered.count(length) for length in range(max(offered, default=-1) + 1)),
            draft_seconds=sum(step.draft_seconds for step in later),
            target_seconds=sum(step.target_seconds for step in later),
            sources=_sources(run.history),
        )

    def together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[tuple[int, ...]], float]:
        """All answers at once: their tokens, and the seconds from the call to the last one's end."""
        called = time.perf_counter()
        results = self.llm.generate([list(prompt) for prompt in prompts], replace(self.params, max_tokens=max_tokens))
        return [result.tokens for result in results], time.perf_counter() - called


def _sources(history: History) -> tuple[tuple[str, int, int], ...]:
    written = Counter(history.sources)
    return tuple((name, judged, written[name]) for name, judged in history.drafted.items())


def score_gap(model: Any, text: Sequence[int], tokens: tuple[int, int]) -> float:
    """How much higher than the second of two tokens the target scores the first after `text` (logits)."""
    session = model.open(len(text), CHUNK)
    keep: Sequence[int] = ()
    for start in range(0, len(text), CHUNK):
        part = text[start : start + CHUNK]
        last = [len(part) - 1] if start + CHUNK >= len(text) else []
        scores = model.score([chain(session, part, last, keep)])
        keep = range(len(part))
    first, second = (float(scores[-1, token]) for token in tokens)
    return first - second
