"""Writes a draft as a model folder that transformers, other engines and this one load as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.parts import index_of, save_parts
from outpace.distill.student import Student
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.checkpoint import INDEX, SINGLE
from outpace.models.files.packed import TOKENIZER_FILES

VOCAB_FILE = "draft_vocab.safetensors"


def write_draft(
    folder: Path,
    student: Student,
    config: Mapping[str, Any],
    target: Path,
    extra: Mapping[str, str] | None = None,
    part_bytes: int | None = None,
) -> None:
    """Replaces the draft at `folder`, whole or not at all. `config` is its config.json; `extra` are more text files.

    Weights are stored in bfloat16, under their Hugging Face names, in files of at most `part_bytes`; where the draft
    writes some tokens only, their ids are the int32 tensor `ids` of draft_vocab.safetensors.
    """
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in student.tensors.items()}
    retired = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
    try:
        with new_folder(folder) as made:
            (made / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
            placed = save_parts(made, Path(SINGLE).stem, tensors, part_bytes, {"format": "pt"})
            if len(set(placed.values())) > 1:
                (made / INDEX).write_text(index_of(tensors, placed), encoding="utf-8")
            if student.ids is not None:
                save_ids(made / VOCAB_FILE, student.ids)
            for name in TOKENIZER_FILES:
                if (target / name).is_file():
                    shutil.copyfile(target / name, made / name)
            for name, text in (extra or {}).items():
                (made / name).write_text(text, encoding="utf-8")
    except BaseException:
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def save_ids(file: Path, ids: Tensor) -> None:
    """Writes the tokens that a draft can write: the int32 tensor `ids`, in rising order."""
    from safetensors.torch import save_file

    try:
        save_file({"ids": ids.cpu().to(torch.int32)}, file, {"format": "pt"})
    except Exception as error:  # safetensors has an error class of its own
        raise UserError(f"{file} cannot be written ({error})") from error


def read_ids(file: Path) -> Tensor:
    """What `save_ids` wrote, int64 [ids]; UserError where it is damaged."""
    from safetensors.torch import load_file

    try:
        ids = load_file(file)["ids"].long()
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} cannot be read ({error})") from error
    if ids.dim() != 1 or not len(ids) or bool((ids.diff() <= 0).any()):
        raise UserError(f"{file} must hold token ids in rising order")
    return ids


def settled_ids(folder: Path, size: int) -> Tensor | None:
    """The tokens on which a training in `folder` settled, None where it has not begun or `size` is 0; UserError where
    they are not `size` many."""
    file = folder / VOCAB_FILE
    if not size or not file.exists():
        return None
    ids = read_ids(file)
    if len(ids) != size:
        raise UserError(f"{folder} holds a draft of {len(ids)} tokens, not {size}; choose another")
    return ids
