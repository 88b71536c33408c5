"""Forecasts as users ask for them: the library, the command and what bad input gets."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from forecast_checks import ToyForecaster
from test_forecast_rules import network

from outpace.core.errors import UserError
from outpace.studies.timeseries.forecaster import Forecaster
from outpace.studies.timeseries.sampling import DraftLength
from outpace.studies.timeseries.transformer import TransformerForecaster

DAY = 96
pd = pytest.importorskip("pandas")


def load(count: int, level: float = 50.0) -> np.ndarray:
    """A daily cycle with noise, of quarter hours."""
    hours = np.arange(count) / 4
    return level + 10 * np.sin(2 * np.pi * hours / 24) + np.random.default_rng(1).normal(0, 1, count)


def table(count: int = 40, **more: Any) -> Any:
    times = pd.date_range("2024-03-01", periods=count, freq="15min")
    return pd.DataFrame({"time": times.strftime("%Y-%m-%d %H:%M"), "value": load(count), **more})


@pytest.fixture
def forecaster() -> Forecaster:
    return Forecaster(ToyForecaster(), ToyForecaster(scale=1.2), draft_length=2)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    for seed, name in enumerate(("target", "draft")):
        network(seed).save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--samples", "5"]


@pytest.fixture
def csv(tmp_path: Path) -> Callable[..., str]:
    def write(frame: Any) -> str:
        frame.to_csv(tmp_path / "data.csv", index=False)
        return str(tmp_path / "data.csv")

    return write


def test_shapes_are_those_of_chronos(forecaster: Forecaster) -> None:
    inputs = [load(40), torch.from_numpy(load(31)), list(load(40))]
    assert forecaster.predict(inputs, 7, 5).shape == (3, 5, 7)
    assert forecaster.predict(load(40), 7, 5).shape == (1, 5, 7)
    assert forecaster.predict(np.stack([load(40)] * 2), 7, 5).shape == (2, 5, 7)
    quantiles, mean = forecaster.predict_quantiles(inputs, 7, [0.1, 0.5, 0.9], 5)
    assert quantiles.shape == (3, 7, 3)
    assert mean.shape == (3, 7)
    assert (quantiles.diff(dim=-1) >= 0).all()


def test_a_forecast_is_in_the_units_of_its_series(forecaster: Forecaster) -> None:
    found = forecaster.predict([load(40), 1000 * load(40) + 7], 4, 400, seed=3)
    assert 30 < found[0].mean() < 70
    assert 30_000 < found[1].mean() < 70_000


def test_a_seed_repeats_the_paths_and_leaves_torch_alone(forecaster: Forecaster) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, again, other = (forecaster.predict(load(40), 9, 4, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_series_of_different_lengths_do_not_touch_one_another() -> None:
    """Each has its own group of rows; the mean of many paths is that of the series alone."""
    alone = Forecaster(ToyForecaster())
    both = alone.predict([load(40), 5 * load(24)], 4, 3000, seed=1)
    single = alone.predict(5 * load(24), 4, 3000, seed=2)
    scale = single[0].std(0)
    assert ((both[1].mean(0) - single[0].mean(0)).abs() < 5 * scale * (2 / 3000) ** 0.5).all()


def test_many_paths_are_drawn_in_several_batches(forecaster: Forecaster) -> None:
    found = forecaster.sample([load(40), load(32), np.full(40, 2.0)], 5, 300, seed=1)
    assert found.samples.shape == found.is_drafted.shape == (3, 300, 5)
    assert max(forecaster.target.max_rows) == 128
    assert len(found.samples[0].unique(dim=0)) == 300
    assert found.quantiles().shape == (3, 5, 9)


@pytest.mark.parametrize("unit", [1e-310, 1e301])
def test_values_whose_squares_are_not_numbers(forecaster: Forecaster, unit: float) -> None:
    plain, scaled = forecaster.predict([load(40), load(40) * unit], 4, 3, seed=1)
    assert (scaled / unit).std() == pytest.approx(plain.std().item(), rel=0.9)
    assert scaled.isfinite().all()


def test_small_changes_of_large_values_are_not_constant(forecaster: Forecaster) -> None:
    assert forecaster.predict(1e9 + 0.01 * load(40), 4, 3).std() > 0


def test_accepted_drafts_are_marked(forecaster: Forecaster) -> None:
    found = forecaster.sample(load(40), 7, 50, seed=1)
    assert 0 < found.is_drafted.float().mean() < 1
    assert torch.equal(found.is_drafted[..., 0], found.is_drafted[..., 1])  # of one patch of two values


def test_a_constant_series_is_continued_with_a_warning(forecaster: Forecaster) -> None:
    with pytest.warns(UserWarning, match="series 1 is constant over the 20 values"):
        found = forecaster.predict([load(20), np.full(20, 3.1)], 4, 3)
    assert (found[1] == 3.1).all()
    assert found[0].std() > 0


@pytest.mark.parametrize(
    ("inputs", "more", "says"),
    [
        ([load(40), [1.0, np.nan, 2.0, 3.0]], {}, "series 1 is nan at value 1"),
        ([1.0, 2.0, 3.0], {}, "series 0 has 3 values, a forecast needs at least 4"),
        (np.zeros((2, 2, 2)), {}, "series 0 has 2 dimensions"),
        (load(40), {"prediction_length": 0}, "prediction_length is 0"),
        (load(40), {"num_samples": 0}, "num_samples is 0"),
        (load(40), {"seed": -1}, "seed is -1"),
    ],
)
def test_bad_input_is_refused(forecaster: Forecaster, inputs: Any, more: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        forecaster.predict(inputs, **{"prediction_length": 4, **more})


def test_bad_options_are_refused() -> None:
    target = ToyForecaster()
    with pytest.raises(UserError, match="draft model has patches of 3 values, those of the target have 2"):
        Forecaster(target, ToyForecaster(patch_length=3))
    with pytest.raises(UserError, match="draft_length is 9"):
        Forecaster(target, target, draft_length=9)
    with pytest.raises(UserError, match="draft_length is 1, but there is no draft model"):
        Forecaster(target, draft_length=1)
    with pytest.raises(UserError, match="unknown rule 'exakt'"):
        Forecaster(target, rule="exakt")
    with pytest.raises(UserError, match="the rule exact takes no bias"):
        Forecaster(target, bias=2.0)
    with pytest.raises(UserError, match="quantile level is 2"):
        Forecaster(target).predict_quantiles(load(40), 4, [2.0])


def test_a_forecast_beyond_the_models_positions_is_refused() -> None:
    found = Forecaster(TransformerForecaster(network()))
    assert found.predict(load(400), 32 * 4, 1).shape == (1, 1, 128)
    with pytest.raises(UserError, match="prediction_length is 129, it must be at most 128"):
        found.predict(load(400), 129)


def test_the_draft_length_is_the_draft_models() -> None:
    target, draft = ToyForecaster(), ToyForecaster(scale=1.1)
    assert Forecaster(target, draft)._length() == DraftLength(draft.draft_length)
    assert Forecaster(target, draft, draft_length=1)._length() == DraftLength(1)
    assert Forecaster(target, draft, rule="stride")._length() == DraftLength(3, adapts=True)
    assert Forecaster(target)._length() == DraftLength(0)


def test_strides_length_follows_the_acceptance() -> None:
    for accepted, expected in ((3, 8), (0, 1)):
        lengths = DraftLength(3, adapts=True)
        for _ in range(10):
            lengths.learn(lengths.length, torch.full((2,), min(accepted, lengths.length) and lengths.length))
        assert lengths.length == expected


def test_the_frame_has_times_and_quantiles(forecaster: Forecaster) -> None:
    rows = [table(40, item_id="a"), table(50, item_id="b").assign(value=7 * load(50))]  # their labels are alike
    both = pd.concat(rows).rename(columns={"time": "timestamp", "value": "target"})
    found = forecaster.predict_df(both, 3, [0.1, 0.9], 5, seed=1)
    assert list(found.columns) == ["item_id", "timestamp", "predictions", "0.1", "0.9"]
    assert list(found.item_id) == ["a"] * 3 + ["b"] * 3
    assert found.predictions[:3].between(0, 120).all()
    alone = forecaster.predict_df(both[:40], 3, [0.1, 0.9], 5, seed=1)
    assert found.predictions[0] == pytest.approx(alone.predictions[0], rel=0.5)
    assert str(found.timestamp[0]) == "2024-03-01 10:00:00"
    assert str(found.timestamp[5]) == "2024-03-01 13:00:00"


def test_the_command_prints_a_table(pair: list[str], csv: Callable[..., str]) -> None:
    status, out, said = run_command("forecast", csv(table()), "--horizon", "6", *pair)
    assert status == 0, said
    lines = out.strip().splitlines()
    assert lines[0] == "time,predictions,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
    assert len(lines) == 7
    assert lines[1].startswith("2024-03-01 10:00:00,")
    assert "5 paths in" in said


def test_the_command_writes_json_and_a_picture(pair: list[str], csv: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    several = pd.concat([table(60, meter="north"), table(60, meter="$\\frac{a$")])
    picture = tmp_path / "out.png"
    options = [
        "--series",
        "meter",
        "--json",
        "--seed",
        "1",
        "--draft-length",
        "2",
        "--plot",
        str(picture),
        "--backtest",
    ]
    status, out, said = run_command("forecast", csv(several), "--horizon", "8", *options, *pair)
    assert status == 0, said
    found = json.loads(out)
    assert [one["name"] for one in found["series"]] == ["north", "$\\frac{a$"]
    assert found["series"][0]["times"][0] == "2024-03-01T13:00:00"
    assert len(found["series"][0]["quantiles"]["0.9"]) == len(found["series"][0]["mean"]) == 8
    assert found["lossless"] is True
    assert found["draft_lengths"][0] == 1
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("written", "read"),
    [("%Y-%m-%dT%H:%MZ", "2024-03-01 10:00:00+00:00"), ("%Y-%m-%dT%H:%M+01:00", "2024-03-01 09:00:00+00:00")],
)
def test_times_with_an_offset_become_utc(written: str, read: str, pair: list[str], csv: Callable[..., str]) -> None:
    times = pd.date_range("2024-03-01", periods=40, freq="15min").strftime(written)
    status, out, said = run_command("forecast", csv(table().assign(time=times)), "--horizon", "3", *pair)
    assert status == 0, said
    assert out.splitlines()[1].startswith(read + ",")
    assert "warning" not in said


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_windows_files_are_read(encoding: str, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "windows.csv"
    text = table(96).rename(columns={"value": "gr\u00f6\u00dfe"}).to_csv(index=False, lineterminator="\r\n")
    file.write_bytes(text.encode(encoding))
    status, out, said = run_command("forecast", str(file), "--value", "gr\u00f6\u00dfe", "--horizon", "1", *pair)
    assert status == 0, said
    assert out.splitlines()[1].startswith("2024-03-02 00:00:00,")


def changed(row: int, **values: Any) -> Any:
    found = table().astype(object)
    for name, value in values.items():
        found.loc[row, name] = value
    return found


BAD = {
    "a gap": (lambda: table().drop(index=20), "line 22: 2024-03-01 05:15:00 follows 2024-03-01 04:45:00 after"),
    "a duplicate": (
        lambda: table().loc[[*range(11), *range(10, 40)]],
        "line 13: 2024-03-01 02:30:00 follows 2024-03-01 02:30:00 after 0 days 00:00:00",
    ),
    "unsorted": (
        lambda: table().loc[[1, 0, *range(2, 40)]],
        "line 3: 2024-03-01 00:00:00 follows 2024-03-01 00:15:00 after -1 days",
    ),
    "an empty value": (lambda: changed(4, value=""), "line 6: value is '', it must be a finite number"),
    "NaN": (lambda: changed(4, value="nan"), "line 6: value is 'nan'"),
    "infinity": (lambda: changed(4, value="inf"), "line 6: value is 'inf'"),
    "a word": (lambda: changed(7, value="n/a"), "line 9: value is 'n/a'"),
    "no time": (lambda: changed(7, time="soon"), "line 9: time is 'soon', it must be a time"),
    "numbers as times": (lambda: table().assign(time=range(40)), "line 2: time is '0', it must be a time"),
    "day and month": (
        lambda: table().assign(time=pd.date_range("2024-03-01", periods=40, freq="15min").strftime("%d/%m/%Y %H:%M")),
        "line 2: time is '01/03/2024 00:00', it must be a time such as 2024-05-01 13:15",
    ),
    "today": (lambda: changed(7, time="today"), "line 9: time is 'today'"),
    "one offset": (lambda: changed(7, time="2024-03-01 01:45+00:00"), "line 9: time is '2024-03-01 01:45+00:00'"),
    "the end of time": (
        lambda: table().assign(time=pd.date_range("2262-04-11 13:30", periods=40, freq="15min").astype(str)),
        "the forecast ends after 2262-04-11",
    ),
    "too short": (lambda: table(7), "has 7 values, a forecast needs at least 8"),
    "two values": (lambda: table(2), "the series has 2 values"),
    "no values": (lambda: table(0), "the column 'value' has no values"),
    "minutes": (
        lambda: table().assign(time=pd.date_range("2024", periods=40, freq="5min").astype(str)),
        "frequency is 5min, the model was trained with 15min",
    ),
    "several series": (
        lambda: pd.concat([table(), table()]),
        "times must be sorted and unique, gaps are not filled in; does --series name a column?",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_the_command_refuses_bad_tables(case: str, pair: list[str], csv: Callable[..., str]) -> None:
    make, says = BAD[case]
    status, out, said = run_command("forecast", csv(make()), "--horizon", "6", *pair)
    assert (status, out) == (2, "")
    assert says in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--horizon", "0"], "prediction_length is 0"),
        (["--plot", "out.txt"], "--plot is out.txt"),
        (["--target", "nowhere"], "nowhere has no config.json"),
        (["--threads", "0"], "threads is 0"),
        (["--threads", "99999"], "threads is 99999"),
        (["--backtest", "--horizon", "38"], "has 2 values, a forecast needs at least 8"),
        (["--backtest", "--horizon", "40"], "has 0 values, a forecast needs at least 8"),
    ],
)
def test_the_command_refuses_bad_options(
    options: list[str], says: str, pair: list[str], csv: Callable[..., str]
) -> None:
    status, out, said = run_command("forecast", csv(table()), *pair, *options)
    assert (status, out) == (2, "")
    assert says in said


def test_files_that_are_no_table_are_refused(pair: list[str], tmp_path: Path) -> None:
    file, good = tmp_path / "data.csv", table().to_csv(index=False).encode()
    for content, says in (
        (b"", "No columns to parse"),
        (b"\xff\xfe" + good, "is not a table of comma-separated values: 'utf-8'"),
        (good + b'"2024-03-01 10', "EOF inside string"),
        (good.replace(b"\n", b",7\n").replace(b",7", b"", 1), "line 2 has more fields than the first line"),
        (good[:11], "the column 'value' has no values"),
    ):
        file.write_bytes(content)
        status, out, said = run_command("forecast", str(file), *pair)
        assert (status, out) == (2, "")
        assert says in said


def test_columns_named_like_those_of_the_forecast_are_refused(pair: list[str], csv: Callable[..., str]) -> None:
    file = csv(table().rename(columns={"time": "0.5"}))
    status, _, said = run_command("forecast", file, "--time", "0.5", "--horizon", "3", *pair)
    assert status == 2
    assert "the column '0.5' has the name of a column of the forecast" in said


def test_file_and_columns_are_read_before_the_models(csv: Callable[..., str], tmp_path: Path) -> None:
    for words, says in (
        ([str(tmp_path / "none.csv")], "none.csv cannot be read: No such file"),
        ([csv(table()), "--value", "load"], "no column 'load', the columns are 'time', 'value'"),
        ([csv(table()), "--series", "name"], "no column 'name'"),
    ):
        status, _, said = run_command("forecast", *words, "--target", "nowhere")
        assert status == 2
        assert says in said


def test_the_shipped_pair_forecasts_a_daily_cycle(csv: Callable[..., str]) -> None:
    """The median follows the cycle much better than the series' mean does."""
    whole = load(15 * DAY)
    frame = table(14 * DAY).assign(value=whole[: 14 * DAY])
    status, out, said = run_command("forecast", csv(frame), "--json", "--samples", "20", "--seed", "1")
    assert status == 0, said
    found = json.loads(out)
    assert set(found["draft_lengths"]) == {0}
    median = np.array(found["series"][0]["quantiles"]["0.5"])
    truth = whole[14 * DAY :]
    assert np.abs(median - truth).mean() < 0.4 * np.abs(truth - whole.mean()).mean()


def test_without_its_extra_the_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.core.errors.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"outpace\.studies\.timeseries needs the extra timeseries: `pip install"):
        importlib.reload(sys.modules["outpace.studies.timeseries"])
