"""What the training of a draft starts from: layers of the target, or a draft that was trained before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distill_files import pack
from distill_files import target as target

from outpace.core.errors import UserError
from outpace.distill.draft_shape import (
    DraftShape,
    draft_config,
    pick_layers,
    save_vocab_ids,
)
from outpace.distill.student import EMBEDDING, Student
from outpace.models.files.checkpoint import read_json
from outpace.models.files.pairs import SHIPPED_FOLDER


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        *(("1", [0]), ("2", [0, 29]), ("3", [0, 14, 29]), ("0,1,28", [0, 1, 28])),
        *((wrong, None) for wrong in ("7,", "0", "31", "5,4", "0,30", "two", "-1")),
    ],
)
def test_layers_are_a_count_or_a_list(layers: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match="layers is"):
            pick_layers(DraftShape(layers), 30)
    else:
        assert pick_layers(DraftShape(layers), 30) == expected


def test_training_continues_from_a_draft_whole_or_packed(target: Path, tmp_path: Path) -> None:
    """The student has the draft's weights as they were stored, and the target's embeddings."""
    shape, ids = DraftShape("0,1", vocab=40), torch.arange(3, 43)
    student = Student.new(target, shape, ids)
    assert EMBEDDING not in student.trained
    for value in student.trained.values():
        value.data.add_(torch.randn_like(value), alpha=0.1)
    config = draft_config(read_json(target / "config.json"), shape)
    student.save(tmp_path / "draft", config, target)
    pack(tmp_path / "draft", tmp_path / "packed")
    for name in ("draft", "packed"):
        continued = Student.shape_from_options("3", str(tmp_path / name), 0, str(target))
        assert continued == DraftShape("0,1", 40, tmp_path / name)
        found = Student.new(target, continued, ids)
        assert found.trained.keys() == student.trained.keys()
        for weight, value in found.trained.items():
            assert torch.equal(value, student.tensors[weight].bfloat16().float())
        assert torch.equal(found.tensors[EMBEDDING], student.tensors[EMBEDDING])
        assert draft_config(read_json(target / "config.json"), continued) == config
    save_vocab_ids(tmp_path / "draft" / "draft_vocab.safetensors", torch.tensor([4, 300]))
    with pytest.raises(UserError, match="300"):
        DraftShape.of_draft(tmp_path / "draft")


def test_the_shipped_draft_can_be_trained_further() -> None:
    shape = Student.shape_from_options("3", "shipped", 0, "SmolLM2-135M-Instruct")
    assert shape == DraftShape("0,14,29", 10240, SHIPPED_FOLDER / "smollm2-135m-instruct")
