"""The target writes plainly and many answers at once: the text that users get from it. Through the engine, or on a GPU
by a loop to which the host comes every 16 steps.

An answer follows from its job alone: not from the answers beside it, nor from the order in which they start. On a GPU
half precisions round by the batch, so there an answer that hangs on a near tie may be another in another batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outpace.core.errors import check_whole
from outpace.core.noise import row_words
from outpace.core.sampling import Sampling
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders import autoregressive
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.cuda.writing_loop import FinishedText, QueuedText, WritingLoop
from outpace.rules import greedy, gumbel

_SEEDS = 2**63
STEPS = 16  # of a loop on a GPU, after which answers that ended give way to others
MEMORY = 0.6  # of what is free on a GPU that a loop may take
_TEMPORARIES = 12  # numbers of 4 bytes that a step holds for each row and token of the vocabulary


@dataclass(frozen=True)
class Job:
    """One answer to write. `number` keys its noise and names it in the shards."""

    number: int
    prompt: tuple[int, ...]
    temperature: float
    held_out: bool = False


@dataclass(frozen=True)
class Written:
    """What the target wrote, and the k likeliest tokens at each place at temperature 1, likeliest first."""

    job: Job
    tokens: np.ndarray  # int32 [tokens], the stop token included
    top_ids: np.ndarray  # int32 [tokens, k]
    top_log_p: np.ndarray  # float16 [tokens, k]


@dataclass(frozen=True)
class WriterOptions:
    """`rows` answers are written at once, none longer than `max_tokens`; `top` tokens are kept at each place."""

    rows: int = 128
    max_tokens: int = 256
    top: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("rows", self.rows, 1, 4096)
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("top", self.top, 1, 1024)
        check_whole("seed", self.seed, 0, _SEEDS - 1)


class Writes(Protocol):
    """Jobs in, answers out, in the order in which they end."""

    def answers(self, jobs: Iterator[Job]) -> Iterator[Written]:
        """As many as there are jobs."""


def writer_of(model: Model, stop_ids: frozenset[int], options: WriterOptions, longest: int) -> Writes:
    """The fastest writer for this model; `longest` prompt, in tokens."""
    if not isinstance(model, GraphLlama) or model.exact or model.captures.is_eager:
        return Writer(model, stop_ids, options)
    each = (longest + options.max_tokens) * model.token_bytes + 4 * _TEMPORARIES * model.vocab_size
    room = int(MEMORY * torch.cuda.mem_get_info(model.device)[0] / each)
    return LoopWriter(model, stop_ids, options, longest, max(1, min(options.rows, room)))


class LoopWriter:
    """By a loop on a GPU: as `Writer`, with `rows` answers at once."""

    def __init__(
        self, model: GraphLlama, stop_ids: frozenset[int], options: WriterOptions, longest: int, rows: int
    ) -> None:
        self._options = options
        self._loop = WritingLoop(model, rows, longest + options.max_tokens, options.top, sorted(stop_ids))

    def answers(self, jobs: Iterator[Job]) -> Iterator[Written]:
        running: dict[int, Job] = {}
        while True:
            begun = []
            for row, job in zip(self._loop.free, jobs, strict=False):
                begun.append((row, self._begun(job)))
                running[row] = job
            self._loop.begin(begun)
            if not running:
                return
            for ended in self._loop.run(STEPS):
                yield _written_by_loop(running.pop(ended.row), ended)

    def _begun(self, job: Job) -> QueuedText:
        if not job.temperature:
            return QueuedText(job.prompt, self._options.max_tokens, 0.0, None)
        start, seed = len(job.prompt), job.number % _SEEDS
        keys = row_words(seed, self._options.seed, np.arange(start, start + self._options.max_tokens))
        return QueuedText(job.prompt, self._options.max_tokens, job.temperature, keys)


def _written_by_loop(job: Job, ended: FinishedText) -> Written:
    ids, log_p = ended.top_ids.astype(np.int32), ended.top_log_p.astype(np.float16)
    return Written(job, ended.tokens.astype(np.int32), ids, log_p)


class Writer:
    """Jobs in, answers out, in the order in which they end."""

    def __init__(self, model: Model, stop_ids: frozenset[int], options: WriterOptions) -> None:
        self._model, self._stop_ids, self._options = model, stop_ids, options
        self._greedy, self._gumbel = greedy.build(greedy.Options()), gumbel.build(gumbel.Options())

    def answers(self, jobs: Iterator[Job]) -> Iterator[Written]:
        rows = self._options.rows
        running: dict[int, tuple[TokenSequence, Job]] = {}
        settings = EngineOptions(nodes=1, rows=rows, batch=rows, chunk=2 * rows, reuse=False)
        with Engine(self._model, options=settings) as engine:
            while True:
                while len(running) < rows and (job := next(jobs, None)) is not None:
                    run = engine.submit(self._request(job), autoregressive, autoregressive.Options())
                    running[run.key] = (run, job)
                if not running:
                    return
                for run in engine.step():
                    if run.finish_reason is not None:
                        yield self._written(*running.pop(run.key))

    def _request(self, job: Job) -> Request:
        sampling = Sampling(job.temperature)
        rule = self._greedy if sampling.is_greedy else self._gumbel
        return Request(
            job.prompt,
            rule,
            self._options.max_tokens,
            sampling,
            seed=job.number % _SEEDS,
            choice=self._options.seed,
            stop_ids=self._stop_ids,
            logprobs=LogprobsOptions(self._options.top),
        )

    def _written(self, run: TokenSequence, job: Job) -> Written:
        if run.error is not None:
            raise run.error
        top = [record.top for record in run.history.logprobs]
        ids = np.array([[token for token, _ in row] for row in top], dtype=np.int32)  # [tokens, k]
        log_p = np.array([[value for _, value in row] for row in top], dtype=np.float16)
        return Written(job, np.array(run.tokens, dtype=np.int32), ids, log_p)
