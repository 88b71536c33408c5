"""Renders a model's Jinja chat template in a child process with bounded time and memory.

A template is a program written by the model's author. Jinja's sandbox keeps it from accessing anything, but not from
looping for ever or filling the memory, and neither can be stopped from within. So a child process renders, and the
system stops it. It starts at the first use, serves all later ones, and ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core import child_process
from outpace.core.errors import UserError
from outpace.models.text import template_process

PATIENCE = 30.0  # seconds to wait for an answer; the process stops itself after template_process.SECONDS of CPU time
MAX_ERROR_CHARACTERS = 500  # characters of a template's own error message that are shown
CODE = "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"


class ChatTemplate:
    """One template and, after its first use, the process that renders it. Thread-safe."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> str:
        """Return the text of the conversation; UserError if the template is invalid, raises, or exceeds its limits."""
        try:
            request = json.dumps({"messages": [dict(message) for message in messages], **values}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages and tools must be plain JSON values ({error})") from error
        with self._lock:
            answer = self._exchange(request)
        if "text" in answer:
            return str(answer["text"])
        raise UserError(f"the model's chat template {answer['refusal'][:MAX_ERROR_CHARACTERS]}")

    def close(self) -> None:
        """End the process; a later `render` starts another."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(PATIENCE, process.kill)
        timer.daemon = True
        answer: dict[str, Any] | None = None
        try:
            timer.start()
            with contextlib.suppress(BrokenPipeError):  # it died; the read below returns nothing
                process.stdin.write(request + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line) if line else None
        finally:
            timer.cancel()
            if answer is None:
                self._stop()  # the next request must not read this one's answer
        limits = f"{template_process.SECONDS} seconds or {template_process.BYTES >> 20} MiB"
        return answer or {"refusal": f"takes more than {limits}, it was stopped"}

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started anew if it was killed since the last request."""
        process = self._process
        if process is not None and (process.poll() is not None or (process.stdin and process.stdin.closed)):
            self._stop()  # it has ended, or an interrupt came while it was being ended
        if self._process is None:
            try:
                self._process = child_process.start(
                    CODE,
                    template_process.__file__,
                    stderr=subprocess.DEVNULL,
                    flags=("-I", "-S"),
                    paths=[path for path in sys.path if path],  # without the current folder
                )
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(json.dumps(self.text).encode() + b"\n")
            except BaseException:
                self._stop()  # the process may have read a part of the template
                raise
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            child_process.stop(self._process)
            self._process = None
