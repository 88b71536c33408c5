"""A GluonTS predictor, so that GluonTS' evaluation and back tests run a forecaster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.errors import require
from outpace.studies.timeseries.forecaster import Forecaster

try:
    from gluonts.dataset.util import forecast_start
    from gluonts.model.forecast import SampleForecast
    from gluonts.model.predictor import Predictor
except ImportError:  # an extra; the class says how to install it
    Predictor = object

if TYPE_CHECKING:
    from gluonts.dataset.common import Dataset


class ForecasterPredictor(Predictor):
    """Predicts each entry of a data set by sample paths."""

    def __init__(
        self, forecaster: Forecaster, prediction_length: int, num_samples: int = 100, seed: int | None = None
    ) -> None:
        require("a GluonTS predictor", "timeseries", "gluonts")
        super().__init__(prediction_length)
        self._forecaster, self._num_samples, self._seed = forecaster, num_samples, seed

    def predict(self, dataset: Dataset, num_samples: int | None = None) -> Iterator[SampleForecast]:
        """Yield a forecast for each entry; all entries are drawn together."""
        entries = list(dataset)
        values = [np.asarray(entry["target"]) for entry in entries]
        samples = self._forecaster.predict(
            values, self.prediction_length, num_samples or self._num_samples, seed=self._seed
        )
        for entry, own in zip(entries, samples.numpy(), strict=True):
            yield SampleForecast(own, forecast_start(entry), item_id=entry.get("item_id"))
