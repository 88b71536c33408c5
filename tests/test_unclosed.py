"""An LLM that is never closed: dropping it warns and ends its worker; keeping it until the program ends is no error."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import children, until
from turns import in_turn

import outpace
from outpace.api.llm import LLM

SECONDS = 120.0  # a longer wait counts as a hang
WORKERS = {"thread": "outpace-drafter", "process": "outpace-drafter-owner"}


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Collect the warnings of a test without their sources, which would otherwise stay alive."""
    found: list[str] = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", lambda message, kind, *rest: found.append(f"{kind.__name__}: {message}"))
        yield found


def card_llm(tiny_folder: str, worker: str) -> LLM:
    return outpace.load(tiny_folder, method="card", drafter="ngram", worker=worker)


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("worker", "is_cycle"), in_turn(WORKERS, [False, True]))
def test_a_dropped_llm_warns_and_its_worker_ends(
    tiny_folder: str, worker: str, is_cycle: bool, warned: list[str]
) -> None:
    before, llm = children(), card_llm(tiny_folder, worker)
    llm.stream("hello", max_tokens=4).finish()
    assert WORKERS[worker] in thread_names()
    if is_cycle:
        ring: list[Any] = [llm]
        ring.append(ring)
        del ring
    del llm
    gc.collect()
    assert warned == [f"ResourceWarning: unclosed LLM of {tiny_folder}"]
    until(lambda: WORKERS[worker] not in thread_names() and children() <= before, "the worker's end")


def test_a_closed_llm_gives_no_warning(tiny_folder: str, warned: list[str]) -> None:
    with card_llm(tiny_folder, "thread"):
        pass
    card_llm(tiny_folder, "thread").close()
    gc.collect()
    assert warned == []


def test_an_llm_that_failed_to_load_gives_no_warning(tiny_folder: str, warned: list[str]) -> None:
    with pytest.raises(outpace.UserError):
        outpace.load(tiny_folder, method="card", drafter="ngram", nodes=-1)
    gc.collect()
    assert warned == []


ENDS_WHILE_GENERATING = """
import sys, threading, warnings
from outpace.api.llm import LLM
warnings.simplefilter("ignore")
llm, began = LLM(sys.argv[1], dtype=sys.argv[2]), threading.Event()
def work():
    while True:
        for piece in llm.stream("hello", max_tokens=60, ignore_eos=True):
            began.set()
threading.Thread(target=work, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("dtype", ["auto", pytest.param("float32", marks=pytest.mark.long)])
def test_a_program_may_end_while_a_daemon_thread_generates(tiny_folder: str, tmp_path: Path, dtype: str) -> None:
    """It neither aborts nor warns about an unclosed model."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_GENERATING, tiny_folder, dtype],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OUTPACE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
