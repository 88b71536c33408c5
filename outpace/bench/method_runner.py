"""Runs one of outpace's own methods in the bench, through the interface of a peer, and measures its peak memory."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.contenders import GUESS, PLAIN, TEMPERATURE, Contender
from outpace.bench.peer import CallProcess, TimedAnswer
from outpace.core.arrays import torch
from outpace.engine.sequence import TokenSequence
from outpace.models.runtimes import Loaded


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
        emitted = Counter(history.sources)
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
            experts=figures.experts_per_pass,
            sources=tuple((name, verified, emitted[name]) for name, verified in history.drafted.items()),
        )

    def answer_batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[tuple[int, ...]], float]:
        """Answer all prompts concurrently; return their tokens and the seconds until the last answer ended."""
        called = time.perf_counter()
        results = self.llm.generate([list(prompt) for prompt in prompts], replace(self.params, max_tokens=max_tokens))
        return [result.tokens for result in results], time.perf_counter() - called


class PeakMemory(NamedTuple):
    """Peak bytes of a process with its workers, and on its GPU (None without one)."""

    host: int
    gpu: int | None


def peak_memory(models: LLM, contender: Contender, params: SamplingParams, prompt: Sequence[int]) -> PeakMemory:
    """Measure one method in a new process, whose errors are raised here; plain decoding loads the target alone."""
    drafts = () if contender.name == PLAIN or models.draft is None else (models.draft, *models.draft.others)
    again = [(draft.again, draft.model.vocab_size) for draft in drafts]
    with closing(CallProcess()) as process:
        return process.call(_measure, models.target.again, again, contender, params, list(prompt))


def _measure(
    load_target: Callable[[], Loaded],
    again: Sequence[tuple[Callable[[], Loaded], int]],
    contender: Contender,
    params: SamplingParams,
    prompt: Sequence[int],
) -> PeakMemory:
    target, drafts = load_target(), []
    for load, vocab_size in again:
        drafts.append(load())
        drafts[-1].model.vocab_size = vocab_size
    draft = replace(drafts[0], others=tuple(drafts[1:])) if drafts else None
    models: Any = SimpleNamespace(target=target, draft=draft)
    with closing(MethodRunner(contender, models, params, 1)) as runner:
        runner.answer(prompt, params.max_tokens)
        has_gpu = "torch" in sys.modules and torch.cuda.is_initialized()
        gpu = sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) if has_gpu else None
        return PeakMemory(sum(map(_peak, _processes(os.getpid()))), gpu)


def _processes(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text(encoding="ascii").split():
            yield from _processes(int(child))


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
