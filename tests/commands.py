"""The program outpace, run in this process on a tiny random model."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def run(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return exit status, stdout and stderr."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as end:
            main(arguments)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err, shown.err
        return int(end.value.code or 0), shown.out, shown.err

    return call
