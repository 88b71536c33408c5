"""Renders a model's chat template, a Jinja text from its files, in a process of its own with bounded time and memory.

A template is a program of the model's maker. Jinja's sandbox keeps it from reaching for anything, but not from running
for ever or from filling the memory, and neither can be stopped from within: so another process renders, which the
system stops. It starts at the first use, serves all that follow, and ends when this one does, however that ends.
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

PATIENCE = 30.0  # seconds for one answer; the process itself stops after template_process.SECONDS of work
LONGEST_WORDS = 500  # characters of a template's own words that are shown
CODE = "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"


class ChatTemplate:
    """One template and, from its first use on, the process that renders it. Usable from several threads."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of the conversation; UserError if the template is not valid, raises, or takes too much."""
        try:
            asked = json.dumps({"messages": [dict(message) for message in messages], **values}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages and tools must be plain JSON values ({error})") from error
        with self._lock:
            answer = self._asked(asked)
        if "text" in answer:
            return str(answer["text"])
        raise UserError(f"the model's chat template {answer['refusal'][:LONGEST_WORDS]}")

    def close(self) -> None:
        """Ends the process; a later `render` starts another."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _asked(self, question: bytes) -> dict[str, Any]:
        process = self._running()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(PATIENCE, process.kill)
            timer.daemon = True
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):  # it died: there will be no answer
                    process.stdin.write(question + b"\n")
                    process.stdin.flush()
                line = process.stdout.readline()
            finally:
                timer.cancel()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        except BaseException:
            self._stop()  # interrupted between question and answer: the next one would get this one's
            raise
        self._stop()
        limits = f"{template_process.SECONDS} seconds or {template_process.BYTES >> 20} MiB"
        return {"refusal": f"takes more than {limits}, it was stopped"}

    def _running(self) -> subprocess.Popen[bytes]:
        """The process; a new one where somebody has killed it since the last question."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            process = child_process.start(
                CODE,
                template_process.__file__,
                stderr=subprocess.DEVNULL,
                flags=("-I", "-S"),
                paths=[path for path in sys.path if path],  # not of the folder that the program happens to run in
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(self.text).encode() + b"\n")
            self._process = process
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        child_process.stop(process)
