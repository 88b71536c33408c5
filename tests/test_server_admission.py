"""Admission control: bounds of the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outpace.server.choices import Choice, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits
from outpace.server.service import Admission


def group(choices: int = 1) -> Any:
    """A request that waits until `begin`."""
    request = SimpleNamespace(prompt=[1, 2, 3], max_tokens=1000)
    made = [Choice(cast(Any, SimpleNamespace(request=request)), [number]) for number in range(choices)]
    for choice in made:
        choice.run = cast(Any, SimpleNamespace(history=SimpleNamespace(began=0.0), tokens=[]))
    return ChoiceGroup(made, [[1, 2, 3]], "")


def begin(group: Any) -> None:
    group.choices[0].run.history.began = 1.0


def test_free_slots_are_filled_at_once() -> None:
    """They do not count as places in the queue."""
    queue, groups = Admission(ServerLimits(max_queue=2), batch=3), [group() for _ in range(5)]
    for one in groups:
        queue.check()
        queue.admit(one)
    with pytest.raises(ApiError, match="the queue is full: 5 answers are waiting; retry later") as refused:
        queue.check()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.headers == {"retry-after": "1", "retry-after-ms": "1000"}
    for one in groups[:3]:
        begin(one)
    assert queue.count() == (2, 3)
    with pytest.raises(ApiError, match="2 answers are waiting"):
        queue.admit(group())
    queue.remove(groups[0])
    queue.check()


def test_a_started_request_has_no_queue_timeout() -> None:
    """One started choice is enough: the others follow."""
    queue, one = Admission(ServerLimits(), batch=1), group(3)
    assert queue.timeout_error(one).code == "queue_timeout"  # type: ignore[union-attr]
    begin(one)
    assert queue.timeout_error(one) is None


def test_reserved_places_count() -> None:
    queue = Admission(ServerLimits(max_queue=1), batch=1)
    queue.reserve()
    queue.reserve()
    with pytest.raises(ApiError, match="the queue is full: 2 answers are waiting") as refused:
        queue.reserve()
    assert refused.value.status == 429
    queue.release()
    queue.reserve()
