"""Ctrl-C on the command line: deferred to safe points; a second one ends the program; no files are left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from files import write_gguf

from outpace.cli import process
from outpace.cli.display import LoadingBar

ROOT = Path(__file__).parent.parent
SECONDS = 120.0


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_a_safe_point() -> None:
    passed = []

    @process.at_safe_points()
    def work() -> None:
        process.check()
        interrupt()
        passed.append("after the interrupt")
        process.check()
        passed.append("after the safe point")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert passed == ["after the interrupt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_end_of_the_block_is_a_safe_point() -> None:
    passed = []

    @process.at_safe_points()
    def work() -> None:
        with process.at_safe_points():
            interrupt()
        passed.append("a block within")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert passed == ["a block within"]


def test_another_error_comes_before_the_interrupt() -> None:
    @process.at_safe_points()
    def work() -> None:
        interrupt()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        work()


def test_take_forgets_the_interrupt() -> None:
    with process.at_safe_points():
        assert not process.take()
        interrupt()
        assert process.take()
        assert not process.take()
        process.check()
        interrupt()  # a first one again
        assert process.take()


def test_an_answer_is_stopped_at_once_or_before_it_begins() -> None:
    stopped: list[int] = []
    with process.at_safe_points():
        with process.stopping(lambda: stopped.append(1)):
            interrupt()
            assert stopped == [1]
        with process.stopping(lambda: stopped.append(2)):  # the first interrupt is still pending
            assert stopped == [1, 2]
        assert process.take()
        interrupt()
        assert stopped == [1, 2]
        assert process.take()
    with process.stopping(lambda: stopped.append(3)), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert stopped == [1, 2]


def test_an_interrupt_while_typing() -> None:
    with process.at_safe_points():
        with pytest.raises(KeyboardInterrupt), process.at_any_point():
            interrupt()
        interrupt()
        with pytest.raises(KeyboardInterrupt), process.at_any_point():
            pytest.fail("it came before")
        process.check()


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for block in (process.at_safe_points(), process.at_any_point(), process.stopping(lambda: None)):
            with block:
                interrupt()
                process.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stage_of_loading_is_a_safe_point() -> None:
    def load(bar: LoadingBar) -> None:
        bar("reading", 0.0)
        interrupt()
        bar("reading", 0.5)
        pytest.fail("it went on reading")

    with pytest.raises(KeyboardInterrupt), LoadingBar() as bar:
        load(bar)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 16384})


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, tiny: Path) -> Run:
    """Run a script and then the program in one process; return exit status, stdout and stderr."""

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        words = ["outpace", *arguments, *(["--target", str(tiny)] if arguments[0] != "methods" else [])]
        code = f"import os, signal, sys\nsys.argv = {words!r}\n{script}\nfrom outpace.__main__ import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OUTPACE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


WHEN_IMPORTED = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
AT_STAGE = """
from outpace.cli import display
class Bar(display.LoadingBar):
    stages = 0
    def __call__(self, stage, fraction):
        Bar.stages += 1
        if Bar.stages == {count}:
            signal.raise_signal(signal.SIGINT)
        super().__call__(stage, fraction)
display.LoadingBar = Bar
"""
AT_PIECE = """
from outpace.api.stream import Stream
piece, pieces = Stream._piece, []
def interrupted(self, *given):
    pieces.append(1)
    for _ in range({times}):
        len(pieces) == {count} and signal.raise_signal(signal.SIGINT)
    return piece(self, *given)
Stream._piece = interrupted
"""
ANSWER = ("generate", "hello", "--max-tokens", "16000", "--ignore-eos")


@pytest.mark.parametrize("module", ["typer", "outpace.cli.main"])
def test_during_imports_the_signal_ends_the_program(run: Run, module: str) -> None:
    assert run(WHEN_IMPORTED.format(module=module), *ANSWER)[0] == -signal.SIGINT


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, "auto"),
        *(pytest.param(count, "float32", marks=pytest.mark.long) for count in (1, 3, 6)),
    ],
)
def test_interrupted_loading(run: Run, tmp_path: Path, count: int, dtype: str) -> None:
    assert run(AT_STAGE.format(count=count), *ANSWER, "--dtype", dtype)[0] == process.INTERRUPTED
    left = [file.name for file in (tmp_path / "cache").glob(".*.part-*")]
    assert left == []


WAYS: dict[str, Sequence[str]] = {
    "auto": (),
    "card, thread": ("--method", "card", "--drafter", "ngram"),
    "card, process": ("--method", "card", "--drafter", "ngram", "--worker", "process"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_answer(run: Run, way: str) -> None:
    code, out, err = run(AT_PIECE.format(count=9, times=1), *ANSWER, *WAYS[way])
    assert code == process.INTERRUPTED
    assert out.endswith("\n")
    assert err.endswith(", stopped\n")


def test_the_json_has_the_text_so_far(run: Run) -> None:
    code, out, _ = run(AT_PIECE.format(count=9, times=1), *ANSWER, "--json")
    found = json.loads(out)
    assert (code, found["finish_reason"]) == (process.INTERRUPTED, "abort")
    assert 9 <= len(found["tokens"]) < 16000


def test_a_second_interrupt_ends_the_program(run: Run) -> None:
    code, out, _ = run(AT_PIECE.format(count=9, times=2), *ANSWER, "--json")
    assert (code, out) == (-signal.SIGINT, "")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_interrupt_from_outside(tiny: Path, tmp_path: Path, form: list[str]) -> None:
    script = f"""
import sys
from outpace.cli import display, main
from outpace.api.llm import Stream
class Loud(Stream):
    def _piece(self, *given):
        sys.stderr.write("."); sys.stderr.flush()
        return super()._piece(*given)
import outpace.api.llm; outpace.api.llm.Stream = Loud
main.main({[*ANSWER, "--target", str(tiny), *form]})
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"OUTPACE_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    assert child.stderr is not None
    assert child.stderr.read(8) == b"." * 8
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=SECONDS)
    assert child.returncode == process.INTERRUPTED, err
    assert b"Traceback" not in err
    assert out.endswith(b"\n")
    if form:
        assert json.loads(out)["finish_reason"] == "abort"
    else:
        assert b", stopped\n" in err
