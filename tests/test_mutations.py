"""Every named mistake, put into the library, is noticed; without one, nothing is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
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
    file, name = test.partition("[")[0].split("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_a_broken_mutation_does_not_count_as_caught() -> None:
    def find() -> str | None:
        return next(compare(requests_of(CASES[0]), GREEDY_TEXTS, "greedy"), None)

    like = MUTATIONS[0]
    broken = Mutation("takes nothing", like.owners, like.attribute, lambda original: lambda: None, find)
    idle = Mutation("never called", [random], "betavariate", lambda original: original, find)
    harmless = Mutation("changes nothing", like.owners, like.attribute, lambda original: original, find)
    assert [judge(mutation)[0] for mutation in (broken, idle, harmless)] == [False, False, False]
