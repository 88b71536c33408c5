"""`outpace theory` shows the formulas' values, and says what is wrong with its numbers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outpace.cli.main import app
from outpace.core import theory
from outpace.core.errors import UserError


def test_rows_and_limits_follow_the_formulas() -> None:
    arguments = ["theory", "--acceptance", "0.8", "--cost", "0.1", "--verify", "0.02", "--overhead", "0.05", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).output)
    for row in found["lengths"]:
        gamma = row["draft_length"]
        assert row["tokens"] == pytest.approx(theory.expected_tokens(0.8, gamma))
        expected = theory.speedup(row["tokens"], gamma, 0.1, 1 + 0.02 * gamma, 0.05)
        assert row["in_turn"] == pytest.approx(expected)
        assert row["in_parallel"] == pytest.approx(theory.pearl_speedup(0.8, gamma, 0.1))
    assert found["limits"] == pytest.approx({"limit_in_turn": 5.0, "limit_in_parallel": 10.0})


def test_acceptance_by_position() -> None:
    said = CliRunner().invoke(app, ["theory", "--acceptance", "0.9,0.5", "--lengths", "3", "--json"]).output
    rows = json.loads(said)["lengths"]
    assert [row["tokens"] for row in rows] == pytest.approx([1.9, 2.35, 2.575])
    assert {row["in_parallel"] for row in rows} == {None}


def test_the_table_shows_the_best_length() -> None:
    said = CliRunner().invoke(app, ["theory", "--acceptance", "1.0", "--cost", "0"], env={"COLUMNS": "100"}).output
    assert "limit sequential: none" in said
    assert "11.00" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--acceptance", "high"], "acceptance is 'high'"),
        (["--acceptance", "1.2"], "acceptance is 1.2"),
        (["--cost", "-1"], "cost"),
        (["--verify", "-1"], "verify"),
        (["--overhead", "nan"], "overhead"),
        (["--lengths", "0"], "lengths"),
    ],
)
def test_invalid_numbers_are_refused(arguments: list[str], says: str) -> None:
    error = CliRunner().invoke(app, ["theory", *arguments]).exception
    assert isinstance(error, UserError)
    assert says in str(error)
