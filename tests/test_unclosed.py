"""An LLM that is dropped without being closed: a warning as for files, and what works for it ends all the same."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from processes import children, until
from test_library import folder
from turns import in_turn

import outpace
from outpace.api.llm import LLM

WORKERS = {"thread": "outpace-drafter", "process": "outpace-drafter-owner"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("models"), "target")


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The ResourceWarnings of a test, without their sources: those would live on."""
    found: list[str] = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", lambda message, kind, *rest: found.append(f"{kind.__name__}: {message}"))
        yield found


def carding(target: str, worker: str) -> LLM:
    return outpace.load(target, method="card", drafter="ngram", worker=worker)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("worker", "is_cycle"), in_turn(WORKERS, [False, True]))
def test_a_dropped_llm_warns_and_its_worker_ends(target: str, worker: str, is_cycle: bool, warned: list[str]) -> None:
    before, llm = children(), carding(target, worker)
    llm.stream("hello", max_tokens=4).finish()
    assert WORKERS[worker] in names()
    if is_cycle:
        ring: list[Any] = [llm]
        ring.append(ring)
        del ring
    del llm
    gc.collect()
    assert warned == [f"ResourceWarning: unclosed LLM of {target}"]
    until(lambda: WORKERS[worker] not in names() and children() <= before, "the worker's end")


def test_a_closed_llm_gives_no_warning(target: str, warned: list[str]) -> None:
    with carding(target, "thread"):
        pass
    carding(target, "thread").close()
    gc.collect()
    assert warned == []


def test_one_that_was_never_whole_gives_no_warning(target: str, warned: list[str]) -> None:
    with pytest.raises(outpace.UserError):
        outpace.load(target, method="card", drafter="ngram", nodes=-1)
    gc.collect()
    assert warned == []
