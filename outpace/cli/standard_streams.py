"""Standard input, output and error as commands may rely on them: what goes wrong there is a sentence, if anything."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from outpace.core.errors import UserError


class OutputError(UserError):
    """Standard output takes nothing more."""


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written ({error.strerror})") from error


class _Errors(io.FileIO):
    """What cannot be said is left unsaid: there is nowhere to say so."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare() -> None:
    """Once, before anything is said. OutputError where standard output is closed."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: no other file may get it
    sys.stderr = open(os.devnull, "w") if sys.stderr is None else _wrapped(sys.stderr, _Errors)  # noqa: SIM115
    if sys.stdout is None:
        raise OutputError("standard output is closed, there is nowhere to write to")
    sys.stdout = _wrapped(sys.stdout, _Output)


def silence() -> None:
    """Whatever is still to be written to standard output goes nowhere: the interpreter flushes it once more."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reading() -> Iterator[TextIO]:
    """Standard input, for the block. UserError where it is closed, or holds no text."""
    if sys.stdin is None:
        raise UserError("standard input is closed, there is nothing to read from")
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "surrogateescape":  # in the locale C.UTF-8
        with suppress(io.UnsupportedOperation):  # where it has been read from
            sys.stdin.reconfigure(errors="strict")
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in {error.encoding} (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"standard input cannot be read ({error.strerror or error})") from error


def _wrapped(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """The same file with another way to fail; a stream that is no plain file stays as it is."""
    file = getattr(getattr(stream, "buffer", None), "raw", None) or getattr(stream, "buffer", None)
    if type(file) is not io.FileIO:
        return stream
    stream.flush()
    raw = kind(file.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        errors="replace",  # a terminal that cannot show a character is no reason to fail
        line_buffering=bool(stream.line_buffering),
    )
