"""The tokens that a draft's reduced output layer scores (FR-Spec, arXiv:2502.14856)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outpace.models.llama.native.weights import PANEL

MAX_ADDED = 4096  # tokens that are kept besides the first ones


class Kept(NamedTuple):
    """Panels of the output layer, rising: int32 [panels]; and their tokens, rising: int64 [tokens]."""

    panels: np.ndarray
    ids: np.ndarray


class KeptTokens:
    """The first tokens of a vocabulary, which are its most frequent ones, and others that the model has read.

    A model reads the prompt and what the target writes, so the tokens of a text can be drafted once they have occurred
    in it. The kernels compute whole panels of the output layer, so a token brings its neighbours. Of `MAX_ADDED` tokens
    besides the first ones, those that were read last stay.
    """

    def __init__(self, first: int, vocab: int) -> None:
        """Keep the first `first` of `vocab` tokens, rounded up to whole panels."""
        self.first, self._vocab = -(-first // PANEL) * PANEL, vocab
        self._added: dict[int, None] = {}  # panels, the one that was read last at the end
        self._lock = threading.Lock()
        self.kept = self._panels()

    def read(self, tokens: Sequence[int]) -> None:
        """Keep these tokens."""
        new = [token // PANEL for token in tokens if token >= self.first]
        if not new:
            return
        with self._lock:
            has_changed = not self._added.keys() >= {*new}
            for panel in new:
                self._added.pop(panel, None)
                self._added[panel] = None
            while len(self._added) > MAX_ADDED // PANEL:
                del self._added[next(iter(self._added))]
            if has_changed:
                self.kept = self._panels()

    def _panels(self) -> Kept:
        panels = np.array([*range(self.first // PANEL), *sorted(self._added)], np.int32)
        ids = (panels[:, None].astype(np.int64) * PANEL + np.arange(PANEL)).reshape(-1)
        return Kept(panels, ids[: np.searchsorted(ids, self._vocab)])
