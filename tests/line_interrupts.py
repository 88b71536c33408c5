"""Raise KeyboardInterrupt at a chosen line of the package while a function runs."""

from __future__ import annotations

import gc
import linecache
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import outpace

PACKAGE = str(Path(outpace.__file__).parent)


class Place(NamedTuple):
    """The `visit`th execution of a line, counted from 1."""

    code: CodeType
    line: int
    visit: int = 1

    def __str__(self) -> str:
        return f"{self.code.co_filename.removeprefix(PACKAGE)}:{self.line} ({self.code.co_name}), visit {self.visit}"


def is_finalized(frame: FrameType | None) -> bool:
    """Return whether a frame runs in a finalizer, whose exceptions Python reports and drops."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def is_interruptible(frame: FrameType) -> bool:
    """Return whether an interrupt at the beginning of this line could reach the caller.

    Python raises none between the last statement of a `with` block and its `__exit__`, although tracing reports the
    line of the `with` once more there; and it drops what a finalizer raises.
    """
    code, line = frame.f_code, frame.f_lineno
    if linecache.getline(code.co_filename, line).lstrip().startswith("with ") and frame.f_lasti != _first(code, line):
        return False
    return not is_finalized(frame)


@cache
def _first(code: CodeType, line: int) -> int:
    """Return the offset of the first instruction of a line."""
    return min(start for start, _, number in code.co_lines() if number == line)


def visited_lines(work: Callable[[], None]) -> Counter[Place]:
    """Run `work` and return how often this thread reached each line of the package, in order of the first visits."""
    visits: Counter[Place] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and is_interruptible(frame):
            visits[Place(frame.f_code, frame.f_lineno)] += 1
        return note

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return note if frame.f_code.co_filename.startswith(PACKAGE) else None

    _traced(enter, work)
    return visits


def interrupted_at(place: Place, work: Callable[[], None], then: int = 0) -> bool:
    """Run `work` with an interrupt at this place; return whether the place was reached.

    A second interrupt comes `then` calls later (0: none), while the first is handled. Fails if `work` swallows the
    interrupt or raises another exception.
    """
    left = place.visit

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno == place.line and is_interruptible(frame):
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code is place.code and left else None

    def again(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal then
        if left <= 0 < then and event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            then -= not is_finalized(frame)
            if not then:
                raise KeyboardInterrupt

    try:
        _traced(enter, work, again if then else None)
    except KeyboardInterrupt:
        return True
    assert left > 0, f"the interrupt at {place} was swallowed"
    return False


Tracer = Callable[[FrameType, str, Any], Any]


def _traced(enter: Tracer, work: Callable[[], None], profile: Tracer | None = None) -> None:
    gc.disable()  # an interrupt in a finalizer of another test's object would be reported for that test
    sys.settrace(enter)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()


def places(visits: Counter[Place]) -> list[Place]:
    """Return every visit of each line as a place."""
    return [Place(code, line, visit) for (code, line, _), count in visits.items() for visit in range(1, count + 1)]
