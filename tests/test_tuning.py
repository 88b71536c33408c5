"""`outpace tune`: what it measures is what the planner begins with; its search for sublayers to skip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
from commands import Run, last_line, run_command
from commands import run as run
from commands import tiny as tiny
from passes import of_layers
from test_library import folder

from outpace.api import profile as profiles
from outpace.api.llm import LLM
from outpace.bench import skip_search
from outpace.bench.skip_search import SearchOptions, SublayerTimes, find_sublayers, predict_speedup
from outpace.bench.tune import TuneOptions, tune
from outpace.core.errors import UserError
from outpace.drafters.layer_skip import Options, Sublayers
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


FLAT = SublayerTimes([1.0] * 9, 0.05, 0.1)  # further rows of a pass cost nothing
TEXTS = ["one two three", "four five six", "seven"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A target of eight layers; the MLP of the second and the attention of the fifth have no effect."""
    from outpace.models.llama.torch.runtime import Llama

    loaded = load_model(folder(tmp_path_factory.mktemp("search"), "target"), runtime="llama")
    config = replace(loaded.model.config, num_layers=8)
    weights = reference.random_tensors(config, 3)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.4.self_attn.o_proj.weight"):
        weights[name] = 0 * weights[name]
    return replace(loaded, model=Llama.from_tensors(config, weights.__getitem__))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def test_the_predicted_speedup_is_tokens_over_the_cost_of_their_rounds() -> None:
    half = Sublayers((1, 2), (1, 2, 3, 4))  # a step of the draft: 1 - 2 x .05 - 4 x .1
    assert FLAT.draft(half) == pytest.approx(0.5)
    speed, length = predict_speedup([[True] * 9], half, FLAT)
    assert (speed, length) == (pytest.approx(9 / (1 + 8 * 0.5)), 8)
    speed, length = predict_speedup([[False] * 9], half, FLAT)
    assert (speed, length) == (pytest.approx(1 / 1.5), 1)
    steep = FLAT._replace(rows=[1.0, *[5.0] * 8])  # a pass of two rows and more costs five times as much
    assert predict_speedup([[True] * 9], half, steep)[0] == pytest.approx(9 / 9.0)


def test_the_search_skips_sublayers_without_effect(target: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_search, "_time_sublayers", lambda *given: SublayerTimes([1.0] * 9, 0.3, 0.3))
    stages: list[str] = []
    options = SearchOptions(prompts=2, max_tokens=40, trials=40)
    found = find_sublayers(target, TEXTS, options, lambda stage, fraction: stages.append(stage))
    assert set(stages) == {"answers", "trials"}
    assert found.trials == 40
    assert found.tokens == 80
    assert 4 in found.sublayers.attention
    assert 1 in found.sublayers.mlp
    assert found.speed >= predict_speedup([[True] * 39] * 2, Sublayers((4,), (1,)), found.times)[0]
    again = find_sublayers(target, TEXTS, options, silent)
    assert (again.sublayers, again.speed) == (found.sublayers, found.speed), "one seed, one set"


def test_the_command_prints_the_options_that_it_found(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = skip_search.SearchResult(Sublayers((1, 2, 5), (3,)), 0.8, 2, 0.4, 7, 90, FLAT)
    searched: list[Any] = []
    monkeypatch.setattr(skip_search, "find_sublayers", lambda *given: searched.append(given) or found)
    model = ("--target", folder(tmp_path, "target"), "--runtime", "llama")
    words = ("tune", *model, "--drafter", "layer_skip", "--corpus", corpus)
    code, out, err = run_command(*words, "--trials", "7", "--max-tokens", "30")
    assert code == 0
    flags = "--method speculative --drafter layer_skip --skip-attention 1-2,5 --skip-mlp 3 --draft-length 2"
    assert " ".join(out.split()) == flags
    assert "0.80 times as fast as plain decoding: plain decoding is faster here" in " ".join(err.split())
    assert searched[0][1:3] == (TEXTS, SearchOptions(max_tokens=30, trials=7))
    record = last_line(run_command(*words, "--json")[1])
    assert (record["skip_attention"], record["skip_mlp"], record["speed"]) == ([1, 2, 5], [3], 0.8)
    Options(skip_attention="1-2,5", skip_mlp="3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs calibration texts, name one with --corpus"),
        (("--corpus", "{here}/corpus.jsonl", "--to", "{here}/file"), "--drafter layer_skip has no file"),
        (("--corpus", "{here}/empty.txt"), "is empty, a corpus needs text"),
    ],
)
def test_wrong_arguments_are_refused(corpus: Path, words: tuple[str, ...], message: str) -> None:
    corpus.with_name("empty.txt").write_text(" \n")
    given = [word.format(here=corpus.parent) for word in words]
    code, _, err = run_command("tune", "--drafter", "layer_skip", *given)
    assert (code, message in err) == (2, True), err


def test_a_target_without_sublayers_to_skip_is_refused(target: Loaded) -> None:
    small = replace(target, model=of_layers(target.model, [0, 1]))
    with pytest.raises(UserError, match="the target has 2 layers"):
        find_sublayers(small, TEXTS, SearchOptions(), silent)


@pytest.mark.parametrize("values", [{"prompts": 0}, {"max_tokens": 7}, {"trials": 0}])
def test_a_wrong_option_of_the_search_is_named(values: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(values))} is "):
        SearchOptions(**values)
