"""Commands that install what is missing work where they are printed."""

from __future__ import annotations

import shlex
from pathlib import Path

from outpace.core.errors import install_command


def test_from_a_checkout_the_checkout_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    assert shlex.split(install_command("server", folder)) == ["pip", "install", "-e", f"{folder}[server]"]


def test_elsewhere_the_package_is(tmp_path: Path) -> None:
    assert install_command("server", tmp_path) == "pip install 'outpace[server]'"


def test_these_tests_run_from_a_checkout() -> None:
    assert shlex.split(install_command("hub"))[-1] == f"{Path(__file__).parents[1]}[hub]"
