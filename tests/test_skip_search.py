"""`outpace tune --drafter layer_skip`: what it predicts, what it finds, and what it needs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
from test_library import folder
from typer.testing import CliRunner

from outpace.bench import skip_search
from outpace.bench.skip_search import SearchOptions, SublayerTimes, predict_speedup, search
from outpace.cli.main import app
from outpace.core.errors import UserError, install_command
from outpace.drafters.layer_skip import Options, Sublayers
from outpace.models.load import Loaded, load_model, silent

FLAT = SublayerTimes([1.0] * 9, 0.05, 0.1)  # the rows of a pass cost nothing more


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Eight layers; the MLP of the second and the attention of the fifth do nothing."""
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
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one two three", "four five six", "seven")))
    return path


@pytest.mark.parametrize(
    ("agreed", "length", "rounds"),
    [
        ([True] * 8, 3, 2),  # 3 and the target's own, twice
        ([False] * 5, 4, 5),
        ([True, False, True, True, True, False], 2, 3),  # 1 + 1, 2 + 1, then what is left
        ([], 3, 0),
        ([True], 1, 1),
    ],
)
def test_rounds_are_those_of_drafts_of_a_length(agreed: list[bool], length: int, rounds: int) -> None:
    assert skip_search._rounds(agreed, length) == rounds


def test_what_is_predicted_is_tokens_over_the_price_of_their_rounds() -> None:
    half = Sublayers((1, 2), (1, 2, 3, 4))  # a step of the draft: 1 - 2 x .05 - 4 x .1
    assert FLAT.draft(half) == pytest.approx(0.5)
    speed, length = predict_speedup([[True] * 9], half, FLAT)
    assert (speed, length) == (pytest.approx(9 / (1 + 8 * 0.5)), 8)
    speed, length = predict_speedup([[False] * 9], half, FLAT)
    assert (speed, length) == (pytest.approx(1 / 1.5), 1)
    dear = FLAT._replace(rows=[1.0, *[5.0] * 8])  # a pass of two rows and more costs five times as much
    assert predict_speedup([[True] * 9], half, dear)[0] == pytest.approx(9 / 9.0)


def test_the_search_leaves_out_what_does_nothing(target: Loaded, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(skip_search, "_time_sublayers", lambda *given: SublayerTimes([1.0] * 9, 0.3, 0.3))
    told: list[str] = []
    options = SearchOptions(prompts=2, max_tokens=40, trials=40)
    found = search(target, [corpus], options, lambda stage, fraction: told.append(stage))
    assert set(told) == {"answers", "trials"}
    assert found.trials == 40
    assert found.tokens == 80
    assert 4 in found.sublayers.attention
    assert 1 in found.sublayers.mlp
    assert found.speed >= predict_speedup([[True] * 39] * 2, Sublayers((4,), (1,)), found.times)[0]
    again = search(target, [corpus], options, silent)
    assert (again.sublayers, again.speed) == (found.sublayers, found.speed), "one seed, one set"


def test_an_agreement_is_that_of_drafting_behind_the_targets_text(target: Loaded) -> None:
    """Answers longer than a window are cut into several, and no token of them but the first is left out."""
    answers = skip_search._answers(target, [[1, 2, 3], [4, 5]], SearchOptions(max_tokens=70), silent)
    for answer in answers:
        agreed = skip_search._agreed(target.model, answer)
        assert agreed == [True] * (len(answer.text) - len(answer.request.prompt) - 1)
        less = skip_search._agreed(target.model.skip_sublayers((1, 2), (2, 3)), answer)
        assert len(less) == len(agreed)
        assert not all(less)


def test_passes_are_timed_by_rows_and_by_what_is_left_out(target: Loaded) -> None:
    answer = skip_search._answers(target, [[1, 2, 3]], SearchOptions(max_tokens=9), silent)[0]
    before = answer.session.read(answer.session.length)
    times = skip_search._time_sublayers(target.model, answer.session)
    assert len(times.rows) == skip_search.MAX_DRAFT_LENGTH + 1
    assert all(seconds > 0 for seconds in times.rows)
    assert (answer.session.read(answer.session.length) == before).all()
    assert answer.session.pending == 0


def run(*asked: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["tune", *asked])
    said = str(done.exception) if isinstance(done.exception, UserError) else done.stderr
    return done.exit_code, done.stdout, said


def test_the_command_prints_the_options_that_it_found(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = skip_search.SearchResult(Sublayers((1, 2, 5), (3,)), 0.8, 2, 0.4, 7, 90, FLAT, SearchOptions())
    asked: list[Any] = []
    monkeypatch.setattr(skip_search, "search", lambda *given: asked.append(given) or found)
    path = folder(tmp_path, "target")
    common = ("--target", str(path), "--runtime", "llama", "--drafter", "layer_skip", "--corpus", str(corpus))
    code, out, said = run(*common, "--trials", "7", "--max-tokens", "30")
    assert code == 0
    flags = "--method speculative --drafter layer_skip --skip-attention 1-2,5 --skip-mlp 3 --draft-length 2"
    assert " ".join(out.split()) == flags
    assert "0.80 times as fast as plain decoding: plain decoding is faster here" in " ".join(said.split())
    assert asked[0][1:3] == ([corpus], SearchOptions(max_tokens=30, trials=7))
    code, out, _ = run(*common, "--json")
    record = json.loads(out)
    assert (record["skip_attention"], record["skip_mlp"], record["speed"]) == ([1, 2, 5], [3], 0.8)
    Options(skip_attention="1-2,5", skip_mlp="3")


def test_a_search_without_what_it_needs_is_refused(
    target: Loaded, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "needs calibration texts, name one with --corpus" in run("--drafter", "layer_skip")[2]
    asked = ("--drafter", "layer_skip", "--corpus", str(corpus), "--to", str(tmp_path / "file"))
    assert "--drafter layer_skip has no file" in run(*asked)[2]
    with pytest.raises(UserError, match="needs calibration texts"):
        search(target, [], SearchOptions(), silent)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="is empty, a corpus needs text"):
        search(target, [tmp_path / "empty.txt"], SearchOptions(), silent)
    small = replace(target, model=target.model.select_layers([0, 1]))
    with pytest.raises(UserError, match="the target has 2 layers"):
        search(small, [corpus], SearchOptions(), silent)
    inflated = replace(target, model=target.model.skip_sublayers((), ()))
    inflated.model.inflate = 4
    with pytest.raises(UserError, match="an inflated target has layers that change nothing"):
        search(inflated, [corpus], SearchOptions(), silent)
    monkeypatch.setattr(skip_search, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"needs optuna: `{install_command('search')}`")):
        search(target, [corpus], SearchOptions(), silent)


@pytest.mark.parametrize("values", [{"prompts": 0}, {"max_tokens": 7}, {"trials": 0}, {"seed": -1}])
def test_a_wrong_option_is_named(values: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(values))} is "):
        SearchOptions(**values)
