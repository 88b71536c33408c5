"""A draft's output layer of few rows, which change in place: captured passes keep their addresses and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outpace.core.arrays import to_device
from outpace.models.llama.kept_tokens import KeptTokens
from outpace.models.llama.torch.linear import Linear, pack_first, plain_rows


class ReducedHead:
    """The rows of the first tokens, and at most `MAX_ADDED` rows for tokens that the model has read.

    `linear` computes them, `ids` int64 [rows] are their tokens. Rows without a token have zeros as weights and the
    first number that is no token as id.
    """

    def __init__(self, whole: Linear, first: int, vocab: int) -> None:
        """Keep the first `first` of `vocab` tokens of an output layer, which stays as it is."""
        self.kept = KeptTokens(first, vocab)
        rows, is_copy = plain_rows(whole)
        self.linear, self._rows = pack_first(rows, first, self.kept.max_added)
        self._others = rows[first:].clone() if is_copy else rows[first:]  # of the tokens that may be added
        self._tokens = np.full(self.kept.max_added, vocab)
        self.ids = to_device([*range(first), *self._tokens], np.int64, rows.device)

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> None:
        """Keep these tokens: load their rows in place of rows that have no token or one that is not kept any more."""
        if not self.kept.read(tokens):
            return
        first = self.kept.first
        added = self.kept.kept.ids[first:]
        new = np.setdiff1d(added, self._tokens)
        places = np.flatnonzero(~np.isin(self._tokens, added))[: len(new)]
        self._tokens[places] = new
        at, ids = (to_device(part, np.int64, self.ids.device) for part in (places, new))
        self._rows[at] = self._others[ids - first]
        self.ids[at + first] = ids
