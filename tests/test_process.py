"""The drafter in a process: the same text, wherever its parts come from, and nothing of it left behind."""

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

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are told apart by POSIX means")


class Deaf(CandidateCache):
    """A cache that must not be waited for."""

    def wait(self, layers: int, seconds: float, depth: int = 0) -> None:
        raise AssertionError("the target waited for a drafter that does not stand yet")


class Unhurried(QuickToy):
    """A target whose passes leave a drafter in another process the time for a forward."""

    def score(self, forest: Sequence[Part]) -> Any:
        time.sleep(0.001)
        return super().score(forest)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def drafted() -> Iterator[Any]:
    """Each method with a drafter that starts quickly; with toys, which bring torch there, one of them, the others in
    the long tests."""
    for name in ("light", "both", "garbage"):
        for method in ("card", "pearl", "planned", "ssd"):
            is_long = name != "light" and (name, method) != ("both", "card")
            yield pytest.param(name, method, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("name", "method"), list(drafted()))
def test_texts_are_plain_decodings(name: str, method: str) -> None:
    worker = ProcessWorker(build_light if name == "light" else partial(build, name), threads=2)
    until(lambda: worker.is_ready, "a drafter")
    outcome = within(SECONDS, partial(decode, REQUESTS, method, worker=worker, target=Unhurried(16, 3, 0)))
    assert outcome.texts == TEXTS
    assert outcome.failure is None
    assert outcome.figures.accepted > 0 or method == "planned", "beside so quick a target waiting may not pay"


def test_it_starts_beside_the_target_and_takes_up_what_runs() -> None:
    worker = ProcessWorker(build_light)

    def work(drive: Drive) -> None:
        drive.round()
        assert not worker.is_ready
        drive.until_drafted()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)  # a Ctrl-C is the owner's
        drive.until_drafted()

    assert driven(worker, work) == []
    assert worker.failure is None


def test_the_target_does_not_wait_for_a_drafter_that_is_not_built() -> None:
    worker = ProcessWorker(build_slowly)
    cache = Deaf(3)
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


def test_a_recipe_that_cannot_cross_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be built in another process .* use worker thread"):
        ProcessWorker(lambda: Empty())
    held = Loaded(TARGET, None, "my model")
    for_process = BuildOptions("card", worker="process")
    with pytest.raises(UserError, match="the draft my model is an object of this process: name a path, or use worker"):
        build_engine(held, held, for_process)


@pytest.mark.parametrize("draft", ["layers:0,1", "the target's folder"])
def test_a_draft_is_loaded_again_there(tmp_path: Path, draft: str) -> None:
    """The draft is the target once more, so all that it drafts is hit."""
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


def test_an_engine_of_ngrams_needs_no_model_there() -> None:
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
    """To the end, and before every round what the drafter has to say of the last one: candidates, or nothing."""
    while run.finish_reason is None:
        engine.step()
        if run.finish_reason is None and run.unread <= 0:
            until(lambda: run.context.candidates.layers > 0, "an answer of the drafter's")
