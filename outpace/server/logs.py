"""The server's log: one line of JSON an event, on standard error, without the texts of requests and answers."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any


def write(event: str, **facts: Any) -> None:
    """One line."""
    record = {"time": round(time.time(), 3), "event": event, **facts}
    sys.stderr.write(json.dumps(record, default=str) + "\n")
    sys.stderr.flush()


def fault(error: BaseException, **facts: Any) -> None:
    """A bug, with its traceback; the message of the error may hold text and is left out."""
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    write("fault", error=type(error).__name__, trace=trace, **facts)


def stacks() -> None:
    """Where every thread stands."""
    for ident, frame in sys._current_frames().items():
        trace = [f"{found.filename}:{found.lineno} {found.name}" for found in traceback.extract_stack(frame)]
        write("stack", thread=ident, trace=trace)
