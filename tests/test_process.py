"""The drafter in a process of its own: the same text with every drafter and through every fault, and no leftovers."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles import SMALL, QuickToy, collect_warnings, decode, make_request, within, write
from engine_runs import submit
from light import DrafterDiedError, Empty, build_never, build_slowly
from processes import (
    REQUESTS,
    SCRIPT,
    SECONDS,
    TARGET,
    TEXTS,
    Drive,
    build,
    build_failing,
    build_light,
    driven,
    is_gone,
    nothing_left,
    run_script,
    until,
)
from test_library import folder
from turns import one_of

import outpace
from outpace.card.cache import CandidateCache
from outpace.card.process import DraftProcessError, ProcessWorker, picklable_error
from outpace.core.errors import UserError
from outpace.decoders.card import Card
from outpace.decoders.pearl import Pearl
from outpace.decoders.ssd import Ssd
from outpace.engine.build import BuildOptions, build_engine
from outpace.engine.engine import Engine
from outpace.models.base import Part
from outpace.models.load import Loaded
from outpace.rules.greedy import Greedy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the tests use POSIX signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class UnwaitableCache(CandidateCache):
    """A cache that fails when the target waits for it."""

    def wait(self, levels: int, seconds: float, depth: int = 0) -> None:
        raise AssertionError("the target waited for a drafter that is not built yet")


class SlowToy(QuickToy):
    """A target whose passes take long enough for a forward in another process."""

    def score(self, forest: Sequence[Part]) -> Any:
        time.sleep(0.001)
        return super().score(forest)


class OddError(Exception):
    """An error that cannot be unpickled from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def started(make: Callable[[], Any] = build_light, **options: Any) -> ProcessWorker:
    """A worker whose drafter is built."""
    worker = ProcessWorker(make, **options).start()
    until(lambda: worker.is_ready, "a drafter")
    return worker


def send(worker: ProcessWorker, number: signal.Signals) -> int:
    """Send a signal to the drafter's process and return its id."""
    until(lambda: worker.pid is not None, "a process")
    assert worker.pid is not None
    pid = worker.pid
    os.kill(pid, number)
    return pid


def drafted() -> Iterator[Any]:
    """Yield all methods with all drafters. Drafters that import torch in the child start slowly, so all but one
    of these cases are long tests."""
    for name in ("light", "both", "garbage"):
        for method in ("card", "pearl", "planned", "ssd"):
            is_long = name != "light" and (name, method) != ("both", "card")
            yield pytest.param(name, method, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("name", "method"), list(drafted()))
def test_texts_equal_plain_decoding(name: str, method: str) -> None:
    worker = started(build_light if name == "light" else partial(build, name), threads=2)
    outcome = within(SECONDS, partial(decode, REQUESTS, method, worker=worker, target=SlowToy(16, 3, 0)))
    assert outcome.texts == TEXTS
    assert outcome.failure is None
    assert outcome.figures.accepted > 0 or method == "planned", "with so quick a target, waiting for drafts may not pay"


def test_it_starts_while_the_target_runs_and_then_drafts_for_running_requests() -> None:
    worker = ProcessWorker(build_light).start()

    def work(drive: Drive) -> None:
        drive.round()
        assert not worker.is_ready
        drive.until_drafted()
        send(worker, signal.SIGINT)  # Ctrl-C is handled by the parent
        drive.until_drafted()

    assert driven(worker, work) == []
    assert worker.failure is None


def test_the_target_does_not_wait_for_a_drafter_that_is_not_built() -> None:
    worker = ProcessWorker(build_slowly).start()
    cache = UnwaitableCache(3)
    worker.open(0, REQUESTS[0], cache)
    worker.wait(cache, 1)
    until(lambda: worker.pid is not None, "a process")
    worker.wait(cache, 1)
    within(SECONDS / 2, worker.close)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.3])
def test_it_may_be_closed_while_it_starts(delay: float) -> None:
    worker = ProcessWorker(build_slowly).start()
    time.sleep(delay)
    within(SECONDS / 2, worker.close)
    assert worker.failure is None


def test_a_build_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be built in another process .* use worker thread"):
        ProcessWorker(lambda: Empty())
    held = Loaded(TARGET, None, "my model")
    for_process = BuildOptions("card", worker="process")
    with pytest.raises(UserError, match="the draft my model is an object of this process: name a path, or use worker"):
        build_engine(held, held, for_process)


@pytest.mark.parametrize("draft", ["layers:0,1", "the target's folder"])
def test_the_draft_is_loaded_again_in_the_child(tmp_path: Path, draft: str) -> None:
    """The draft equals the target, so its tokens are accepted."""
    model = folder(tmp_path, "target")
    with outpace.load(model, draft if draft.startswith("layers") else model, method="card", worker="process") as llm:
        worker = llm.engine.worker
        assert isinstance(worker, ProcessWorker)
        until(lambda: worker.is_ready or bool(worker.failure), "a drafter")
        plain = llm.stream("hello", max_tokens=60, plain=True).finish()
        result = llm.stream("hello", max_tokens=60).finish()
        assert worker.failure is None
    assert result.tokens == plain.tokens
    assert result.figures.accepted > 0


def test_an_ngram_drafter_needs_no_model_in_the_child() -> None:
    options = BuildOptions("card", "ngram", worker="process", part_options={"longest": 2})
    with build_engine(Loaded(TARGET, None, "toy"), None, options) as engine:
        worker = engine.worker
        assert isinstance(worker, ProcessWorker)
        worker.start()
        until(lambda: worker.is_ready, "a drafter")
        (run,) = submit(engine, make_request([1, 2, 3] * 5, "greedy", 200), method=Card)

        def finish() -> None:
            """Wait for the drafter's answer to a round before the next one."""
            while run.finish_reason is None:
                engine.step()
                if run.finish_reason is None and run.unread <= 0:
                    until(lambda: run.context.candidates.levels > 0, "an answer of the drafter's")

        within(SECONDS, finish)
        assert sum(step.accepted for step in run.history.steps) > 100
        assert run.tokens == write(TARGET, run.request)
        assert worker.failure is None


@pytest.mark.parametrize("method", one_of(3, [Card, Pearl, Ssd]), ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_killed_process_is_restarted_and_then_given_up(method: ModuleType) -> None:
    worker = ProcessWorker(build_light, pauses=(0.01, 0.01)).start()
    chance = random.Random(5)
    pids = []

    def work(drive: Drive) -> None:
        for _ in range(3):
            drive.until_drafted()
            drive.until(lambda: worker.pid is not None, "a process")
            for _ in range(20 - chance.randrange(20)):
                drive.round()
            pids.append(send(worker, signal.SIGKILL))
            drive.until(lambda: worker.pid != pids[-1], "its end is seen")
        drive.until(lambda: worker.pid is None, "its end")
        for _ in range(50):
            drive.round()

    said = driven(worker, work, method)
    failed = "the drafter failed (DraftProcessError: its process was ended by SIGKILL); continuing without it"
    assert said == [f"{failed} until it restarts", failed]
    assert isinstance(worker.failure, DraftProcessError)
    assert len(set(pids)) == 3


def test_a_process_killed_while_it_starts_is_restarted() -> None:
    worker = ProcessWorker(build_light, pauses=(0.01,)).start()
    send(worker, signal.SIGKILL)
    assert len(driven(worker, Drive.until_drafted)) == 1
    assert worker.failure is None


def test_node_ids_are_unique_across_restarts_of_the_drafter() -> None:
    """Rules that key their randomness by node ids are lossless only if ids are unique."""
    met: dict[int, tuple[int, int]] = {}
    worker = ProcessWorker(build_light, pauses=(0.01,)).start()
    request = make_request([1, 2, 3], "greedy", 100_000)

    def work() -> None:
        with Engine(TARGET, worker=worker, options=SMALL) as engine:
            (run,) = submit(engine, request, method=Card)
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
                if kill:
                    send(worker, signal.SIGKILL)
            assert run.tokens == write(TARGET, replace(request, max_tokens=len(run.tokens)))

    assert len(collect_warnings(partial(within, 2 * SECONDS, work))[1]) == 1


def test_a_stopped_process_is_waited_for() -> None:
    worker = ProcessWorker(build_light, patience=SECONDS).start()

    def work(drive: Drive) -> None:
        drive.until_drafted()
        pid = send(worker, signal.SIGSTOP)
        written = len(drive.runs) + 12
        drive.until(lambda: len(drive.runs) >= written, "texts without a drafter")
        os.kill(pid, signal.SIGCONT)
        drive.until_drafted()
        assert worker.pid == pid

    assert driven(worker, work) == []


def test_a_process_that_stays_stopped_is_replaced() -> None:
    worker = ProcessWorker(build_light, patience=1.0, pauses=(0.01,) * 5).start()

    def work(drive: Drive) -> None:
        drive.until_drafted()
        pid = send(worker, signal.SIGSTOP)
        drive.until(lambda: worker.pid not in (pid, None) and worker.is_ready, "another process")
        drive.until_drafted()

    (said,) = driven(worker, work)
    assert "DraftProcessError: its process read nothing for" in said


def test_messages_to_a_stopped_process_do_not_block() -> None:
    """The prompts exceed the socket buffer of some hundred kilobytes."""
    worker = started()
    send(worker, signal.SIGSTOP)
    long = make_request([1] * 100_000, "greedy", 10)

    def work() -> None:
        for key in range(20):
            worker.open(key, long, CandidateCache(1))
        worker.close()

    within(SECONDS, work)


def test_an_exception_of_the_child_arrives_with_its_traceback() -> None:
    worker = ProcessWorker(build_failing, pauses=(0.01,)).start()
    said = driven(worker, lambda drive: drive.until(lambda: bool(worker.failure) and worker.pid is None, "its end"))
    failed = "the drafter failed (DrafterDiedError: grow number 5); continuing without it"
    assert said in ([f"{failed} until it restarts"], [f"{failed} until it restarts", failed])
    assert isinstance(worker.failure, DrafterDiedError)
    assert "in before\n    raise DrafterDiedError" in str(worker.failure.__cause__)


def test_a_drafter_that_cannot_be_built_is_not_retried() -> None:
    worker = ProcessWorker(build_never, pauses=(SECONDS, SECONDS)).start()
    said = driven(worker, lambda drive: drive.until(lambda: bool(worker.failure), "its end"))
    assert said == ["the drafter failed (UserError: no such draft); continuing without it"]
    assert isinstance(worker.failure, UserError)


def test_a_request_that_cannot_be_pickled_is_decoded_plainly() -> None:
    class Local(Greedy):
        pass

    worker = started()

    def work(drive: Drive) -> None:
        (run,) = submit(drive.engine, replace(REQUESTS[0], rule=Local()), method=Card)
        drive.until(lambda: run.finish_reason is not None and worker.pid is None, "its end")
        assert run.tokens == TEXTS[0]

    (said,) = driven(worker, work)
    assert "Local" in said


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
