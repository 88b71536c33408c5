"""Forecasters that take part in speculation, as target or as draft: their interface, and point forecasters.

A point forecaster gets noise of a given standard deviation, as in STRIDE's paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from outpace.core.errors import UserError, check_range, check_whole


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


Forecast = Callable[[Sequence[Tensor]], Tensor]


class PointForecaster(PatchModel):
    """Draws around a point forecast: each value is Gaussian with standard deviation `sigma`, in units of the history's.

    `forecast` takes histories [points] of different lengths and returns the next values, [histories, patch_length or
    more]. It keeps no cache, so a pass over n patches computes n forecasts from the whole history: it takes n times as
    long as one, and speculation saves only what a batch of n saves.
    """

    def __init__(self, forecast: Forecast, patch_length: int, sigma: float, max_patches: int | None = None) -> None:
        check_whole("patch_length", patch_length, 1)
        check_range("sigma", sigma, 1e-6)
        self._forecast, self._sigma = forecast, sigma
        self.patch_length, self.max_patches = patch_length, max_patches

    def open(self, history: Tensor) -> list[Tensor]:
        """Return the values of each row."""
        return list(history.flatten(1))

    def propose(self, state: list[Tensor], patches: Tensor) -> Distribution:
        """Forecast after each patch, all in one batch."""
        num_patches = patches.shape[1]
        histories = []
        for row, added in enumerate(patches.flatten(1)):
            state[row] = torch.cat([state[row], added])
            ends = len(state[row]) - self.patch_length * torch.arange(num_patches - 1, -1, -1)
            histories += [state[row][:end] for end in ends.tolist()]
        found = self._forecast(histories)
        if found.ndim != 2 or len(found) != len(histories) or found.shape[1] < self.patch_length:
            expected = f"[{len(histories)}, {self.patch_length} or more]"
            raise UserError(f"the point forecaster returned shape {list(found.shape)}, it must be {expected}")
        mean = found[:, : self.patch_length].reshape(len(patches), num_patches, self.patch_length)
        return Independent(
            Normal(mean, torch.full_like(mean, self._sigma), validate_args=False), 1, validate_args=False
        )

    def drop(self, state: list[Tensor], counts: Tensor) -> None:
        """Remove the last patches of each row."""
        for row, count in enumerate(counts.tolist()):
            state[row] = state[row][: len(state[row]) - self.patch_length * count]

    def select(self, state: list[Tensor], rows: Tensor) -> None:
        """Keep these rows."""
        state[:] = [state[row] for row in rows.tolist()]


def timesfm(model: Any, sigma: float, patch_length: int | None = None) -> PointForecaster:
    """Wrap transformers' `TimesFm2_5ModelForPrediction`, which has no cache."""
    config = model.config
    length = patch_length or config.patch_length
    check_whole("patch_length", length, 1, config.horizon_length)

    def forecast(histories: Sequence[Tensor]) -> Tensor:
        found: Tensor = model(list(histories), truncate_negative=False).mean_predictions
        return found

    return PointForecaster(forecast, length, sigma, config.context_length // length)
