"""`outpace doctor --plan`: the memory, the floors and the gains are what can be reckoned by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from files import model_folder
from typer.testing import CliRunner

from outpace.cli.main import app
from outpace.cli.plan import _verdict
from outpace.core.errors import UserError
from outpace.core.plan import (
    DEVICES,
    GIB,
    WORK,
    DeviceSpec,
    MethodGain,
    ModelSize,
    Placement,
    best_method,
    method_gains,
    most_context,
    passes,
    placements,
)
from outpace.core.theory import expected_tokens
from outpace.models.llama.config.footprint import NAMED, size_of

SMALL = DeviceSpec("small", 10 * GIB, 1e9, 1e12)
MODEL = ModelSize("model", 100, 100, 2.0, 10)


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--plan", "--json", *arguments])
    assert done.exception is None, done.output
    return json.loads(done.output)


@pytest.mark.parametrize(("name", "weights"), [("1B", 1.236e9), ("3B", 3.213e9), ("8B", 8.030e9), ("70B", 70.55e9)])
def test_named_shapes_have_the_published_numbers_of_weights(name: str, weights: float) -> None:
    assert size_of(name, NAMED[name], 2.0).held == pytest.approx(weights, rel=1e-3)


def test_a_pass_takes_as_long_as_the_longer_of_moving_and_computing() -> None:
    size = ModelSize("model", 10**9, 10**9, 2.0, 1000)
    few, many = passes(size, DeviceSpec("m", 0, 1e9, 1e13), 1000, 4, [1, 10_000])
    assert few == pytest.approx(2.0 + 4 * 1e6 / 1e9)
    assert many == pytest.approx(2 * 1e9 * 10_000 * 4 / 1e13)


def test_what_fits_where() -> None:
    target = ModelSize("target", 10 * GIB, 10 * GIB, 1.0, 1024)
    draft = ModelSize("draft", 4 * GIB, 4 * GIB, 1.0, 1024)
    machine = DeviceSpec("m", 12 * GIB, 1.0, 1.0)
    found = {layout.name: layout.fits for layout in placements(target, draft, machine, 1024, 1)}
    assert not found["target on one device, draft beside it"]
    assert found["target on one device, draft on another"]
    assert found["target over 2 devices, draft beside it"]


@pytest.mark.parametrize("is_apart", [True, False])
def test_the_most_context_fits_and_one_token_more_does_not(is_apart: bool) -> None:
    target, draft = ModelSize("target", GIB, GIB, 2.0, 3000), ModelSize("draft", GIB, GIB, 1.0, 1000)
    for split in (1, 2):
        layout = Placement("", (), SMALL.memory, split, is_apart)
        most = most_context(target, draft, layout, 3)
        for context, fits in ((most, True), (most + 1, False)):
            needed = target.needs(context, 3, split == 1) / split + WORK
            needed += 0 if is_apart else draft.needs(context, 3)
            assert (needed <= SMALL.memory) == fits


def test_gains_are_the_formulas_at_their_best_length() -> None:
    target, draft = [1.0 + 0.01 * n for n in range(64)], [0.1] * 64
    found = {gain.method: gain for gain in method_gains(target, draft, 0.8, 8, is_apart=True)}
    in_turn = [expected_tokens(0.8, n) / (0.1 * n + target[n]) for n in range(1, 64)]
    assert found["speculative"].speedup == pytest.approx(max(in_turn))
    assert found["card"].speedup == pytest.approx(max(expected_tokens(0.8, n) / target[n] for n in range(1, 64)))
    assert found["autoregressive"].speedup == 1.0
    beside = {gain.method for gain in method_gains(target, draft, 0.8, 8, is_apart=False)}
    assert beside == {"autoregressive", "speculative"}


@pytest.mark.parametrize(
    ("in_turn", "sure", "bound", "expected", "in_words"),
    [
        (2.0, 3.0, 4.0, "card", "pays: card (at most 4.00x, a bound); pearl 3.00x"),
        (2.0, 1.5, 4.0, "speculative or card", "pays: speculative (2.00x) or card (at most 4.00x, a bound)"),
        (2.0, 1.5, 1.9, "speculative", "pays: speculative (2.00x); card at most 1.90x, a bound"),
        (0.8, 0.7, 0.9, "autoregressive", "pays: plain decoding, no method gains"),
    ],
)
def test_what_pays_between_a_sure_gain_and_a_bound(
    in_turn: float, sure: float, bound: float, expected: str, in_words: str
) -> None:
    gained = {"autoregressive": 1.0, "speculative": in_turn, "pearl": sure, "card": bound}
    methods = [MethodGain(name, 1, 1.0, speedup) for name, speedup in gained.items()]
    assert best_method(methods) == expected
    assert _verdict({"methods": [gain._asdict() for gain in methods], "pays": expected}) == in_words


def test_a_draft_as_dear_as_its_target_does_not_pay() -> None:
    found = planned("--target", "8B", "--draft", "8B", "--gpu", "H100", "--acceptance", "0.5")
    assert found["plans"][0]["pays"] == "autoregressive"


def test_the_plan_of_a_pair() -> None:
    found = planned("--target", "70B", "--draft", "1B", "--gpu", "H100", "--context", "2048")
    fits = {layout["name"]: layout["fits"] for layout in found["layouts"]}
    assert not fits["target on one device, draft on another"]
    assert fits["target over 2 devices, draft beside it"]
    first = found["plans"][0]
    read = next(model["read"] for model in found["models"] if model["name"] == "70B")
    kv = 2048 * 2 * 80 * 8 * 128 * 2
    assert first["target"]["1"] == pytest.approx((2 * read + kv) / (2 * DEVICES["H100"].bandwidth))
    assert first["pays"] == "speculative"


def test_a_models_own_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    found = planned("--target", str(folder), "--gpu", "RTX 3090")
    assert found["models"][0]["held"] > 0
    assert found["plans"][0]["pays"] == "autoregressive"


def test_no_context_is_longer_than_the_models_own(tmp_path: Path) -> None:
    found = planned("--target", "8B", "--draft", "1B", "--gpu", "H200")
    assert {layout["most_context"] for layout in found["layouts"]} == {131072}
    small = planned("--target", str(model_folder(tmp_path)), "--gpu", "H100")
    assert {layout["most_context"] for layout in small["layouts"]} == {128}


def test_tables_and_one_line_of_json_last() -> None:
    done = CliRunner().invoke(
        app, ["doctor", "--plan", "--target", "8B", "--draft", "1B", "--gpu", "H200"], env={"COLUMNS": "120"}
    )
    lines = done.output.splitlines()
    assert "times plain" in done.output
    assert "pays: speculative (" in done.output
    assert "card (a bound)" in done.output
    assert json.loads(lines[-1])["machine"]["name"] == "H200"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--plan needs --target"),
        (["--target", "8B", "--gpu", "H1000"], "did you mean 'H100'"),
        (["--target", "8B", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--target", "no-such-model", "--gpu", "H100"], "name one of the shapes 1B, 3B, 8B, 32B, 70B"),
        (["--target", "8B", "--gpu", "H100", "--bandwidth", "0"], "bandwidth is 0"),
        (["--target", "8B", "--gpu", "H100", "--acceptance", "1.5"], "acceptance is 1.5"),
        (["--target", "8B", "--gpu", "H100", "--context", "0"], "context is 0"),
        (["--target", "70B", "--gpu", "H100", "--device-memory", "8"], "70B needs 131.4 GiB of weights and 0.6 GiB"),
        (["--target", "70B", "--gpu", "H100", "--batch", "4096"], "a context of"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--plan", *arguments])
    assert isinstance(done.exception, UserError)
    assert says in str(done.exception)


def test_models_without_a_plan_are_refused() -> None:
    done = CliRunner().invoke(app, ["doctor", "--target", "8B"])
    assert isinstance(done.exception, UserError)
