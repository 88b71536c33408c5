"""`outpace tune`: what it measures is what the planner begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from test_library import folder

from outpace.api import profile as profiles
from outpace.api.llm import LLM
from outpace.bench.tune import TuneOptions, tune
from outpace.core.errors import UserError
from outpace.models.load import Loaded, load_draft, load_model, silent

FEW = TuneOptions(prompts=("one two three", "four five"), max_tokens=16, rounds=2, rows=(1, 4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Loaded]:
    target = load_model(folder(tmp_path_factory.mktemp("tuning"), "target"), runtime="llama")
    return target, load_draft("layers:0", target)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which profiles are kept after one round."""
    monkeypatch.setattr(profiles, "entry_path", lambda name, cache: tmp_path / name)
    monkeypatch.setattr(profiles, "FEWEST", 1)
    return tmp_path


def test_a_planner_starts_from_what_was_tuned(pair: tuple[Loaded, Loaded], kept: Path) -> None:
    said: list[str] = []
    found = tune(*pair, FEW, lambda stage, fraction: said.append(stage))
    assert {"rounds", "ways"} == set(said)
    assert set(found.rates) == {"auto", "planned", "autoregressive"}
    assert all(rate > 0 for rate in found.rates.values())
    assert {1, 4} <= set(found.rounds)
    assert found.path is not None
    assert found.path.is_file()
    with LLM(*pair) as llm:
        assert llm.method == found.chosen
        assert llm.engine.costs.plain_seconds(1) == pytest.approx(found.rounds[1])
        assert llm.engine.costs.num_rounds == 0, "it need not time rounds of its own"
    with LLM(*pair, profile=False) as llm:
        assert llm.engine.costs.num_rounds > 0


PLAIN_IS_FASTEST = {"auto": 50.0, "planned": 25.0, "autoregressive": 60.0}
PARALLEL_IS_AHEAD = {"auto": 50.0, "planned": 51.0, "autoregressive": 40.0}
PARALLEL_IS_BETTER = {"auto": 50.0, "planned": 52.0, "autoregressive": 40.0}


@pytest.mark.parametrize(
    ("rates", "chosen"), [(PLAIN_IS_FASTEST, "auto"), (PARALLEL_IS_AHEAD, "auto"), (PARALLEL_IS_BETTER, "planned")]
)
def test_parallel_drafting_is_chosen_if_it_is_clearly_faster(
    pair: tuple[Loaded, Loaded], kept: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], chosen: str
) -> None:
    def race(llms: dict[str, LLM], *given: object) -> dict[str, float]:
        llms["auto"].generate(["one two three"], max_tokens=8)  # a profile is kept only of an engine that wrote
        return rates

    monkeypatch.setattr("outpace.bench.tune._race", race)
    found = tune(*pair, FEW, silent)
    assert (found.chosen, found.rates) == (chosen, rates)
    with LLM(*pair) as llm:
        assert llm.method == chosen


def test_an_engine_that_wrote_enough_is_remembered(
    pair: tuple[Loaded, Loaded], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fewest, is_kept in ((10**6, False), (1, True)):
        monkeypatch.setattr(profiles, "FEWEST", fewest)
        with LLM(*pair) as llm:
            llm.generate(["one two three"], max_tokens=24)
        assert any(kept.rglob("*.json")) is is_kept
    with LLM(*pair) as llm:
        assert llm.engine.costs.pass_seconds(1) > 0
        assert llm.method == "auto"


@pytest.mark.parametrize(
    ("values", "says"),
    [({"prompts": ()}, "no prompt to tune by"), ({"rounds": 0}, "rounds is 0"), ({"rows": (0,)}, "rows is 0")],
)
def test_a_wrong_option_is_named(values: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        TuneOptions(**values)


def test_the_command_prints_one_line_of_json(kept: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.tune._race", lambda *given: PARALLEL_IS_BETTER)
    words = ["--draft", "layers:0", "--runtime", "llama", "--max-tokens", "8", "--rounds", "1", "--json"]
    record = json.loads(run("tune", "--target", folder(kept, "target"), *words)[1])
    assert (record["chosen"], record["rates"]) == ("planned", PARALLEL_IS_BETTER)
