"""The target writes through the engine, on the native kernels: the fastest way on a CPU, and the text that users get.

The int8 target that runs there by default is the one that the draft has to agree with.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from outpace.core.sampling import Sampling
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders import autoregressive
from outpace.distill.writer import Answer, Job, WriterOptions
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.request import Running
from outpace.models.base import Model
from outpace.rules import greedy, gumbel

_SEEDS = 2**63


class EngineWriter:
    """As `Writer`: jobs in, answers out, in the order in which they end."""

    def __init__(self, model: Model, stop_ids: frozenset[int], options: WriterOptions) -> None:
        self._model, self._stop_ids, self._options = model, stop_ids, options
        self._greedy, self._gumbel = greedy.build(greedy.Options()), gumbel.build(gumbel.Options())

    @property
    def max_positions(self) -> int:
        """The target's context, in tokens."""
        return self._model.max_positions

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        rows = self._options.rows
        running: dict[int, tuple[Running, Job]] = {}
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
                        yield self._answer(*running.pop(run.key))

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

    def _answer(self, run: Running, job: Job) -> Answer:
        if run.error is not None:
            raise run.error
        top = [record.top for record in run.history.logprobs]
        ids = np.array([[token for token, _ in row] for row in top], dtype=np.int32)  # [tokens, k]
        log_p = np.array([[value for _, value in row] for row in top], dtype=np.float16)
        return Answer(job, np.array(run.tokens, dtype=np.int32), ids, log_p)
