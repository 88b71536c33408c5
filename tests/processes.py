"""Fixtures for tests of the drafter's process: drafters to build in it, an engine to drive, checks for leftovers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from doubles import SMALL, QuickToy, collect_warnings, make_drafter, make_request, within, write
from light import SECONDS, Lookup, build_failing

from outpace.card.worker import DraftWorker
from outpace.decoders.card import Card
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TARGET = QuickToy(16, 3, 0)
REQUESTS = [
    make_request([1, 2, 3, number], rule, 80, seed=number, **({} if rule == "greedy" else {"temperature": 1.0}))
    for number, rule in enumerate(("greedy", "gumbel", "match", "gumbel", "greedy"))
]
TEXTS = [write(TARGET, request) for request in REQUESTS]
SHARED_MEMORY = Path("/dev/shm")


def build(name: str = "model") -> Any:
    """Build, in the child process, a drafter that runs a toy model."""
    return make_drafter(name, TARGET)


def table_of(target: QuickToy) -> bytes:
    """Return the most likely token after each three tokens."""
    return bytes(int(target._row(three).argmax()) for three in itertools.product(range(16), repeat=3))


TABLE = table_of(TARGET)
build_light, build_failing = partial(Lookup, TABLE), partial(build_failing, TABLE)  # the drafters of most tests


def children() -> set[int]:
    """Return the ids of this process's children that still exist."""
    found = set()
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    """Whether the process has ended, perhaps as a zombie that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def num_descriptors() -> int:
    """Return how many files and sockets this process has open; 0 where that is not known."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds that another thread or process brings about."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no process, thread or shared memory outlives the block."""
    before = children(), set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    yield
    assert children() <= before[0]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("outpace-drafter")]
    if SHARED_MEMORY.is_dir():
        assert not {name for name in set(os.listdir(SHARED_MEMORY)) - before[1] if "torch" in name or "psm" in name}


class Drive:
    """An engine that answers `REQUESTS` one after the other, three at a time, for as long as a test needs."""

    def __init__(self, worker: DraftWorker, options: EngineOptions = SMALL, decoder: ModuleType = Card) -> None:
        self.decoder = decoder
        self.engine = Engine(TARGET, worker=worker, options=options)
        self.runs: list[tuple[int, TokenSequence]] = []
        self._numbers = itertools.cycle(range(len(REQUESTS)))

    def round(self, pause: float = 0.0005) -> None:
        """Run one step of the engine, and leave time for the drafter where there is one core."""
        while len(self.engine.running) + len(self.engine.waiting) < 3:
            number = next(self._numbers)
            self.runs.append((number, self.engine.submit(REQUESTS[number], self.decoder, self.decoder.Options())))
        self.engine.step()
        time.sleep(pause)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Run steps until a condition holds, ever slower: on a busy machine layers come long after their text."""
        start = time.monotonic()
        while not condition():
            waited = time.monotonic() - start
            assert waited < SECONDS, f"never: {what}"
            self.round(max(0.0005, waited / 100))

    def until_drafted(self) -> None:
        """Run steps until ten more candidates are accepted."""
        goal = self.accepted() + 10
        self.until(lambda: self.accepted() >= goal, "candidates of the drafter")

    def accepted(self) -> int:
        return sum(step.accepted for _, run in self.runs for step in run.history.steps)

    def finish(self) -> None:
        """Finish all requests and check that every text is that of plain decoding."""
        while self.engine.running or self.engine.waiting:
            self.engine.step()
        for number, run in self.runs:
            assert run.error is None
            assert run.tokens == TEXTS[number]


def driven(
    worker: DraftWorker, work: Callable[[Drive], None], decoder: ModuleType = Card, seconds: float = 2 * SECONDS
) -> list[str]:
    """Run `work` in an engine of its own, for at most `seconds`, check all texts and return the warnings."""

    def whole() -> None:
        drive = Drive(worker, decoder=decoder)
        with drive.engine:
            work(drive)
            drive.finish()

    return collect_warnings(partial(within, seconds, whole))[1]


def run_script(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a user's program that has no `__main__` guard."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    head = f"import sys; sys.path[:0] = {folders!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


SCRIPT = f"""
import time
from functools import partial
from light import Lookup
from outpace.card.process import ProcessWorker
worker = ProcessWorker(partial(Lookup, {TABLE!r})).start()
while sys.argv[1] != "start" and not worker.is_ready or worker.pid is None:
    time.sleep(0.01)
print(worker.pid, flush=True)
"""
