"""Series as tables: read from CSV files and data frames, checked row by row, and written back with their quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from outpace.core.errors import UserError, require

with suppress(ImportError):  # an extra; the functions here receive its objects, or check for it
    import pandas as pd

FIRST_LINE = 2  # of a CSV file's values; the first line has the column names


@dataclass(frozen=True)
class TimeSeries:
    """Values at equal time steps."""

    name: str
    times: pd.DatetimeIndex
    values: np.ndarray
    frequency: str

    def next_times(self, count: int) -> pd.DatetimeIndex:
        """Return the times that follow."""
        try:
            return pd.date_range(self.times[-1], periods=count + 1, freq=self.frequency)[1:]
        except pd.errors.OutOfBoundsDatetime:
            raise UserError(
                f"the forecast ends after {pd.Timestamp.max:%Y-%m-%d}, the last day that pandas knows"
            ) from None

    def before(self, count: int) -> TimeSeries:
        """Return the series without its last `count` values."""
        return TimeSeries(self.name, self.times[:-count], self.values[:-count], self.frequency)


def read_csv(file: Path, time: str, value: str, series: str | None, frequencies: Sequence[str]) -> list[TimeSeries]:
    """Read the series of a CSV file; errors name its lines."""
    require("reading a table", "timeseries", "pandas")
    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, UnicodeError) as error:  # pandas' errors of parsing are ValueErrors
        raise UserError(f"{file} is not a table of comma-separated values: {str(error).strip()}") from None
    if not isinstance(table.index, pd.RangeIndex):
        raise UserError(f"{file}: line {FIRST_LINE} has more fields than the first line, which names the columns")
    is_empty = (table == "").all(axis=1).to_numpy()
    kept = len(table) - (int(is_empty[::-1].argmin()) if not is_empty.all() else len(table))
    return split_series(table[:kept], time, value, series, frequencies, FIRST_LINE, "line")


def split_series(
    table: pd.DataFrame,
    time: str,
    value: str,
    series: str | None,
    frequencies: Sequence[str],
    first: int = 0,
    row: str = "row",
) -> list[TimeSeries]:
    """Return the series of a table, named by the column `series` (None: there is only one series).

    Raise UserError with the number of the row if values or times do not form series at equal time steps. `frequencies`
    are those allowed; empty: any.
    """
    for column in (time, value, *([series] if series is not None else [])):
        if column not in table.columns:
            raise UserError(f"there is no column {column!r}, the columns are {', '.join(map(repr, table.columns))}")
    if table.empty:
        raise UserError(f"the column {value!r} has no values")
    table = table.set_axis(range(first, first + len(table)))
    numbers = pd.to_numeric(table[value], errors="coerce").astype(np.float64)
    _refuse(~np.isfinite(numbers), table[value], row, "a finite number; missing values are not filled in")
    times = _parse_times(table[time])
    allowed = "a time such as 2024-05-01 13:15, with an offset from UTC in all rows or in none"
    _refuse(times.isna(), table[time], row, allowed)
    names = table[series].astype(str) if series is not None else pd.Series("", index=table.index)
    found = []
    for name, own in times.groupby(names, sort=False):
        label = f"series {name!r}, " if series is not None else ""
        hint = "" if series is not None else "; does --series name a column?"
        frequency = _frequency(own, f"{label}{row}", hint)
        offset = pd.tseries.frequencies.to_offset
        if frequencies and offset(frequency) not in map(offset, frequencies):
            known = ", ".join(frequencies)
            raise UserError(f"{label}frequency is {frequency}, the model was trained with {known}; resample the series")
        found.append(TimeSeries(str(name), pd.DatetimeIndex(own), numbers[own.index].to_numpy(), frequency))
    return found


def to_frame(
    series: Sequence[TimeSeries],
    quantiles: Tensor,
    means: Tensor,
    levels: Sequence[float],
    id_column: str | None,
    timestamp_column: str,
) -> pd.DataFrame:
    """Return means and quantiles [series, length, levels] as a table."""
    if taken := {id_column, timestamp_column} & {"predictions", *map(str, levels)}:
        raise UserError(f"the column {taken.pop()!r} has the name of a column of the forecast; rename it")
    parts = []
    for one, own, mean in zip(series, quantiles.numpy(), means.numpy(), strict=True):
        columns = {} if id_column is None else {id_column: one.name}
        columns |= {timestamp_column: one.next_times(len(mean)), "predictions": mean}
        parts.append(pd.DataFrame(columns | {str(level): own[:, at] for at, level in enumerate(levels)}))
    return pd.concat(parts, ignore_index=True)


def _refuse(is_bad: pd.Series, values: pd.Series, row: str, allowed: str) -> None:
    if is_bad.any():
        at = is_bad.idxmax()
        raise UserError(f"{row} {at}: {values.name} is {values[at]!r}, it must be {allowed}")


def _parse_times(given: pd.Series) -> pd.Series:
    """Return times; NaT for texts that are not times of ISO 8601 (01/02/2024 is ambiguous), and for times with an
    offset from UTC if the first has none, or without if it has one. Times with offsets are converted to UTC."""
    if pd.api.types.is_datetime64_any_dtype(given):
        return given
    texts = given.astype(str).str.strip()
    is_aware = texts.str[10:].str.contains("[zZ+-]")
    found = pd.to_datetime(texts.where(texts.str.match(r"\d{4}-?\d\d")), format="ISO8601", errors="coerce", utc=True)
    if not is_aware.any():
        return found.dt.tz_localize(None)
    return found.where(is_aware == is_aware.iloc[0])


def _frequency(times: pd.Series, where: str, hint: str) -> str:
    """Return the frequency; raise UserError for duplicates, unsorted times, gaps and fewer than three values."""
    if len(times) < 3:
        raise UserError(f"{where} {times.index[0]}: the series has {len(times)} values, its frequency needs 3")
    frequency, steps = pd.infer_freq(pd.DatetimeIndex(times)), times.diff()
    usual, is_back = steps.mode().iloc[0], steps <= pd.Timedelta(0)
    if frequency is None or is_back.any():
        at = (is_back if is_back.any() else steps.notna() & (steps != usual)).idxmax()
        step = f"{times[at]} follows {times.shift()[at]} after {steps[at]}, most steps are {usual}"
        raise UserError(f"{where} {at}: {step}; times must be sorted and unique, gaps are not filled in{hint}")
    return str(frequency)
