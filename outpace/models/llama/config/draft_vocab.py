"""A draft model's reduced output vocabulary: the tokens of its output rows, in a file next to its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.errors import UserError, check_whole
from outpace.models.options import MIN_VOCAB

if TYPE_CHECKING:
    from torch import Tensor

FILE = "draft_vocab.safetensors"  # one tensor `ids`: int32, rising
USUAL_TOKENS = 49152  # of an output layer that is reduced while the model runs
MIN_SHARE = 0.15  # of a pass's weights that an output layer must have to be reduced without being asked


def num_first_tokens(tokens: int | None, outputs: int, num_in_files: int | None, share: float) -> int | None:
    """Return how many first tokens of `outputs` a draft's output layer keeps; None: it stays whole. UserError for a
    wrong number.

    `tokens`: the number that is asked for; None: to be chosen by the output layer's `share` of a pass's weights.
    `num_in_files`: the tokens of a layer that the draft's files reduce.
    """
    if tokens is None:
        pays = outputs >= 2 * USUAL_TOKENS and share > MIN_SHARE and num_in_files is None
        return USUAL_TOKENS if pays else None
    if num_in_files is not None:
        raise UserError(f"draft_vocab is {tokens}, but the draft's files reduce its output layer to {num_in_files}")
    check_whole("draft_vocab", tokens, MIN_VOCAB, outputs)
    return tokens


def read_draft_vocab(folder: Path, config: Mapping[str, Any]) -> np.ndarray | None:
    """Return the token ids [rows] int64 if config.json has `outpace.draft_vocab_size`, else None.

    Other programs ignore the field and use the whole output layer, which is also in the checkpoint.
    """
    ours = config.get("outpace")
    if not isinstance(ours, Mapping) or ours.get("draft_vocab_size") is None:
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / FILE
    try:
        ids = load_file(path)["ids"]
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"config.json speaks of a draft vocabulary, and {path} does not hold it: {error}") from error
    size, vocab = ours["draft_vocab_size"], int(config.get("vocab_size") or 0)
    if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) != size:
        raise UserError(f"{path} holds {ids.dtype} {list(ids.shape)}, config.json speaks of {size!r} ids of int32")
    if not len(ids) or (ids[1:] <= ids[:-1]).any() or ids[0] < 0 or ids[-1] >= vocab:
        raise UserError(f"the ids in {path} must rise, from 0 at least to below the vocabulary of {vocab}")
    return ids.astype(np.int64)


def checked_ids(given: np.ndarray | Tensor, vocab_size: int) -> np.ndarray:
    """Return the tokens of a reduced output layer; UserError unless they are distinct tokens of the vocabulary."""
    ids = np.asarray(given)
    if ids.ndim != 1 or not len(ids) or ids.dtype != np.int64:
        raise UserError(f"the output layer's tokens are {ids.dtype} {list(ids.shape)}, they must be int64 [tokens]")
    rising = np.sort(ids)
    if rising[0] < 0 or rising[-1] >= vocab_size or (rising[1:] == rising[:-1]).any():
        raise UserError(f"the output layer's tokens must be different ones, between 0 and {vocab_size - 1}")
    return ids
