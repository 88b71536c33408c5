"""A draft's reduced output vocabulary: the tokens that its output layer has rows for, in a file beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError

FILE = "draft_vocab.safetensors"  # one tensor `ids`: int32, rising


def read_draft_vocab(folder: Path, config: Mapping[str, Any]) -> Tensor | None:
    """The token ids [rows] int64 where config.json says `outpace.draft_vocab_size`; None where it says nothing.

    Other programs do not know the field and use the whole output layer, which is there as well.
    """
    ours = config.get("outpace")
    if not isinstance(ours, Mapping) or ours.get("draft_vocab_size") is None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / FILE
    try:
        ids = load_file(path)["ids"]
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"config.json speaks of a draft vocabulary, and {path} does not hold it: {error}") from error
    size, vocab = ours["draft_vocab_size"], config.get("vocab_size")
    if ids.dtype != torch.int32 or ids.ndim != 1 or len(ids) != size:
        raise UserError(f"{path} holds {ids.dtype} {list(ids.shape)}, config.json speaks of {size!r} ids of int32")
    if len(ids) == 0 or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= int(vocab or 0):
        raise UserError(f"the ids in {path} must rise, from 0 at least to below the vocabulary of {vocab}")
    return ids.long()


def checked_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """The tokens of a reduced output layer; UserError unless they are different tokens of the vocabulary."""
    if ids.dim() != 1 or not len(ids) or ids.dtype != torch.int64:
        raise UserError(f"the output layer's tokens are {ids.dtype} {list(ids.shape)}, they must be int64 [tokens]")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise UserError(f"the output layer's tokens must be different ones, between 0 and {vocab_size - 1}")
    return ids
