"""Point forecasters as target and as draft: a forecast plus Gaussian noise, as in STRIDE's paper.

Needs the extra timeseries. Run: python examples/forecast_point.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from outpace.core.errors import UserError, check_range, check_whole
from outpace.studies.timeseries import Forecaster, PatchModel

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


def last_day(histories: Sequence[Tensor]) -> Tensor:
    """Repeat the values of a day ago; the day is 24 values long."""
    return torch.stack([one[-24:-16] for one in histories])


def mean_of_days(histories: Sequence[Tensor]) -> Tensor:
    """Return the means of the values one and two days ago."""
    return torch.stack([(one[-24:-16] + one[-48:-40]) / 2 for one in histories])


if __name__ == "__main__":
    load = 50 + 10 * np.sin(2 * np.pi * np.arange(14 * 24) / 24) + np.random.default_rng(0).normal(0, 1, 14 * 24)
    pair = PointForecaster(mean_of_days, 8, 0.3), PointForecaster(last_day, 8, 0.3)
    forecast = Forecaster(*pair, draft_length=3).sample(load, prediction_length=48, num_samples=20, seed=1)
    median, stats = forecast.quantiles([0.5])[0, :, 0], forecast.stats
    print(f"median in a day {median[23]:.1f}, in two days {median[47]:.1f}")
    print(f"{stats.patches_per_forward:.2f} patches a target pass, acceptance {stats.acceptance[0]:.2f}")
