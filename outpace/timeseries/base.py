"""What a forecaster must offer to take part in speculation, as target or as draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributions import Distribution


class PatchModel(ABC):
    """An autoregressive model of patches, which are runs of `patch_length` successive values.

    Values are scaled: the history has mean 0 and deviation 1. A state belongs to rows that are read together; after
    `drop` their lengths may differ.
    """

    patch_length: int
    max_patches: int | None = None  # positions; None: no limit
    frequencies: Sequence[str] = ()  # those of the series it was trained with, as pandas names them; empty: any
    draft_length = 4  # patches to draft where no times may be measured

    @abstractmethod
    def open(self, history: Tensor) -> Any:
        """Return the state after reading histories [rows, patches, points]; there may be no patch."""

    @abstractmethod
    def propose(self, state: Any, patches: Tensor) -> Distribution:
        """Append patches [rows, patches, points] and return the distribution of the patch after each, with batch shape
        [rows, patches] and event shape [points]; only its `sample`, `log_prob` and `mean` are used."""

    @abstractmethod
    def drop(self, state: Any, counts: Tensor) -> None:
        """Remove the last `counts[row]` patches of each row; all of them were appended since the last call."""

    @abstractmethod
    def select(self, state: Any, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
