"""Drafts for every architecture of the Llama family: the student computes what transformers does, what is written of it
is a model that both load, and a run from the target's text to the draft serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from distill_files import settings, silent, target_folder
from test_architectures import CASES, Pair
from test_architectures import pairs as pairs
from test_four_bits import folders
from torch import Tensor

import outpace
from outpace.core.errors import UserError
from outpace.distill.export import write_draft
from outpace.distill.run import distill
from outpace.distill.start import DraftShape, draft_config, new_student
from outpace.distill.student import EMBEDDING, NORM, PackedRows, Student
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


OTHERS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
}


@torch.no_grad()
def logits_of(student: Student, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Scores behind every token of texts that lie in one row."""
    tokens = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[place for text in texts for place in range(len(text))]])
    sequences = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    found = student.logits(PackedRows(tokens, positions, sequences, torch.arange(tokens.shape[1])))
    return [*found.split([len(text) for text in texts])]


@pytest.mark.parametrize("name", CASES)
def test_a_student_scores_as_transformers_does(name: str, pairs: Callable[[str], Pair]) -> None:
    pair = pairs(name)
    with Checkpoint.open(pair.folder) as checkpoint:
        count = from_dict(checkpoint.config).num_layers
    student = new_student(pair.folder, DraftShape(str(count)), None, 0)
    for text, found in zip(TEXTS, logits_of(student, TEXTS), strict=True):
        expected = pair.logits(text)
        assert expected.std() > 0.1
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_what_both_load(name: str, pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """Of layers whose kinds differ where the target's do."""
    folder = pairs(name).folder
    shape = DraftShape("1,2,3")
    with Checkpoint.open(folder) as checkpoint:
        config = draft_config(checkpoint.config, shape)
        sizes = from_dict(checkpoint.config)
    student = new_student(folder, shape, None, 0)
    for value in student.tensors.values():
        value.data.copy_(value.data.bfloat16())
    write_draft(tmp_path / "draft", student, config, folder)
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
        scores = ours.score([chain(session, text, wanted=range(len(text)))])
        assert (scores - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "biased", "gemma3"])
def test_a_narrow_student_keeps_the_heads_norms(name: str, pairs: Callable[[str], Pair]) -> None:
    target = new_student(pairs(name).folder, DraftShape("2"), None, 0)
    narrow = new_student(pairs(name).folder, DraftShape("2", hidden=target.config.hidden_size // 2), None, 0)
    for weight, value in narrow.tensors.items():
        if "q_norm" in weight or "k_norm" in weight:
            assert torch.equal(value, target.tensors[weight])
    assert all(bool(part.isfinite().all()) for part in logits_of(narrow, TEXTS))


def test_what_goes_into_a_narrow_gemma_is_as_large_as_it_was(pairs: Callable[[str], Pair]) -> None:
    folder = pairs("gemma3").folder
    target = new_student(folder, DraftShape("2"), None, 0)
    narrow = new_student(folder, DraftShape("2", hidden=48), None, 0)
    sizes = [
        float((student.tensors[EMBEDDING].detach() * student.config.embedding_scale).norm())
        for student in (target, narrow)
    ]
    assert 0.8 * sizes[0] < sizes[1] < sizes[0]


def test_fresh_norms_of_gemma_are_one(pairs: Callable[[str], Pair]) -> None:
    student = new_student(pairs("gemma3").folder, DraftShape("2", init="fresh"), None, 0)
    norms = {name: value for name, value in student.tensors.items() if "norm" in name and name != NORM}
    assert len(norms) == 12
    assert all(bool((value == 0).all()) for value in norms.values()), "they hold their weights less one"


def test_a_narrow_draft_for_longrope_is_refused(pairs: Callable[[str], Pair]) -> None:
    """transformers would not load it: it counts pairs by the hidden size."""
    with Checkpoint.open(pairs("phi3_part").folder) as checkpoint, pytest.raises(UserError, match="leave it out"):
        draft_config(checkpoint.config, DraftShape("1", hidden=32))


@pytest.mark.parametrize("kind", ["llama3", "linear", "qwen3", "mistral", "gemma3", "gptq", "awq"])
def test_a_run_from_text_to_draft(kind: str, tmp_path: Path) -> None:
    """Its draft drafts, and the text stays the target's."""
    if kind in ("gptq", "awq"):
        target = folders(tmp_path / "four", kind, 64)[0]
    elif kind in OTHERS:
        target = target_folder(tmp_path / "target", OTHERS[kind])
    else:
        scaling = LLAMA3 if kind == "llama3" else {"rope_type": "linear", "factor": 2.0}
        target = target_folder(tmp_path / "target", rope_scaling=scaling)
    asked = settings(target, tmp_path / "run", tokens=1500)
    for stage in ("text", "train"):
        distill(replace(asked, stage=stage), silent)
    with outpace.load(target, tmp_path / "run" / "draft", method="speculative", drafter="model") as llm:
        drafted = llm.generate("hello world", max_tokens=30, ignore_eos=True)[0]
    with outpace.load(target, method="autoregressive") as llm:
        assert llm.generate("hello world", max_tokens=30, ignore_eos=True)[0].tokens == drafted.tokens
    assert drafted.figures.drafted > 0


def test_a_draft_of_a_config_with_an_empty_list_of_layers(tmp_path: Path) -> None:
    """It says what its target says, which is nothing."""
    folder = target_folder(tmp_path / "target", no_rope_layers=[])
    with Checkpoint.open(folder) as checkpoint:
        assert from_dict(draft_config(checkpoint.config, DraftShape("1"))).num_layers == 1
