"""Child processes: start an interpreter that runs a line of code, and end it within a bounded time.

Nothing is registered to run at exit. A child must exit when its standard input closes, and `stop` closes it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

_REAP_SECONDS = 10.0  # to wait for a killed process; after that it is left to the system
_KILLED = -9
_PATHS = "import sys; count = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + count]; del sys.argv[1 : 2 + count]; "


def start(
    code: str, *arguments: str, stdin: int = subprocess.PIPE, stdout: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs `code` with `arguments` in `sys.argv`, and this process's import paths.

    It runs in a session of its own, so that a Ctrl-C before the child can ignore it does not reach it.
    """
    command = [sys.executable, "-c", _PATHS + code, str(len(sys.path)), *map(str, sys.path), *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True)


def stop(process: subprocess.Popen[bytes], grace: float = 0.0) -> int:
    """Close the process's pipes, kill it if it is still running after `grace` seconds, and return its exit status."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unsent data for a process that has exited
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
    """Describe how a process with this exit status ended."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
