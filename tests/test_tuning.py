"""`outpace tune`: what it measures is what the planner begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_library import folder
from typer.testing import CliRunner

from outpace.api.llm import LLM
from outpace.bench.tune import TuneOptions, tune
from outpace.cli.main import app
from outpace.core.errors import UserError
from outpace.engine import profile as profiles
from outpace.models.load import Loaded, load_draft, load_model

FEW = TuneOptions(prompts=("one two three", "four five"), max_tokens=16, rounds=2, rows=(1, 4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Loaded]:
    target = load_model(folder(tmp_path_factory.mktemp("tuning"), "target"), runtime="llama")
    return target, load_draft("layers:0", target)


def test_what_is_tuned_is_what_a_planner_begins_with(
    pair: tuple[Loaded, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(profiles, "FEWEST", 1)
    said: list[str] = []
    found = tune(*pair, FEW, lambda stage, fraction: said.append(stage))
    assert {"rounds", "ways"} == set(said)
    assert set(found.rates) == {"auto", "card", "autoregressive"}
    assert all(rate > 0 for rate in found.rates.values())
    assert {1, 4} <= set(found.rounds)
    assert found.path is not None
    assert found.path.is_file()
    with LLM(*pair) as llm:
        assert llm.method == found.chosen
        assert 0 < llm.engine.costs.target(1) <= found.rounds[1]
    with LLM(*pair, profile=False) as llm:
        assert llm.engine.costs.target(1) == 0.0


def test_an_engine_that_wrote_enough_is_remembered(
    pair: tuple[Loaded, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "cache_folder", lambda: tmp_path)
    for fewest, kept in ((10**6, False), (1, True)):
        monkeypatch.setattr(profiles, "FEWEST", fewest)
        with LLM(*pair) as llm:
            llm.generate(["one two three"], max_tokens=24)
        assert any(tmp_path.rglob("*.json")) is kept
    with LLM(*pair) as llm:
        assert llm.engine.costs.target(1) > 0
        assert llm.method == "auto"


@pytest.mark.parametrize(
    ("values", "says"),
    [({"prompts": ()}, "no prompt to tune by"), ({"rounds": 0}, "rounds is 0"), ({"rows": (0,)}, "rows is 0")],
)
def test_a_wrong_option_is_named(values: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        TuneOptions(**values)


def test_the_command_prints_one_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "cache_folder", lambda: tmp_path)
    path = folder(tmp_path, "target")
    asked = ["tune", "--target", str(path), "--draft", "layers:0", "--runtime", "llama", "--max-tokens", "8"]
    done = CliRunner().invoke(app, [*asked, "--rounds", "1", "--json"], catch_exceptions=False)
    record = json.loads(done.stdout)
    assert record["chosen"] in ("auto", "card")
    assert record["rates"]["autoregressive"] > 0
