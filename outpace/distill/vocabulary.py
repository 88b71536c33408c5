"""The reduced vocabulary of a draft: token ids in ascending order, chosen when its training begins."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.files.cache import new_file
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE


def save_vocab_ids(file: Path, ids: Tensor) -> None:
    """Write the token ids of a draft's reduced vocabulary, in ascending order, as the int32 tensor `ids`."""
    from safetensors.torch import save_file

    with new_file(file) as part:
        save_file({"ids": ids.cpu().to(torch.int32)}, part, {"format": "pt"})


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
        raise UserError(f"{folder} holds a draft of {len(ids)} tokens, not {size}; choose another folder or --vocab")
    return ids
