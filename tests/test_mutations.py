"""Every named mistake, put into the library, is noticed; without one, nothing is. Those in the kernels match them."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mutation_checks import CASES, CHECKS, GREEDY_TEXTS, Mutation, compare, judge, requests_of
from mutations import MUTATIONS
from part_mutations import JUDGES
from turns import one_of


@pytest.mark.parametrize("check", one_of(len(CHECKS), CHECKS))  # what the others check has short tests of its own
def test_unmutated_library_passes(check: Callable[[], Iterator[str]]) -> None:
    assert list(check()) == []


def sample() -> list[Any]:
    """One of 32 is tried in any case; all of them by `make mutations` too."""
    return [
        pytest.param(mutation, id=mutation.name, marks=[] if number % 32 == 0 else pytest.mark.long)
        for number, mutation in enumerate(MUTATIONS)
    ]


@pytest.mark.parametrize("mutation", sample())
def test_mutation_is_caught(mutation: Mutation) -> None:
    caught, by = judge(mutation)
    assert caught, f"{mutation.name}: {by}"


def test_mutations_leave_nothing_behind() -> None:
    for mutation in MUTATIONS:
        originals = [vars(owner)[mutation.attribute] for owner in mutation.owners]
        with mutation.applied():
            during = [vars(owner)[mutation.attribute] for owner in mutation.owners]
        assert all(a is not b for a, b in zip(originals, during, strict=True))
        assert [vars(owner)[mutation.attribute] for owner in mutation.owners] == originals


@pytest.mark.parametrize("test", JUDGES)
def test_a_test_that_a_mutation_names_exists(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_a_broken_mutation_does_not_count_as_caught() -> None:
    def find() -> str | None:
        return next(compare(requests_of(CASES[0]), GREEDY_TEXTS, "greedy"), None)

    like = MUTATIONS[0]
    broken = Mutation("takes nothing", like.owners, like.attribute, lambda: None, find)
    idle = Mutation("never called", [random], "betavariate", lambda original: original, find)
    harmless = replace(broken, name="changes nothing", mistake=lambda call, *given, **more: call(*given, **more))
    assert [judge(mutation)[0] for mutation in (broken, idle, harmless)] == [False, False, False]


FILE = Path(__file__).parents[1] / "kernels" / "tests" / "mutations.py"


def load_mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_mutations", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)  # as for a script
        spec.loader.exec_module(module)
    return module


def test_every_mistake_matches_one_place(tmp_path: Path) -> None:
    module = load_mutations()
    names = [mutation.name for mutation in module.MUTATIONS]
    assert len(names) == len(set(names)) > 30
    for mutation in module.MUTATIONS:
        place = tmp_path / "src" / mutation.file
        place.parent.mkdir(exist_ok=True)
        source = (module.KERNELS / "src" / mutation.file).read_text(encoding="utf-8")
        place.write_text(source, encoding="utf-8")
        with mutation.applied(tmp_path):
            assert place.read_text(encoding="utf-8") == source.replace(mutation.before, mutation.after) != source
        assert place.read_text(encoding="utf-8") == source


def test_a_mistake_that_matches_no_place_is_an_error(tmp_path: Path) -> None:
    module = load_mutations()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "product.h").write_text("some other source", encoding="utf-8")
    mutation = next(mutation for mutation in module.MUTATIONS if mutation.file == "product.h")
    with pytest.raises(ValueError, match="occurs 0 times"), mutation.applied(tmp_path):
        pass


def test_copying_replaces_only_files_that_differ(tmp_path: Path) -> None:
    """Builds compare modification times, so a restored file must be newer than the objects built from the mistake."""
    module = load_mutations()
    module.copy_sources(tmp_path)
    same, left = (tmp_path / "src" / name for name in ("team.h", "product.h"))
    left.write_text("a mistake", encoding="utf-8")
    for file in (same, left):
        os.utime(file, (1, 1))
    module.copy_sources(tmp_path)
    assert left.read_bytes() == (module.KERNELS / "src" / "product.h").read_bytes()
    assert (same.stat().st_mtime, left.stat().st_mtime > 1) == (1, True)
