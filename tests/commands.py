"""The program outpace, run in this process on a tiny random model."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from files import write_gguf

from outpace.api.stream import Result
from outpace.cli.main import main
from outpace.core.stats import summarize

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent


def answer(text: str, *tokens: int, seconds: float = 1.0) -> Result:
    """Return an answer of method card with these tokens."""
    return Result(text, tokens, "stop", "card", 0, seconds, 0.1, len(tokens) / seconds, summarize([]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a long context; its cache folder is in the same folder."""
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 16384})


@pytest.fixture
def environment(tiny: Path) -> dict[str, str]:
    """The environment of a process of its own."""
    return os.environ | {"OUTPACE_CACHE": str(tiny.parent / "cache"), "PYTHONPATH": str(ROOT)}


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


@pytest.fixture
def run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with its own cache folder and standard input."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run_command(*arguments)

    return call
