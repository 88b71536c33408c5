"""Plot forecasts: history, true values if known, quantile bands, and sample paths with accepted drafts in colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from outpace.api.plot import figure_for
from outpace.studies.timeseries.forecaster import SampledForecast
from outpace.studies.timeseries.frames import TimeSeries

MAX_PANELS = 6
_SHOWN_HISTORY = 3  # in lengths of the forecast
_SHOWN_PATHS = 3
_BANDS = ((0.1, 0.9, 0.25), (0.3, 0.7, 0.45))  # quantiles and opacity
_DRAFTED, _TARGETS = "tab:green", "tab:orange"


def draw(
    file: Path,
    series: Sequence[TimeSeries],
    forecast: SampledForecast,
    patch_length: int,
    truths: Sequence[np.ndarray] = (),
) -> None:
    """Write a plot of the first six series; `truths` are the true values, if they are known."""
    num_panels = min(len(series), MAX_PANELS)
    with figure_for(file, 10, 0.8 + 2.9 * num_panels) as figure:
        panels = figure.subplots(num_panels, 1, squeeze=False)[:, 0]
        for number, axes in enumerate(panels):
            truth = truths[number] if truths else None
            _draw_one(axes, series[number], forecast, number, patch_length, truth)
        pairs = (pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True))
        shown = {label: handle for handle, label in pairs}
        figure.legend([*shown.values()], [*shown], loc="outside upper center", ncols=len(shown))


def _draw_one(
    axes: Axes, one: TimeSeries, forecast: SampledForecast, number: int, patch_length: int, truth: np.ndarray | None
) -> None:
    length = forecast.samples.shape[2]
    times = one.next_times(length)
    history = min(len(one.values), max(_SHOWN_HISTORY * length, 2 * patch_length))
    axes.plot(one.times[-history:], one.values[-history:], color="0.3", linewidth=1, label="history")
    for low, high, opacity in _BANDS:
        bounds = forecast.quantiles([low, high])[number].numpy()
        label = f"{low:g} to {high:g}"
        axes.fill_between(times, bounds[:, 0], bounds[:, 1], color="tab:blue", alpha=opacity, linewidth=0, label=label)
    axes.plot(times, forecast.quantiles([0.5])[number, :, 0], color="tab:blue", linewidth=1.5, label="median")
    labels = {True: "path, accepted draft", False: "path, target's patch"}
    for path in range(min(_SHOWN_PATHS, forecast.samples.shape[1])):
        values, drafted = forecast.samples[number, path].numpy(), forecast.is_drafted[number, path].numpy()
        for start in range(0, length, patch_length):
            part = slice(max(0, start - 1), start + patch_length)  # joined to the patch before it
            is_drafted = bool(drafted[start])
            colour = _DRAFTED if is_drafted else _TARGETS
            axes.plot(times[part], values[part], color=colour, linewidth=0.9, label=labels.pop(is_drafted, None))
    if truth is not None:
        axes.plot(times, truth, color="black", linewidth=1.5, linestyle="--", label="truth")
    axes.set_title(one.name, parse_math=False)
