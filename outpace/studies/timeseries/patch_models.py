"""The interface of forecasters that take part in speculation, as target or as draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributions import Distribution


class PatchModel(ABC):
    """An autoregressive model of patches, which are runs of `patch_length` successive values.

    Values are scaled so that the history has mean 0 and standard deviation 1. A state holds rows, the sample paths that
    are read together; after `drop` their lengths may differ.
    """

    patch_length: int
    max_patches: int | None = None  # of history and forecast together; None: no limit
    frequencies: Sequence[str] = ()  # of the series in its training data, as pandas names them; empty: any
    draft_length = 4  # patches to draft in a round, if nothing else is asked for

    @abstractmethod
    def open(self, history: Tensor) -> Any:
        """Return the state after reading histories [rows, patches, points]; the number of patches may be 0."""

    @abstractmethod
    def propose(self, state: Any, patches: Tensor) -> Distribution:
        """Append patches [rows, patches, points] and return the distribution of the patch after each, with batch shape
        [rows, patches] and event shape [points]; only its `sample`, `log_prob` and `mean` are used."""

    @abstractmethod
    def drop(self, state: Any, counts: Tensor) -> None:
        """Remove the last `counts[row]` patches of each row, which were appended after the last `drop`."""

    @abstractmethod
    def select(self, state: Any, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
