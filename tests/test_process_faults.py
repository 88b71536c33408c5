"""Faults of the drafter's process: killed, stopped, failing, or orphaned. Texts are complete and nothing is left."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
from doubles import SMALL, collect_warnings, make_request, within, write
from light import DrafterDiedError, build_never
from processes import (
    REQUESTS,
    SCRIPT,
    SECONDS,
    TARGET,
    TEXTS,
    Drive,
    build_failing,
    build_light,
    driven,
    is_gone,
    nothing_left,
    run_script,
    until,
)
from turns import one_of

from outpace.card.cache import CandidateCache
from outpace.card.process import DraftProcessError, ProcessWorker, picklable_error
from outpace.core.errors import UserError
from outpace.decoders import Card, Pearl, Ssd
from outpace.engine.engine import Engine
from outpace.rules.greedy import Greedy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the tests use POSIX signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class OddError(Exception):
    """An error that cannot be unpickled from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize("method", one_of(3, [Card, Pearl, Ssd]), ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_killed_process_is_restarted_and_then_given_up(method: ModuleType) -> None:
    worker = ProcessWorker(build_light, pauses=(0.01, 0.01))
    chance = random.Random(5)
    pids = []

    def kill(drive: Drive) -> None:
        drive.until(lambda: worker.pid is not None, "a process")
        pids.append(worker.pid)
        rounds = itertools.count(chance.randrange(20))
        drive.until(lambda: next(rounds) >= 20, "some rounds")
        os.kill(pids[-1], signal.SIGKILL)
        drive.until(lambda: worker.pid != pids[-1], "its end is seen")

    def work(drive: Drive) -> None:
        for _ in range(3):
            drive.until_drafted()
            kill(drive)
        drive.until(lambda: worker.pid is None, "its end")
        for _ in range(50):
            drive.round()

    said = driven(worker, work, method)
    failed = "the drafter failed (DraftProcessError: its process was ended by SIGKILL); continuing without it"
    assert said == [f"{failed} until it restarts", failed]
    assert isinstance(worker.failure, DraftProcessError)
    assert len(set(pids)) == 3


def test_a_process_killed_while_it_starts_is_restarted() -> None:
    worker = ProcessWorker(build_light, pauses=(0.01,))
    until(lambda: worker.pid is not None, "a process")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert len(driven(worker, Drive.until_drafted)) == 1
    assert worker.failure is None


def test_node_ids_are_unique_across_restarts_of_the_drafter() -> None:
    """Rules that key their randomness by node ids are lossless only if ids are unique."""
    met: dict[int, tuple[int, int]] = {}
    worker = ProcessWorker(build_light, pauses=(0.01,))
    request = make_request([1, 2, 3], "greedy", 100_000)

    def work() -> None:
        with Engine(TARGET, worker=worker, options=SMALL) as engine:
            run = engine.submit(request, Card, Card.Options())
            for kill in (True, False):
                goal, end = len(met) + 100, time.monotonic() + SECONDS
                while len(met) < goal:
                    assert time.monotonic() < end, "never: candidates of the drafter"
                    engine.step()
                    time.sleep(0.0005)
                    tree = run.context.candidates.query(1000)
                    for node in range(1, len(tree)):
                        seen = tree.ids[tree.parents[node]], tree.tokens[node]
                        assert met.setdefault(tree.ids[node], seen) == seen
                if kill and worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
            assert run.tokens == write(TARGET, replace(request, max_tokens=len(run.tokens)))

    said = collect_warnings(partial(within, 2 * SECONDS, work))[1]
    assert len(said) == 1


def test_a_stopped_process_is_waited_for() -> None:
    worker = ProcessWorker(build_light)

    def work(drive: Drive) -> None:
        drive.until_drafted()
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        written = len(drive.runs) + 12
        drive.until(lambda: len(drive.runs) >= written, "texts without a drafter")
        os.kill(pid, signal.SIGCONT)
        drive.until_drafted()
        assert worker.pid == pid

    assert driven(worker, work) == []


def test_a_process_that_stays_stopped_is_replaced() -> None:
    worker = ProcessWorker(build_light, patience=1.0, pauses=(0.01,) * 5)

    def work(drive: Drive) -> None:
        drive.until_drafted()
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        drive.until(lambda: worker.pid not in (pid, None) and worker.is_ready, "another process")
        drive.until_drafted()

    said = driven(worker, work)
    assert len(said) == 1
    assert "DraftProcessError: its process read nothing for" in said[0]


def test_messages_to_a_stopped_process_do_not_block() -> None:
    """The prompts exceed the socket buffer of some hundred kilobytes."""
    worker = ProcessWorker(build_light)
    until(lambda: worker.is_ready, "a drafter")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    long = make_request([1] * 100_000, "greedy", 10)

    def work() -> None:
        for key in range(20):
            worker.open(key, long, CandidateCache(1))
        worker.close()

    within(SECONDS, work)


def test_an_exception_of_the_child_arrives_with_its_traceback() -> None:
    worker = ProcessWorker(build_failing, pauses=(0.01,))
    said = driven(worker, lambda drive: drive.until(lambda: bool(worker.failure) and worker.pid is None, "its end"))
    failed = "the drafter failed (DrafterDiedError: grow number 5); continuing without it"
    assert said in ([f"{failed} until it restarts"], [f"{failed} until it restarts", failed])
    assert isinstance(worker.failure, DrafterDiedError)
    assert "in before\n    raise DrafterDiedError" in str(worker.failure.__cause__)


def test_a_drafter_that_cannot_be_built_is_not_retried() -> None:
    worker = ProcessWorker(build_never, pauses=(SECONDS, SECONDS))
    said = driven(worker, lambda drive: drive.until(lambda: bool(worker.failure), "its end"))
    assert said == ["the drafter failed (UserError: no such draft); continuing without it"]
    assert isinstance(worker.failure, UserError)


def test_a_request_that_cannot_be_pickled_is_decoded_plainly() -> None:
    class Local(Greedy):
        pass

    worker = ProcessWorker(build_light)
    until(lambda: worker.is_ready, "a drafter")
    request = replace(REQUESTS[0], rule=Local())

    def work(drive: Drive) -> None:
        run = drive.engine.submit(request, Card, Card.Options())
        drive.until(lambda: run.finish_reason is not None and worker.pid is None, "its end")
        assert run.tokens == TEXTS[0]

    said = driven(worker, work)
    assert len(said) == 1
    assert "Local" in said[0]


def test_an_error_that_cannot_be_pickled_is_sent_as_text() -> None:
    assert isinstance(picklable_error(DrafterDiedError("x")), DrafterDiedError)
    sent = picklable_error(OddError("one", "two"))
    assert type(sent) is RuntimeError
    assert str(sent) == "OddError: one two"


@linux
@pytest.mark.parametrize("when", ["start", "stopped"])
def test_a_child_ends_with_its_killed_parent(when: str) -> None:
    with run_script(SCRIPT + "time.sleep(600)", when) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if when == "stopped":
            os.kill(pid, signal.SIGSTOP)
        program.kill()
        until(lambda: is_gone(pid), "the child's end")


@linux
def test_a_program_that_ends_without_closing_the_worker() -> None:
    decodes = "print(decode(REQUESTS, 'card', worker=worker, target=TARGET).texts == TEXTS)"
    program = run_script(f"{SCRIPT}from doubles import decode\nfrom processes import *\n{decodes}", "on")
    out, err = program.communicate(timeout=SECONDS)
    pid, equal = out.split()  # printed once: the child did not run the program again
    assert equal == "True"
    assert program.returncode == 0, err
    assert not err
    assert is_gone(int(pid))
