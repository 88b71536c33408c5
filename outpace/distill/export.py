"""Writes a draft as a model folder that transformers, other engines and outpace can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.atomic_write import write_atomically
from outpace.distill.student import Student
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.checkpoint import SINGLE
from outpace.models.files.packed import TOKENIZER_FILES
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE


def write_draft(folder: Path, student: Student, config: Mapping[str, Any], target: Path) -> None:
    """Replace the draft in `folder`; `config` is its config.json. The old draft is kept if that fails.

    Weights are stored in bfloat16 under their Hugging Face names. A draft with a reduced vocabulary has its token ids
    in the int32 tensor `ids` of draft_vocab.safetensors.
    """
    from safetensors.torch import save_file

    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in student.tensors.items()}
    replacement = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(replacement, ignore_errors=True)
    with new_folder(replacement) as unfinished:
        (unfinished / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        write_atomically(unfinished / SINGLE, lambda part: save_file(tensors, part, {"format": "pt"}))
        if student.ids is not None:
            save_vocab_ids(unfinished / VOCAB_FILE, student.ids)
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, unfinished / name)
    shutil.rmtree(folder, ignore_errors=True)
    replacement.rename(folder)


def save_vocab_ids(file: Path, ids: Tensor) -> None:
    """Write the token ids of a draft's reduced vocabulary, in ascending order, as the int32 tensor `ids`."""
    from safetensors.torch import save_file

    write_atomically(file, lambda part: save_file({"ids": ids.cpu().to(torch.int32)}, part, {"format": "pt"}))


def read_vocab_ids(file: Path) -> Tensor:
    """Read the token ids of a reduced vocabulary, int64 [ids]; UserError if the file is damaged."""
    from safetensors.torch import load_file

    try:
        ids = load_file(file)["ids"].long()
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} cannot be read ({error})") from error
    if ids.dim() != 1 or not len(ids) or bool((ids.diff() <= 0).any()):
        raise UserError(f"{file} must hold token ids in rising order")
    return ids


def chosen_vocab_ids(folder: Path, size: int) -> Tensor | None:
    """Return the vocabulary that a training in `folder` chose; None before it began, or if `size` is 0.

    UserError if it has another size.
    """
    if not size or not (folder / VOCAB_FILE).exists():
        return None
    ids = read_vocab_ids(folder / VOCAB_FILE)
    if len(ids) != size:
        raise UserError(f"{folder} holds a draft of {len(ids)} tokens, not {size}; choose another")
    return ids
