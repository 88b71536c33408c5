"""The one thread that steps the engine: commands in, what was written out, once a step; asleep while it is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence
from outpace.server.choices import Choice, Delta, Ended


class Update(NamedTuple):
    """What a step did for a choice; neither a delta nor an end: the engine has begun with it."""

    choice: Choice
    delta: Delta | None
    ended: Ended | None


Deliver = Callable[[Sequence[Update]], None]


class EngineThread:
    """Owns the engine from `start` to `stop`. All methods but the thread's own return at once, in any thread."""

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        report: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` is called in the engine's thread, once a step that had something to tell; `report` with an error
        that no request is to blame for. `clock` measures how long a step takes."""
        self.engine, self._clock = engine, clock
        self._deliver, self._report = deliver, report
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._live: dict[Choice, TokenSequence] = {}
        self._sent: dict[Choice, int] = {}  # tokens that were delivered
        self._waiting: set[Choice] = set()  # those with which the engine has not begun, or not told it
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._busy_since: float | None = None  # when the step that is under way, or due, began
        self._is_over = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after its step; whether it has ended in time."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """The thread's, to find its stack by."""
        return self._thread.ident

    @property
    def step_age(self) -> float:
        """Seconds since the last step ended, while work is pending."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def submit(self, choices: Sequence[Choice]) -> Future[None]:
        """Hands in the choices of one request, all or none; the result is UserError where one can never run."""
        done: Future[None] = Future()
        self._commands.put(lambda: self._take(choices, done))
        return done

    def abort(self, choices: Sequence[Choice]) -> None:
        """Ends choices; what they hold is given back by the next step."""
        self._commands.put(lambda: self._end(choices))

    def _work(self) -> None:
        while True:
            self._obey()
            if self._is_over:
                break
            self._busy_since = self._clock()
            try:
                self.engine.step()
            except Exception as error:  # of no request: the engine's own
                self._report(error)
                for run in self._live.values():
                    run.fail(error)
                self.engine.sweep()
            self._tell()
        while not self._commands.empty():  # of those that came too late
            if (command := self._commands.get()) is not None:
                command()
        self._end(list(self._live))
        self.engine.sweep()
        self._tell()

    def _obey(self) -> None:
        """Carries out what is there, and waits for something to do."""
        if not self._live:
            self._busy_since = None
        while True:
            try:
                command = self._commands.get(block=not self._live)
            except Empty:
                return
            if command is None:
                self._is_over = True
                return
            command()

    def _take(self, choices: Sequence[Choice], done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            for choice in choices:
                asked = choice.asked
                run = self.engine.submit(asked.request, asked.decoder, asked.options, asked.text.watch, asked.drafter)
                choice.run = self._live[choice] = run
                self._sent[choice] = 0
                self._waiting.add(choice)
            done.set_result(None)
        except BaseException as error:
            self._end(choices)
            for choice in choices:
                self._forget(choice)
            done.set_exception(error)

    def _end(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            if choice in self._live:
                self.engine.abort(self._live[choice])

    def _tell(self) -> None:
        """Delivers what the last step wrote, and whom it ended."""
        updates = []
        for choice, run in list(self._live.items()):
            ended = self._ended(choice, run) if run.finish_reason is not None else None
            delta = self._delta(choice, run)
            begins = run.history.began and choice in self._waiting
            if begins:
                self._waiting.remove(choice)
            if begins or delta is not None or ended is not None:
                updates.append(Update(choice, delta, ended))
            if ended is not None:
                self._forget(choice)
        if updates:
            self._deliver(updates)

    def _delta(self, choice: Choice, run: TokenSequence) -> Delta | None:
        pieces, history = choice.asked.text.pieces, run.history
        if not pieces:
            return None
        parts = []
        while pieces:
            piece = pieces.popleft()
            start = self._sent.get(choice, 0)
            end = self._sent[choice] = start + len(piece.tokens)
            sources, records = history.sources[start:end], history.logprobs[start:end]
            parts.append(Delta(piece.text, piece.tokens, tuple(sources), tuple(records)))
        rounds = zip(history.rounds, history.steps[-len(history.rounds) :], strict=False) if history.rounds else ()
        parts[-1] = replace(parts[-1], rounds=tuple(rounds))
        history.rounds.clear()
        return Delta.merged(parts)

    def _ended(self, choice: Choice, run: TokenSequence) -> Ended:
        """Its text is over: what was held back is handed out."""
        assert run.finish_reason is not None
        text, stop = choice.asked.text, None
        if run.error is None:
            text.finish()
        if run.finish_reason == "stop":
            last = run.committed[-1]
            stop = text.stop_string if text.stop_string is not None else last if last in choice.stop_ids else None
        speedup = self.engine.costs.speedup(len(self._live))
        return Ended(run.finish_reason, stop, run.error, run.history, len(run.tokens), speedup)

    def _forget(self, choice: Choice) -> None:
        self._live.pop(choice, None)
        self._sent.pop(choice, None)
        self._waiting.discard(choice)
