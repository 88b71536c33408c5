"""Names of the release before: each fails with the place where its module is now, and that place exists."""

from __future__ import annotations

import importlib

import pytest

import outpace
from outpace._moved import MOVED, PARTED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_says_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=f"outpace.{old} is outpace.{new} since release"):
        importlib.import_module(f"outpace.{old}")


@pytest.mark.parametrize("new", sorted({*MOVED.values(), *PARTED.values()}))
def test_the_new_place_is_there(new: str) -> None:
    if new.startswith("models.hf."):
        pytest.importorskip("transformers")
    importlib.import_module(f"outpace.{new}")


@pytest.mark.parametrize(("package", "name"), [("engine", "Engine"), ("models.llama", "Llama")])
def test_what_a_package_held_as_a_module_is_named_too(package: str, name: str) -> None:
    module = importlib.import_module(f"outpace.{package}")
    with pytest.raises(ImportError, match=f"outpace.{package} is outpace.{PARTED[package]}"):
        getattr(module, name)
    assert not hasattr(module, "nothing_that_it_held")


def test_a_module_that_never_was_is_simply_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'outpace\.never'"):
        importlib.import_module("outpace.never")
    assert outpace.__version__
