"""`outpace forecast`: sample paths and quantiles of time series in a CSV file, by speculation."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from outpace.cli import display
from outpace.cli.flags import check_plot, flag, flags
from outpace.cli.options import JSON, use_threads
from outpace.core.errors import UserError, require

if TYPE_CHECKING:
    from outpace.studies.timeseries.forecaster import Forecaster, SampledForecast


@dataclass(frozen=True)
class TableFlags:
    """The columns of the CSV file."""

    panel: ClassVar[str] = "Columns"
    time: str = flag("time", "The column of times.")
    value: str = flag("value", "The column of values.")
    series: str | None = flag(None, "The column that names the series, if the file has several.")


@dataclass(frozen=True)
class ForecasterFlags:
    """The models, and how they draft and verify."""

    panel: ClassVar[str] = "Models"
    target: str | None = flag(None, "The target's folder, by bench/forecast_train.py. The default is the shipped pair.")
    draft: str | None = flag(None, "The draft model's folder.")
    rule: str = flag("exact", "exact, or stride (the published rule, lossy).")
    draft_length: int | None = flag(
        None,
        "Patches drafted in a round, 0 to 8; 0: the target alone. The default is the draft model's own number, or with"
        " --rule stride one that adapts to the acceptance rate.",
    )
    bias: float | None = flag(None, "With --rule stride: factor by which the ratio p / q is multiplied, at least 1.")
    tolerance: float | None = flag(
        None, "With --rule stride: mean squared distance from the target's mean up to which a draft is accepted."
    )
    threads: int = flag(1, "Number of CPU threads; small models gain nothing from more than one.")


@flags
def forecast(
    file: Annotated[Path, typer.Argument(help="A CSV file with times and values.")],
    columns: TableFlags,
    models: ForecasterFlags,
    horizon: int = flag(96, "Number of values to forecast."),
    samples: int = flag(100, "Number of sample paths."),
    seed: int | None = flag(None, "Seed of the sampling: the same seed gives the same paths."),
    backtest: bool = flag(False, "Forecast the last --horizon values of each series from those before them."),
    plot: Path | None = flag(None, "Write a plot to this file."),
    as_json: bool = JSON,
) -> None:
    """Forecast time series: quantiles 0.1 to 0.9 of sample paths, as CSV."""
    require("outpace forecast", "timeseries", "torch", "transformers", "pandas")
    check_plot("--plot", plot)
    _check_columns(file, [name for name in (columns.time, columns.value, columns.series) if name is not None])
    use_threads(models.threads)
    from outpace.studies.timeseries.forecaster import QUANTILES, Forecaster
    from outpace.studies.timeseries.frames import read_csv, to_frame

    dials = {"bias": models.bias, "tolerance": models.tolerance}
    forecaster = Forecaster.load(
        models.target,
        models.draft,
        rule=models.rule,
        draft_length=models.draft_length,
        **{name: dial for name, dial in dials.items() if dial is not None},
    )
    series = read_csv(file, columns.time, columns.value, columns.series, forecaster.target.frequencies)
    truths = [one.values[-horizon:] for one in series] if backtest and horizon > 0 else []
    series = [one.before(horizon) for one in series] if truths else series
    found = forecaster.sample([one.values for one in series], horizon, samples, seed=seed)
    quantiles, means = found.quantiles(QUANTILES), found.samples.double().mean(1)
    if as_json:
        stats = found.stats
        rows = [
            {
                "name": one.name,
                "frequency": one.frequency,
                "times": [time.isoformat() for time in one.next_times(horizon)],
                "mean": mean.tolist(),
                "quantiles": {str(level): own[:, at].tolist() for at, level in enumerate(QUANTILES)},
            }
            for one, own, mean in zip(series, quantiles, means, strict=True)
        ]
        summary = {
            "lossless": forecaster.rule.lossless,
            "samples": samples,
            "seed": seed,
            "draft_lengths": stats.draft_lengths,
            "patches_per_forward": stats.patches_per_forward,
            "acceptance": stats.acceptance,
            "seconds": stats.seconds,
        }
        display.print_json({**summary, "series": rows})
    else:
        table = to_frame(series, quantiles, means, QUANTILES, columns.series, columns.time)
        table[columns.time] = table[columns.time].map(str)  # else pandas may leave out the time of day
        table.to_csv(sys.stdout, index=False, float_format="%.10g")
        sys.stdout.flush()
        display.say(_sentence(forecaster, found))
    if plot is not None:
        from outpace.studies.timeseries.plot import MAX_PANELS, draw

        draw(plot, series, found, forecaster.target.patch_length, truths)
        part = f", with the first {MAX_PANELS} of {len(series)} series" if len(series) > MAX_PANELS else ""
        display.say(f"plot: {plot}{part}")


def _check_columns(file: Path, names: list[str]) -> None:
    """Raise UserError unless the file's first line has these columns; the models need seconds to load."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            columns = next(csv.reader(lines), [])
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"{file} is not a table of comma-separated values: {error}") from None
    for name in names:
        if columns and name not in columns:  # pandas names what is wrong with an empty first line
            raise UserError(f"there is no column {name!r}, the columns are {', '.join(map(repr, columns))}")


def _sentence(forecaster: Forecaster, found: SampledForecast) -> str:
    """Describe the time and the rounds in one sentence."""
    stats = found.stats
    lengths = sorted(set(stats.draft_lengths))
    drafting = f"{lengths[0]} to {lengths[-1]} patches drafted a round" if any(lengths) else "nothing drafted"
    kept = sum(stats.accepted) / max(1, sum(stats.drafted))
    share = f", {kept:.0%} of them accepted" if any(lengths) else ""
    lossy = "" if forecaster.rule.lossless else "; the rule is lossy: these are not the target's forecasts"
    paths = f"{found.samples.shape[1]} paths in {stats.seconds:.2f} s"
    return f"{paths}, {stats.patches_per_forward:.2f} patches a target pass, {drafting}{share}{lossy}"
