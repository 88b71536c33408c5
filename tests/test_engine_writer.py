"""Text for distillation through the engine: an answer depends on its job alone, and says what the target thought."""

from __future__ import annotations

import numpy as np
import reference
import torch

from outpace.distill.engine_writer import EngineWriter
from outpace.distill.writer import Answer, Job, WriterOptions
from outpace.models.base import chain
from outpace.models.llama.torch_runtime import Llama

TARGET = Llama.from_tensors(reference.TINY, reference.random_tensors(reference.TINY).__getitem__)
JOBS = [Job(5000 + n, tuple(range(1 + n, 4 + 2 * n)), (0.0, 0.8, 1.0)[n % 3]) for n in range(9)]


def write(rows: int) -> dict[int, Answer]:
    writer = EngineWriter(TARGET, frozenset({7}), WriterOptions(rows=rows, max_tokens=12, top=4))
    return {answer.job.number: answer for answer in writer.answers(iter(JOBS))}


def test_an_answer_depends_on_its_job_alone() -> None:
    together, alone = write(4), write(1)
    assert sorted(together) == [job.number for job in JOBS]
    for number, answer in alone.items():
        assert np.array_equal(answer.tokens, together[number].tokens)
        assert np.array_equal(answer.top_ids, together[number].top_ids)
        assert 1 <= len(answer.tokens) <= 12
    assert len({answer.tokens.tobytes() for answer in alone.values()}) > 3


def test_what_the_target_thought() -> None:
    for answer in write(3).values():
        tokens = [*answer.job.prompt, *answer.tokens.tolist()]
        start = len(answer.job.prompt)
        session = TARGET.open(len(tokens), len(tokens))
        scores = TARGET.score([chain(session, tokens[:-1], range(start - 1, len(tokens) - 1))])
        log_p, ids = torch.log_softmax(scores, -1).topk(4)
        assert np.array_equal(answer.top_ids, ids.numpy())
        assert np.allclose(answer.top_log_p, log_p.numpy(), atol=5e-3)
        if answer.job.temperature == 0.0:
            assert np.array_equal(answer.tokens, ids[:, 0].numpy())
