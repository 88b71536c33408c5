"""The tokens that a draft's reduced output layer scores (FR-Spec, arXiv:2502.14856)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_ADDED = 4096  # tokens that are kept besides the first ones


class Kept(NamedTuple):
    """Panels of the output layer, rising: int32 [panels]; and their tokens, rising: int64 [tokens]."""

    panels: np.ndarray
    ids: np.ndarray


class KeptTokens:
    """The first tokens of a vocabulary, which are its most frequent ones, and others that the model has read.

    A model reads the prompt and what the target writes, so the tokens of a text can be drafted once they have occurred
    in it. The native kernels compute whole panels of the output layer, so a token brings its neighbours. Of `MAX_ADDED`
    tokens besides the first ones, those that were read last stay.
    """

    def __init__(self, first: int, vocab: int, panel: int = 1) -> None:
        """Keep the first `first` of `vocab` tokens, rounded up to whole panels of `panel` tokens."""
        self.first, self._vocab, self._panel = min(-(-first // panel) * panel, vocab), vocab, panel
        self.max_added = min(MAX_ADDED // panel, -(-(vocab - self.first) // panel))  # panels
        self._added: dict[int, None] = {}  # panels, the one that was read last at the end
        self._lock = threading.Lock()
        self.kept = self._panels()

    def read(self, tokens: Sequence[int]) -> bool:
        """Keep these tokens; return whether other tokens are kept than before."""
        new = [token // self._panel for token in tokens if token >= self.first]
        if not new:
            return False
        with self._lock:
            has_changed = not self._added.keys() >= {*new}
            for panel in new:
                self._added.pop(panel, None)
                self._added[panel] = None
            while len(self._added) > self.max_added:
                del self._added[next(iter(self._added))]
            if has_changed:
                self.kept = self._panels()
        return has_changed

    def _panels(self) -> Kept:
        panels = np.array([*range(-(-self.first // self._panel)), *sorted(self._added)], np.int32)
        ids = (panels[:, None].astype(np.int64) * self._panel + np.arange(self._panel)).reshape(-1)
        return Kept(panels, ids[: np.searchsorted(ids, self._vocab)])
