"""The server's log on standard error, without the texts of requests and answers: one JSON object a line, or, on a
terminal, one readable line."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any


def write(event: str, **fields: Any) -> None:
    """Write one line."""
    if sys.stderr.isatty():
        line = f"{time.strftime('%H:%M:%S')} {_readable(event, fields)}"
    else:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, default=str)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _readable(event: str, fields: Mapping[str, Any]) -> str:
    """Return an event for people: of a request its status, path, tokens, seconds and speed, and what went wrong."""
    if event != "request":
        return " ".join([event, *(f"{name}={value}" for name, value in fields.items())])
    parts = [f"{fields.get('status', '-')} {fields['method']} {fields['path']}"]
    seconds, written = fields["seconds"], fields.get("completion_tokens")
    if written is not None:
        parts.append(f"{fields.get('prompt_tokens', 0)}+{written} tokens")
    parts.append(f"{seconds:.2f} s")
    if written and seconds:
        parts.append(f"{written / seconds:.0f} tokens/s")
    parts += [f"{name}: {fields[name]}" for name in ("error", "ignored") if fields.get(name)]
    return "".join(sign if sign.isprintable() else "?" for sign in "  ".join(parts))


def fault(error: BaseException, **fields: Any) -> None:
    """Log a bug with its traceback, but without the error's message, which may quote a request."""
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    write("fault", error=type(error).__name__, trace=trace, **fields)


def stacks() -> None:
    """Log the stack of every thread."""
    for ident, frame in sys._current_frames().items():
        trace = [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)]
        write("stack", thread=ident, trace=trace)
