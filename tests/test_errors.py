"""Sentences for numbers out of range, and commands that install a missing extra."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from outpace.core.errors import UserError, check_range, check_whole, install_command


@pytest.mark.parametrize(
    ("value", "low", "high", "says"),
    [
        (-1, 0, 2**63 - 1, "seed is -1, it must be between 0 and 9223372036854775807"),
        (2**63, 0, 2**63 - 1, "seed is 9223372036854775808, it must be between 0 and 9223372036854775807"),
        (0, 1, math.inf, "seed is 0, it must be at least 1"),
        (1.0, 1, 9, "seed is 1.0, it must be a whole number, between 1 and 9"),
        (-1.5, 1, 9, "seed is -1.5, it must be a whole number, between 1 and 9"),
        ("7", 1, 9, "seed is '7', it must be a whole number, between 1 and 9"),
        (True, 1, 9, "seed is True, it must be a whole number, between 1 and 9"),
        (None, 0, math.inf, "seed is None, it must be a whole number, at least 0"),
        ([5] * 100, 1, 9, "seed is [5, 5, 5, 5, 5, 5, ...], it must be a whole number, between 1 and 9"),
    ],
)
def test_what_is_no_whole_number_in_range(value: Any, low: int, high: float, says: str) -> None:
    with pytest.raises(UserError) as raised:
        check_whole("seed", value, low, high)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("value", "low", "high", "says"),
    [
        (3, 0.01, 2.0, "penalty is 3, it must be between 0.01 and 2"),
        (math.nan, 0.0, 1.0, "penalty is nan, it must be between 0 and 1"),
        (math.inf, 0, math.inf, None),
        (-0.5, 0, math.inf, "penalty is -0.5, it must be at least 0"),
        ("0.5", 0.0, 1.0, "penalty is '0.5', it must be a number, between 0 and 1"),
        (False, 0.0, 1.0, "penalty is False, it must be a number, between 0 and 1"),
    ],
)
def test_what_is_no_number_in_range(value: Any, low: float, high: float, says: str | None) -> None:
    if says is None:
        check_range("penalty", value, low, high)
        return
    with pytest.raises(UserError) as raised:
        check_range("penalty", value, low, high)
    assert str(raised.value) == says


def test_from_a_checkout_the_checkout_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    assert shlex.split(install_command("server", folder)) == ["pip", "install", "-e", f"{folder}[server]"]


def test_elsewhere_the_package_is(tmp_path: Path) -> None:
    assert install_command("server", tmp_path) == "pip install 'outpace[server]'"


def test_these_tests_run_from_a_checkout() -> None:
    assert shlex.split(install_command("hub"))[-1] == f"{Path(__file__).parents[1]}[hub]"
