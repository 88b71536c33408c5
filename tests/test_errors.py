"""Sentences for numbers out of range, and commands that install a missing extra."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from outpace.core.errors import UserError, check_range, check_whole, install_command


@pytest.mark.parametrize(
    ("check", "value", "low", "high", "says"),
    [
        (check_whole, -1, 0, 2**63 - 1, "-1, it must be between 0 and 9223372036854775807"),
        (check_whole, 2**63, 0, 2**63 - 1, "9223372036854775808, it must be between 0 and 9223372036854775807"),
        (check_whole, 0, 1, math.inf, "0, it must be at least 1"),
        (check_whole, 1.0, 1, 9, "1.0, it must be a whole number, between 1 and 9"),
        (check_whole, -1.5, 1, 9, "-1.5, it must be a whole number, between 1 and 9"),
        (check_whole, "7", 1, 9, "'7', it must be a whole number, between 1 and 9"),
        (check_whole, True, 1, 9, "True, it must be a whole number, between 1 and 9"),
        (check_whole, None, 0, math.inf, "None, it must be a whole number, at least 0"),
        (check_whole, [5] * 100, 1, 9, "[5, 5, 5, 5, 5, 5, ...], it must be a whole number, between 1 and 9"),
        (check_range, 3, 0.01, 2.0, "3, it must be between 0.01 and 2"),
        (check_range, math.nan, 0.0, 1.0, "nan, it must be between 0 and 1"),
        (check_range, -0.5, 0, math.inf, "-0.5, it must be at least 0"),
        (check_range, "0.5", 0.0, 1.0, "'0.5', it must be a number, between 0 and 1"),
        (check_range, False, 0.0, 1.0, "False, it must be a number, between 0 and 1"),
    ],
)
def test_a_number_out_of_range(check: Any, value: Any, low: float, high: float, says: str) -> None:
    with pytest.raises(UserError) as raised:
        check("seed", value, low, high)
    assert str(raised.value) == f"seed is {says}"


def test_the_command_that_installs_an_extra(tmp_path: Path) -> None:
    assert install_command("server", tmp_path) == "pip install 'outpace[server]'"
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    assert shlex.split(install_command("server", folder)) == ["pip", "install", "-e", f"{folder}[server]"]
    assert shlex.split(install_command("hub"))[-1] == f"{Path(__file__).parents[1]}[hub]"
