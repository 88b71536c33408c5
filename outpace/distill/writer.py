"""Writes the target's answers by plain decoding, many at once, with their most likely tokens and its hidden states.

It uses the engine, or on a GPU a captured loop that returns to the host every 16 steps and keeps no hidden states. An
answer depends on its job alone, not on the other answers in the batch or on the order of the jobs. On a GPU, half
precisions round differently by batch size, so an answer with a near tie between two tokens may differ between batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from outpace.core import registry
from outpace.core.drafting import Needs
from outpace.core.machine import free_bytes
from outpace.core.options import CheckedOptions, whole
from outpace.core.sampling import Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import (
    Capabilities,
    Drafter,
    DraftSource,
    DraftState,
    LogprobsOptions,
    Observation,
    Request,
)
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.cuda.writing_loop import WritingLoop
from outpace.models.llama.native.runtime import host_floats
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

_SEEDS = 2**63
_GREEDY, _GUMBEL = Greedy(), Gumbel()  # one of each, so that all answers share batches
STEPS = 16  # of the captured loop, after which finished answers are replaced by new ones
MEMORY = 0.6  # share of a GPU's free memory that the loop may use
_TEMPORARIES = 12  # numbers of 4 bytes that a step needs for each row and token of the vocabulary
LEVELS = 127  # of int8, on each side of zero
TAPS, SCALES = "taps", "tap_scales"  # tensors of a shard


def tap_list(layers: Sequence[int]) -> str:
    """Return layers as in `--taps`."""
    return ",".join(map(str, layers))


class Taps(NamedTuple):
    """Hidden states, whose values are `levels` times `scales`."""

    levels: np.ndarray  # int8 [tokens, layers, width]
    scales: np.ndarray  # float32 [tokens, layers]

    @classmethod
    def quantise(cls, hidden: np.ndarray) -> Taps:
        """Round float32 [layers, tokens, width] to int8; the largest magnitude of each row becomes LEVELS."""
        rows = hidden.swapaxes(0, 1)
        scales = np.abs(rows).max(-1) / np.float32(LEVELS)
        return cls(np.rint(rows / np.maximum(scales, np.float32(1e-30))[..., None]).astype(np.int8), scales)

    def floats(self) -> np.ndarray:
        """Return float32 [tokens, layers * width]."""
        return (self.levels * self.scales[..., None]).reshape(len(self.levels), -1)


class TapRecorder(Drafter):
    """Drafts nothing, and records the target's hidden states after the numbers of layers in `layers`."""

    capabilities = Capabilities((DraftSource("taps"),))

    def __init__(self, layers: tuple[int, ...], target: Any) -> None:
        self.capabilities = replace(self.capabilities, needs=Needs(layers=layers, prompt=True))
        self._parts: dict[int, list[Taps]] = {}  # by the id of the request; the first part is empty
        shape = (0, len(layers), target.config.hidden_size)
        self._empty = Taps(np.zeros(shape, np.int8), np.zeros(shape[:2], np.float32))

    def open(self, request: Request) -> DraftState:
        self._parts[id(request)] = [self._empty]
        return DraftState(request)

    def take(self, request: Request, tokens: int) -> Taps:
        """Return what was recorded of a finished request, whose text has this many tokens, and forget it. The hidden
        states of its last tokens are zero, as the target has not read them."""
        parts = zip(*self._parts.pop(id(request)), strict=True)
        levels, scales = (np.concatenate(arrays) for arrays in parts)
        missing = tokens - len(levels)
        return Taps(np.pad(levels, ((0, missing), (0, 0), (0, 0))), np.pad(scales, ((0, missing), (0, 0))))

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """Add no nodes."""

    def observe(self, state: DraftState, seen: Observation) -> None:
        super().observe(state, seen)
        if seen.seen is not None and seen.seen.hidden is not None:
            self._parts[id(state.request)].append(Taps.quantise(host_floats(seen.seen.hidden)))


@dataclass(frozen=True)
class AnswerJob:
    """An answer to write. `number` seeds its noise and identifies it in the shards."""

    number: int
    prompt: tuple[int, ...]
    temperature: float
    held_out: bool = False


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer of the target, and the k most likely tokens at each position at temperature 1, in descending order."""

    job: AnswerJob
    tokens: np.ndarray  # int32 [tokens], the stop token included
    top_ids: np.ndarray  # int32 [tokens, k]
    top_log_p: np.ndarray  # float16 [tokens, k]
    taps: Taps | None = None  # of prompt and answer


@dataclass(frozen=True)
class WriterOptions(CheckedOptions):
    """`rows` answers are written concurrently with at most `max_tokens`; `top` tokens are stored at each position, and
    the hidden states after the layers `taps`."""

    rows: int = whole(128, 1, 4096)
    max_tokens: int = whole(256, 1)
    top: int = whole(16, 1, 1024)
    seed: int = whole(0, 0, _SEEDS - 1)
    taps: tuple[int, ...] = ()


def write_answers(
    model: Model, stop_ids: frozenset[int], options: WriterOptions, max_prompt: int, jobs: Iterator[AnswerJob]
) -> Iterator[WrittenAnswer]:
    """Yield an answer per job, in the order in which they finish; prompts have at most `max_prompt` tokens."""
    if options.taps or not isinstance(model, GraphLlama) or model.exact or model.captures.is_eager:
        return engine_answers(model, stop_ids, options, jobs)
    row_bytes = (max_prompt + options.max_tokens) * model.token_bytes + 4 * _TEMPORARIES * model.vocab_size
    rows = max(1, min(options.rows, int(MEMORY * free_bytes(model.device) / row_bytes)))
    loop = WritingLoop(model, rows, max_prompt + options.max_tokens, options.top)
    return loop_answers(loop, stop_ids, options, jobs)


def loop_answers(
    loop: WritingLoop, stop_ids: frozenset[int], options: WriterOptions, jobs: Iterator[AnswerJob]
) -> Iterator[WrittenAnswer]:
    """Write the answers by the captured loop of a GPU, as many concurrently as it has rows."""
    running: dict[int, AnswerJob] = {}
    while True:
        queued = []
        for row, job in zip(loop.free, jobs, strict=False):
            queued.append((row, request_of(job, stop_ids, options)))
            running[row] = job
        loop.begin(queued)
        if not running:
            return
        for text in loop.run(STEPS):
            ids, log_p = text.top_ids.astype(np.int32), text.top_log_p.astype(np.float16)
            yield WrittenAnswer(running.pop(text.row), text.tokens.astype(np.int32), ids, log_p)


def engine_answers(
    model: Model, stop_ids: frozenset[int], options: WriterOptions, jobs: Iterator[AnswerJob]
) -> Iterator[WrittenAnswer]:
    """Write the answers through the engine, `options.rows` concurrently."""
    rows, running = options.rows, dict[int, AnswerJob]()
    recorder = TapRecorder(options.taps, model) if options.taps else None
    decoder = registry.find("decoders", "speculative" if options.taps else "autoregressive")  # trees are a root alone
    settings = EngineOptions(nodes=1, rows=rows, batch=rows, chunk=2 * rows, reuse=False)
    with Engine(model, recorder, options=settings) as engine:
        while True:
            while len(running) < rows and (job := next(jobs, None)) is not None:
                run = engine.submit(request_of(job, stop_ids, options), decoder, decoder.Options())
                running[run.key] = job
            if not running:
                return
            for run in engine.step():
                if run.finish_reason is not None:
                    yield _written_answer(run, running.pop(run.key), recorder)


def request_of(job: AnswerJob, stop_ids: frozenset[int], options: WriterOptions) -> Request:
    """Return the request of an answer, the same for both writers."""
    sampling = Sampling(job.temperature)
    return Request(
        job.prompt,
        _GREEDY if sampling.is_greedy else _GUMBEL,
        options.max_tokens,
        sampling,
        seed=job.number % _SEEDS,
        choice=options.seed,
        stop_ids=stop_ids,
        logprobs=LogprobsOptions(options.top),
    )


def _written_answer(run: TokenSequence, job: AnswerJob, recorder: TapRecorder | None) -> WrittenAnswer:
    if run.error is not None:
        raise run.error
    top = [record.top for record in run.history.logprobs]
    ids = np.array([[token for token, _ in row] for row in top], dtype=np.int32)  # [tokens, k]
    log_p = np.array([[value for _, value in row] for row in top], dtype=np.float16)
    taps = None if recorder is None else recorder.take(run.request, len(run.committed))
    return WrittenAnswer(job, np.array(run.tokens, dtype=np.int32), ids, log_p, taps)
