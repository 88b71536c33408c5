"""The writer of `outpace distill`: an answer depends on its job alone, is the target's, and says what that thought."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from distill_files import target_folder

from outpace.core.errors import UserError
from outpace.distill import text
from outpace.distill.text import load_target
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer, engine_answers, loop_answers
from outpace.models.base import Model, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.cuda.writing_loop import WritingLoop
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.llama.torch.runtime import Llama

TENSORS = reference.random_tensors(reference.TINY)
TARGET = Llama.from_tensors(reference.TINY, TENSORS.__getitem__)
JOBS = [AnswerJob(5000 + n, tuple(range(1 + n, 4 + 2 * n)), (0.0, 0.8, 1.0)[n % 3]) for n in range(9)]
STOP = frozenset({7})


def write(rows: int, model: Model = TARGET) -> dict[int, WrittenAnswer]:
    answers = engine_answers(model, STOP, WriterOptions(rows=rows, max_tokens=12, top=4), iter(JOBS))
    return {answer.job.number: answer for answer in answers}


def write_by_loop(rows: int, model: Model) -> dict[int, WrittenAnswer]:
    assert isinstance(model, GraphLlama)
    loop = WritingLoop(model, rows, max(len(job.prompt) for job in JOBS) + 12, 4)
    answers = loop_answers(loop, STOP, WriterOptions(max_tokens=12, top=4), iter(JOBS))
    return {answer.job.number: answer for answer in answers}


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_a_loop_on_the_device_writes_the_engines_answers(rows: int) -> None:
    """As a GPU does it, by the stand-in for its graphs."""
    model = GraphLlama.from_tensors(reference.TINY, TENSORS.__getitem__, is_eager=True, exact=False)
    expected, found = write(4), write_by_loop(rows, model)
    assert sorted(found) == sorted(expected)
    assert any(len(answer.tokens) < 12 for answer in found.values())
    for number, answer in expected.items():
        assert np.array_equal(answer.tokens, found[number].tokens)
        assert np.array_equal(answer.top_ids, found[number].top_ids)
        assert np.allclose(answer.top_log_p, found[number].top_log_p, atol=5e-3)


def log_p(answer: WrittenAnswer) -> torch.Tensor:
    """The target's log-probabilities before every token of an answer: [tokens, vocab]"""
    tokens = [*answer.job.prompt, *answer.tokens.tolist()]
    start = len(answer.job.prompt)
    session = TARGET.open(len(tokens), len(tokens))
    scores = TARGET.score([chain(session, tokens[:-1], range(start - 1, len(tokens) - 1))])
    return torch.log_softmax(scores, -1)


def test_an_answer_depends_on_its_job_alone() -> None:
    together, alone = write(4), write(1)
    assert sorted(together) == [job.number for job in JOBS]
    for number, answer in alone.items():
        assert np.array_equal(answer.tokens, together[number].tokens)
        assert np.array_equal(answer.top_ids, together[number].top_ids)
        assert len(answer.tokens) == 12 or answer.tokens[-1] == 7
    assert len({answer.tokens.tobytes() for answer in alone.values()}) > 3


def test_what_the_target_thought() -> None:
    for answer in write(3).values():
        best, ids = log_p(answer).topk(4)
        assert np.array_equal(answer.top_ids, ids.numpy())
        assert np.allclose(answer.top_log_p, best.numpy(), atol=5e-3), "float16 rounds to 2^-11"
        if answer.job.temperature == 0.0:
            assert np.array_equal(answer.tokens, ids[:, 0].numpy())


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_without_exact_mode_it_stays_near(dtype: torch.dtype, distance: float) -> None:
    model = Llama.from_tensors(reference.TINY, TENSORS.__getitem__, dtype=dtype, exact=False)
    found = write(5, model).values()
    near = [log_p(a).gather(1, torch.from_numpy(a.top_ids).long()) - torch.from_numpy(a.top_log_p) for a in found]
    assert float(torch.cat(near).abs().mean()) < distance


def test_a_target_of_a_shape_that_the_kernels_refuse_runs_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target_folder(tmp_path / "target")
    opened: list[str] = []
    whole = text.load_model

    def noted(*given: object, **options: object) -> object:
        opened.append(str(options["runtime"]))
        if options["runtime"] == "native":
            raise UnsupportedShape("head_dim is 7")
        return whole(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(text, "load_model", noted)
    model = load_target(folder, "cpu")
    assert isinstance(model, Llama)
    assert not model.exact, "training text needs no exact mode"
    assert opened == ["native", "llama"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "model_type 'gemma'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    other = target_folder(tmp_path / "other", **changes)
    with Checkpoint.open(other) as checkpoint, pytest.raises(UserError, match=named):
        checkpoint.read_config()


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("max_tokens", 0), ("top", 0), ("seed", -1)])
def test_a_wrong_option_is_named(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}"):
        WriterOptions(**{name: value})
