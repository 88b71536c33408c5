"""Defines peers, the engines that a bench measures, and runs other projects' engines in child processes.

A peer gets a process of its own because engines in one process slow one another down: OpenMP waits actively for its
threads only while a program has no more threads than cores. In one process with torch, llama.cpp took 11 ms per token;
alone 7.5 ms. The processes talk through pipes, and waiting for an answer uses no core.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from outpace.bench import contenders, peers
from outpace.core import child_process
from outpace.core.stats import Positions

T = TypeVar("T")
_CODE = "from outpace.bench.peer import main; main()"
GRACE_SECONDS = 5.0  # for a process to end by itself


@dataclass(frozen=True)
class TimedAnswer:
    """An unbatched answer to one prompt, with its times in seconds after the call.

    `first_token` is the first token's arrival; `arrivals` has one time per round, `counts` the tokens of each round.
    `drafted` counts verified draft tokens; it and `accepted` are None where the engine does not report them.
    `positions` counts the rounds that offered and that accepted an i-th draft token.

    Only outpace's own methods report the rest. `hits` and `misses` are CARD's; `relaxed` counts the tokens that the
    exact rule would have rejected, None if the rule is exact. `experts` is the mean number that a pass applied in a
    layer. `sources` lists (drafter, verified tokens, emitted tokens).
    """

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    first_token: float = 0.0
    arrivals: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    drafted: int | None = None
    accepted: int | None = None
    positions: Positions = ()
    hits: int = 0
    misses: int = 0
    relaxed: int | None = None
    experts: float | None = None
    sources: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class PeerSettings:
    """The settings of all peers. `target` and `draft` are as the user named them (None: shipped model, no draft)."""

    target: str | Path | None
    draft: str | Path | None
    stop_ids: frozenset[int]
    threads: int
    max_context: int


class Peer(Protocol):
    """A loaded engine that decodes greedily."""

    name: str
    precision: str  # as int8, float32, Q8_0: only texts of one precision are compared

    def answer(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        """Continue the prompt until a stop token, which is included, or `max_tokens`."""

    def close(self) -> None:
        """Free the memory and end processes."""


class PeerProcessError(RuntimeError):
    """A child process ended unexpectedly."""


class CallProcess:
    """A child process that calls functions; their exceptions are raised here."""

    def __init__(self) -> None:
        self._process = child_process.start(_CODE)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if self._process.returncode is not None:
                raise EOFError
            _send(stdin, (function, arguments))
            result: T | Exception = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = child_process.stop(self._process, GRACE_SECONDS)
            raise PeerProcessError(f"its process {child_process.describe_exit(status)}") from None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        child_process.stop(self._process, GRACE_SECONDS)


class PeerProcess(CallProcess):
    """A peer in a child process."""

    def __init__(self, name: str, settings: PeerSettings) -> None:
        super().__init__()
        try:
            self.name, self.precision = self.call(_open, name, settings, list(peers.__path__))
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        return self.call(_answer, list(prompt), max_tokens)


_opened: list[Peer] = []  # in the child process: its peer


def _open(name: str, settings: PeerSettings, folders: list[str]) -> tuple[str, str]:
    peers.__path__ = folders
    _opened.append(contenders.find_peer(name).build(settings))
    return _opened[0].name, _opened[0].precision


def _answer(prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
    return _opened[0].answer(prompt, max_tokens)


def main() -> None:
    """Run the child process: answer calls until the input pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the bench, which then closes the pipes
    calls = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an engine may print to stdout
    while True:
        try:
            function, arguments = pickle.load(calls)
            result = function(*arguments)
        except EOFError:
            break
        except Exception as error:
            result = error
        try:
            _send(results, result)
        except BrokenPipeError:
            os._exit(1)  # the bench is gone
    for peer in _opened:
        peer.close()


def _send(pipe: IO[bytes], message: Any) -> None:
    """Pickle a message into a pipe; an exception that cannot be pickled is sent as a RuntimeError with its text."""
    try:
        data = pickle.dumps(message)
        if isinstance(message, Exception):
            pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(message).__name__}: {message}"))
    pipe.write(data)
    pipe.flush()
