"""Measure `outpace forecast`: accuracy on held-out series by GluonTS' metrics, and time with larger targets.

    python bench/forecast.py accuracy [--windows 4] [--samples 100]
    python bench/forecast.py times [--repeats 2]

Larger targets are the shipped one with a second network of the stated size, whose output is not used: so acceptance is
the shipped pair's, and a pass costs what a target of that size costs. The last line is JSON.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import finish, parse, run
from forecast_train import build, split
from gluonts.dataset.common import ListDataset
from gluonts.dataset.split import TestData
from gluonts.dataset.split import split as split_dataset
from gluonts.dataset.util import forecast_start
from gluonts.ev.metrics import MASE, MeanWeightedSumQuantileLoss
from gluonts.model import evaluate_forecasts
from gluonts.model.forecast import SampleForecast
from gluonts.model.seasonal_naive import SeasonalNaivePredictor
from torch import Tensor
from torch.distributions import Distribution

from outpace.studies.timeseries.forecaster import QUANTILES, SHIPPED, Forecaster
from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.transformer import TransformerForecaster

HORIZON, DAY = 96, 96  # quarter hours
DRAFTED = 3  # patches a round
LARGER = {  # by millions of weights
    38: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8},
    100: {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12},
}
PATHS = (1, 20)
SERIES = 3  # forecast by each setting; the fastest of the repeats counts, as other programs only slow a run down


class LoadedTarget(PatchModel):
    """A target whose passes also run another network and ignore what it says."""

    def __init__(self, inner: TransformerForecaster, load: TransformerForecaster) -> None:
        self._parts = (load, inner)
        self.patch_length, self.max_patches = inner.patch_length, inner.max_patches

    def open(self, history: Tensor) -> list[Any]:
        """Read the histories with both."""
        return [part.open(history) for part in self._parts]

    def propose(self, state: list[Any], patches: Tensor) -> Distribution:
        """Run both; return the inner one's distributions."""
        return [part.propose(own, patches) for part, own in zip(self._parts, state, strict=True)][-1]

    def drop(self, state: list[Any], counts: Tensor) -> None:
        """Drop in both."""
        for part, own in zip(self._parts, state, strict=True):
            part.drop(own, counts)

    def select(self, state: list[Any], rows: Tensor) -> None:
        """Select in both."""
        for part, own in zip(self._parts, state, strict=True):
            part.select(own, rows)


def shipped() -> tuple[TransformerForecaster, TransformerForecaster]:
    """Return the shipped target and draft."""
    return TransformerForecaster.load(SHIPPED / "target"), TransformerForecaster.load(SHIPPED / "draft")


def held_out(windows: int) -> TestData:
    """Return windows of the held-out series' last fifth, at equal distances."""
    series = split()[1]
    length = len(next(iter(series.values())))
    start = pd.Period("2016-10-19 18:45", freq="15min")
    dataset = ListDataset(
        [{"item_id": name, "target": values, "start": start} for name, values in series.items()], freq="15min"
    )
    context = 1024
    _, template = split_dataset(dataset, offset=context)
    distance = (length - context - HORIZON) // max(1, windows - 1)
    return template.generate_instances(HORIZON, windows=windows, distance=distance)


def scores(forecasts: list[Any], data: TestData, axis: int | None) -> pd.DataFrame:
    """Return GluonTS' weighted quantile loss and MASE, over all (axis None) or by forecast (axis 1)."""
    metrics = [MeanWeightedSumQuantileLoss(quantile_levels=list(QUANTILES)), MASE()]
    return evaluate_forecasts(forecasts, test_data=data, metrics=metrics, axis=axis, seasonality=DAY)


def accuracy(windows: int, samples: int) -> dict[str, Any]:
    """Print and return the table of held-out series."""
    data = held_out(windows)
    target, draft = shipped()
    forecasters = {
        "target": (Forecaster(target), 1),
        "target, another seed": (Forecaster(target), 2),
        f"speculation, {DRAFTED} drafted": (Forecaster(target, draft, draft_length=DRAFTED), 3),
        "draft": (Forecaster(draft), 4),
    }
    found: dict[str, list[Any]] = {}
    stats = None
    for name, (forecaster, seed) in forecasters.items():
        entries = list(data.input)
        drawn = forecaster.sample([one["target"] for one in entries], HORIZON, samples, seed=seed)
        pairs = zip(entries, drawn.samples.numpy(), strict=True)
        found[name] = [SampleForecast(paths, forecast_start(one), item_id=one["item_id"]) for one, paths in pairs]
        if forecaster.draft is not None:
            stats = drawn.stats
    for name, season in (("a day", DAY), ("a week", 7 * DAY)):
        found[f"seasonal naive, {name}"] = list(SeasonalNaivePredictor(HORIZON, season).predict(data.input))
    single = {name: scores(forecasts, data, 1) for name, forecasts in found.items()}
    rows: dict[str, Any] = {}
    print(f"{'':28} {'WQL':>8} {'MASE':>8} {'MASE less the target, and its standard error':>46}")
    for name, forecasts in found.items():
        wql, mase = scores(forecasts, data, None).iloc[0].tolist()
        gaps = (single[name]["MASE[0.5]"] - single["target"]["MASE[0.5]"]).to_numpy()
        gap, error = float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))
        rows[name] = {"wql": wql, "mase": mase, "gap": gap, "error": error}
        print(f"{name:28} {wql:8.4f} {mase:8.4f} {gap:+36.4f} {error:9.4f}")
    assert stats is not None
    by_position = ", ".join(f"{rate:.2f}" for rate in stats.acceptance)
    print(f"acceptance by position {by_position}; {stats.patches_per_forward:.2f} patches a target pass")
    return {"rows": rows, "acceptance": stats.acceptance, "patches_per_forward": stats.patches_per_forward}


def times(repeats: int) -> list[dict[str, Any]]:
    """Print and return times with larger targets, the target alone and the best draft length."""
    history = [values[:1024] for values in list(split()[1].values())[:SERIES]]
    target, draft = shipped()
    rows = []
    for size in (3, *LARGER):
        used: PatchModel = target if size == 3 else LoadedTarget(target, TransformerForecaster(build(LARGER[size])))
        for paths in PATHS:
            fastest = {length: [float("inf")] * SERIES for length in (0, 1, 2, 3, 4)}  # by series
            patches: dict[int, list[float]] = {length: [] for length in fastest}
            for number in range(SERIES * repeats):
                at = number % SERIES
                for length, own in fastest.items():
                    forecaster = Forecaster(used, draft, draft_length=length)
                    begin = time.perf_counter()
                    found = forecaster.sample(history[at], HORIZON, paths, seed=at)  # the same paths at each repeat
                    own[at] = min(own[at], time.perf_counter() - begin)
                    patches[length].append(found.stats.patches_per_forward)
            seconds = {length: sum(own) / SERIES for length, own in fastest.items()}
            best = min(seconds, key=lambda length: seconds[length])
            speedups = {length: seconds[0] / own for length, own in seconds.items()}
            row = {
                "million_weights": size,
                "paths": paths,
                "seconds_alone": seconds[0],
                "speedups": speedups,
                "best": best,
                "patches_per_forward": {length: float(np.mean(own)) for length, own in patches.items()},
            }
            rows.append(row)
            shown = ", ".join(f"{length}: {speed:.2f}" for length, speed in speedups.items())
            print(f"{size} M, {paths} paths: alone {row['seconds_alone']:.3f} s; by draft length {shown}", flush=True)
            print(f"    patches a pass at {best}: {row['patches_per_forward'][best]:.2f}", flush=True)
    return rows


def main() -> int:
    """Run one of the two measurements."""
    given = {"positional": {"what": str}, "choices": {"what": ("accuracy", "times")}}
    options = parse(__doc__, **given, windows=4, samples=100, repeats=2, threads=1)
    torch.set_num_threads(options.threads)
    if options.what == "accuracy":
        return finish(accuracy(options.windows, options.samples), False)
    return finish({"rows": times(options.repeats)}, False)


if __name__ == "__main__":
    run(main)
