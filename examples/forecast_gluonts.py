"""A GluonTS predictor, so that GluonTS' evaluation and back tests run a forecaster.

Needs the extra timeseries, and gluonts. Run: python examples/forecast_gluonts.py
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from gluonts.dataset.common import Dataset, ListDataset
from gluonts.dataset.util import forecast_start
from gluonts.model.forecast import SampleForecast
from gluonts.model.predictor import Predictor

from outpace.studies.timeseries import Forecaster


class ForecasterPredictor(Predictor):
    """Predicts each entry of a data set by sample paths."""

    def __init__(
        self, forecaster: Forecaster, prediction_length: int, num_samples: int = 100, seed: int | None = None
    ) -> None:
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


if __name__ == "__main__":
    load = 50 + 10 * np.sin(2 * np.pi * np.arange(14 * 96) / 96)  # two weeks of quarter hours
    start = pd.Period("2024-03-01", freq="15min")
    noise = np.random.default_rng(0).normal(0, 1, len(load))
    data = ListDataset([{"item_id": "load", "start": start, "target": load + noise}], freq="15min")
    for forecast in ForecasterPredictor(Forecaster.load(), prediction_length=24, seed=1).predict(data):
        print(f"{forecast.item_id} from {forecast.start_date}: medians {forecast.quantile(0.5)[::4].round(1)}")
