"""The server's log on standard error: one JSON object a line, without the texts of requests and answers."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any


def write(event: str, **fields: Any) -> None:
    """Write one line."""
    record = {"time": round(time.time(), 3), "event": event, **fields}
    sys.stderr.write(json.dumps(record, default=str) + "\n")
    sys.stderr.flush()


def fault(error: BaseException, **fields: Any) -> None:
    """Log a bug with its traceback, but without the error's message, which may quote a request."""
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    write("fault", error=type(error).__name__, trace=trace, **fields)


def stacks() -> None:
    """Log the stack of every thread."""
    for ident, frame in sys._current_frames().items():
        trace = [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)]
        write("stack", thread=ident, trace=trace)
