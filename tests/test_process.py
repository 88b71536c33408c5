"""The drafter in a process of its own: the same text with every kind of drafter, and no leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doubles import QuickToy, decode, make_request, within, write
from light import Empty, build_slowly
from processes import REQUESTS, SECONDS, TARGET, TEXTS, Drive, build, build_light, driven, nothing_left, until
from test_library import folder

import outpace
from outpace.card.cache import CandidateCache
from outpace.card.process import ProcessWorker
from outpace.core.errors import UserError
from outpace.decoders import Card
from outpace.engine.build import BuildOptions, build_engine
from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part
from outpace.models.load import Loaded

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the tests use POSIX signals")


class UnwaitableCache(CandidateCache):
    """A cache that fails when the target waits for it."""

    def wait(self, layers: int, seconds: float, depth: int = 0) -> None:
        raise AssertionError("the target waited for a drafter that is not built yet")


class SlowToy(QuickToy):
    """A target whose passes take long enough for a forward in another process."""

    def score(self, forest: Sequence[Part]) -> Any:
        time.sleep(0.001)
        return super().score(forest)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def drafted() -> Iterator[Any]:
    """Yield all methods with all drafters. Drafters that import torch in the child start slowly, so all but one
    of these cases are long tests."""
    for name in ("light", "both", "garbage"):
        for method in ("card", "pearl", "planned", "ssd"):
            is_long = name != "light" and (name, method) != ("both", "card")
            yield pytest.param(name, method, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("name", "method"), list(drafted()))
def test_texts_equal_plain_decoding(name: str, method: str) -> None:
    worker = ProcessWorker(build_light if name == "light" else partial(build, name), threads=2)
    until(lambda: worker.is_ready, "a drafter")
    outcome = within(SECONDS, partial(decode, REQUESTS, method, worker=worker, target=SlowToy(16, 3, 0)))
    assert outcome.texts == TEXTS
    assert outcome.failure is None
    assert outcome.figures.accepted > 0 or method == "planned", "with so quick a target, waiting for drafts may not pay"


def test_it_starts_while_the_target_runs_and_then_drafts_for_running_requests() -> None:
    worker = ProcessWorker(build_light)

    def work(drive: Drive) -> None:
        drive.round()
        assert not worker.is_ready
        drive.until_drafted()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)  # Ctrl-C is handled by the parent
        drive.until_drafted()

    assert driven(worker, work) == []
    assert worker.failure is None


def test_the_target_does_not_wait_for_a_drafter_that_is_not_built() -> None:
    worker = ProcessWorker(build_slowly)
    cache = UnwaitableCache(3)
    worker.open(0, REQUESTS[0], cache)
    worker.wait(cache, 1)
    until(lambda: worker.pid is not None, "a process")
    worker.wait(cache, 1)
    within(SECONDS / 2, worker.close)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.3])
def test_it_may_be_closed_while_it_starts(delay: float) -> None:
    worker = ProcessWorker(build_slowly)
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
        until(lambda: worker.is_ready, "a drafter")
        run = engine.submit(make_request([1, 2, 3] * 5, "greedy", 200), Card, Card.Options())
        within(SECONDS, partial(finish, engine, run))
        assert sum(step.accepted for step in run.history.steps) > 100
        assert run.tokens == write(TARGET, run.request)
        assert worker.failure is None


def finish(engine: Engine, run: TokenSequence) -> None:
    """Run the request to its end, and before every round wait for the drafter's answer to the last one."""
    while run.finish_reason is None:
        engine.step()
        if run.finish_reason is None and run.unread <= 0:
            until(lambda: run.context.candidates.layers > 0, "an answer of the drafter's")
