"""Drafts for every architecture of the Llama family: the student computes what transformers does, what is written of it
is a model that both load, and a run from the target's text to the draft serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from distill_files import OTHERS, check_draft, make_draft, settings, target_folder
from test_architectures import CASES, Pair
from test_architectures import pairs as pairs
from test_four_bits import folders
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows
from outpace.distill.draft_shape import DraftShape, draft_config
from outpace.distill.student import Student
from outpace.models.base import chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.torch.runtime import Llama

TEXTS = ([5, 80, 9, 33, 61, 12, 7, 44, 2, 19, 70, 3, 8, 55, 21, 90, 17], [4, 4, 71, 30, 12, 6, 88, 41, 9, 23, 50, 1])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@torch.no_grad()
def logits_of(student: Student, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Scores behind every token of texts that lie in one row."""
    tokens = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[place for text in texts for place in range(len(text))]])
    sequences = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    found = student.logits(PackedRows(tokens, positions, sequences, torch.arange(tokens.shape[1])))
    return [*found.split([len(text) for text in texts])]


TRAINED = [name for name in CASES if not name.startswith(("gemma2", "gemma4"))]


@pytest.mark.parametrize("name", TRAINED)
def test_a_student_scores_as_transformers_does(name: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(name)
    with Checkpoint.open(pair.folder) as checkpoint:
        count = from_dict(checkpoint.config).num_layers
    student = Student.new(pair.folder, DraftShape(str(count)), None)
    for text, found in zip(TEXTS, logits_of(student, TEXTS), strict=True):
        expected = pair.logits(text)
        assert expected.std() > 0.1
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gemma2", "gemma4_e", "gemma4_experts"])
def test_families_of_which_no_draft_is_trained_are_refused(name: str, pairs: Callable[[str], Pair]) -> None:
    with pytest.raises(UserError, match="drafts are not trained from Gemma 2 and Gemma 4"):
        Student.new(pairs(name).folder, DraftShape("2"), None)


@pytest.mark.parametrize("name", TRAINED)
def test_a_draft_is_what_both_load(name: str, pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """Of layers whose kinds differ where the target's do."""
    folder = pairs(name).folder
    shape = DraftShape("1,2,3")
    with Checkpoint.open(folder) as checkpoint:
        config = draft_config(checkpoint.config, shape)
        sizes = from_dict(checkpoint.config)
    student = Student.new(folder, shape, None)
    for value in student.tensors.values():
        value.data.copy_(value.data.bfloat16())
    student.save(tmp_path / "draft", config, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "draft", attn_implementation="eager", dtype=torch.float32
    )
    with Checkpoint.open(tmp_path / "draft") as draft:
        found = from_dict(draft.config)
        ours = Llama.from_tensors(found, draft.tensor, dtype=torch.float32)
    chosen = sizes.of_layers([1, 2, 3])
    assert [(found.window(n), found.rotates(n)) for n in range(3)] == [
        (chosen.window(n), chosen.rotates(n)) for n in range(3)
    ]
    for text, expected in zip(TEXTS, logits_of(student, TEXTS), strict=True):
        assert (Pair(theirs.eval(), folder).logits(text) - expected).abs().max() < 1e-4
        session = ours.open(len(text), 1)
        scores = ours.score([chain(session, text, logit_rows=range(len(text)))])
        assert (scores - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama3", "linear", "qwen3", "mistral", "gemma3", "gptq", "awq"])
def test_a_run_from_text_to_draft(kind: str, tmp_path: Path) -> None:
    if kind in ("gptq", "awq"):
        target = folders(tmp_path / "four", kind, 64)[0]
    elif kind in OTHERS:
        target = target_folder(tmp_path / "target", OTHERS[kind])
    else:
        scaling = LLAMA3 if kind == "llama3" else {"rope_type": "linear", "factor": 2.0}
        target = target_folder(tmp_path / "target", rope_scaling=scaling)
    check_draft(target, make_draft(settings(target, tmp_path / "run", tokens=1500)))
