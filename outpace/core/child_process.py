"""Processes of our own: a new interpreter that runs a line of code, and its end within a bounded time.

Nothing is registered to run at the program's exit, and nothing has a name: a child is to end when its standard input
does, and `end` sees to it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_REAP_SECONDS = 10.0  # for a process that was killed: one that the system holds up is left to it
_KILLED = -9
_PATHS = "import sys; count = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + count]; del sys.argv[1 : 2 + count]; "


def start(
    code: str,
    *arguments: str,
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
    flags: Sequence[str] = (),
    paths: Sequence[str] | None = None,
) -> subprocess.Popen[bytes]:
    """An interpreter with these flags and import paths (None: this one's) that runs `code`, `arguments` in `sys.argv`.

    In a session of its own: a Ctrl-C that comes before the child can ignore it does not reach it.
    """
    paths = list(map(str, sys.path if paths is None else paths))
    command = [sys.executable, *flags, "-c", _PATHS + code, str(len(paths)), *paths, *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def stop(process: subprocess.Popen[bytes], grace: float = 0.0) -> int:
    """Closes the process's pipes, kills it where it has not ended after `grace` seconds, and gives its exit status."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not sent, to a process that is gone
                pipe.close()
    try:
        return process.wait(grace)
    except BaseException as error:
        process.kill()  # stopped processes, too
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    try:
        return process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        return _KILLED


def describe_exit(status: int) -> str:
    """How a process with this exit status ended, in words."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
