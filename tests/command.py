"""Runs commands of outpace in the test's own process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from outpace.cli.main import main


def run_command(*words: object) -> tuple[int, str, str]:
    """Run a command; return its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def last_line(out: str) -> dict[str, Any]:
    """Return the JSON object in the last line of the output."""
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
