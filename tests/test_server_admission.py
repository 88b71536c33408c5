"""What stands in the queue is counted once in a moment, and the rate of writing is that of the last seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outpace.server import admission
from outpace.server.admission import Admission
from outpace.server.choices import Choice, Group
from outpace.server.options import Limits


def group() -> Any:
    """A request of three tokens that waits until its `began` is set."""
    choice: Any = Choice(cast(Any, SimpleNamespace(request=SimpleNamespace(prompt=[1, 2, 3]))), [0])
    choice.run = SimpleNamespace(history=SimpleNamespace(began=0.0), tokens=[])
    return Group([choice], [[1, 2, 3]], "")


def begin(group: Any, when: float) -> None:
    group.choices[0].run.history.began = when


def test_room_is_seen_a_moment_later_though_the_engine_told_nothing() -> None:
    """It takes up an answer before it writes any of it."""
    now = 100.0
    queue, first, second = Admission(Limits(max_queue=1), batch=1, clock=lambda: now), group(), group()
    queue.admit(first)
    queue.admit(second)
    assert queue.is_full
    begin(first, now)
    now += 2 * admission.MOMENT
    assert queue.is_full  # one runs, one waits
    begin(second, now)
    assert queue.is_full  # as it was a moment ago
    now += 2 * admission.MOMENT
    assert not queue.is_full
    begin(second, 0.0)
    queue.wrote(1)  # the engine told something: it is looked at anew
    assert queue.is_full


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = 100.0
    queue = Admission(Limits(), batch=1, clock=lambda: now)
    for _ in range(10):
        queue.wrote(10_000)
        now += 1.0
    now += 2 * admission.WINDOW
    for _ in range(11):
        queue.wrote(128)
        now += 1.0
    assert queue.wait() == pytest.approx(128.0 / (11 * 128 / 10.0))
