"""A peer in a process of its own: engines that share a process share libraries of threads, and slow one another down.

OpenMP waits for its threads actively only while a program has no more of them than cores: beside torch in one process
llama.cpp took 11 ms a token, alone 7.5. The two processes talk through pipes; who waits for an answer uses no core.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Sequence
from typing import IO, Any

from outpace.bench import contenders, peers
from outpace.bench.peer import Answered, PeerSettings
from outpace.core import child_process

_CODE = "from outpace.bench.apart import main; main()"
_GRACE_SECONDS = 5.0  # for a process that was asked to end


class PeerProcessError(RuntimeError):
    """A peer's process ended by itself."""


class Apart:
    """A peer, and the process that it runs in. What the peer raises is raised here."""

    def __init__(self, name: str, settings: PeerSettings) -> None:
        self._process = child_process.start(_CODE)
        try:
            self.name, self.precision = self._ask((name, settings, list(peers.__path__)))
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answered:
        """Continues the prompt until a stop token, which counts, or `max_tokens`."""
        answered: Answered = self._ask((list(prompt), max_tokens))
        return answered

    def close(self) -> None:
        """Ends the process."""
        child_process.stop(self._process, _GRACE_SECONDS)

    def _ask(self, question: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if self._process.returncode is not None:
                raise EOFError
            _say(stdin, question)
            answer = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = child_process.stop(self._process, _GRACE_SECONDS)
            raise PeerProcessError(f"its process {child_process.describe_exit(status)}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def main() -> None:
    """The process: builds the peer that it is told, then answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the bench, which then closes the pipes
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an engine may print what it likes
    peer: Any = None
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            break
        try:
            if peer is None:
                name, settings, peers.__path__ = question
                peer = contenders.find_peer(name).build(settings)
                answer: Any = peer.name, peer.precision
            else:
                answer = peer.answer(*question)
        except Exception as error:
            answer = error
        try:
            _say(answers, answer)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more
    if peer is not None:
        peer.close()


def _say(pipe: IO[bytes], message: Any) -> None:
    """An error that does not survive pickling goes as its name and text."""
    try:
        data = pickle.dumps(message)
        if isinstance(message, Exception):
            pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(message).__name__}: {message}"))
    pipe.write(data)
    pipe.flush()
