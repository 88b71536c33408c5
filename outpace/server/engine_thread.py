"""The thread that steps the engine. It runs commands between steps, delivers the output of each, and sleeps if idle.

If the target computes asynchronously (on a GPU), the output of a step is decoded and delivered during the pass of the
next step, and commands run then too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple

from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd


class ChoiceUpdate(NamedTuple):
    """What a step did for a choice. Without a delta and an end it reports that the engine has started the choice."""

    choice: Choice
    delta: ChoiceDelta | None
    ended: ChoiceEnd | None


class EngineThread:
    """Owner of the engine from `start` to `stop`. The public methods return at once and may be called in any thread."""

    def __init__(
        self, engine: Engine, deliver: Callable[[Sequence[ChoiceUpdate]], None], report: Callable[[Exception], None]
    ) -> None:
        """`deliver` is called in the engine's thread after each step with output; `report` with an error of a step
        that belongs to no request."""
        self.engine = engine
        self._deliver, self._report = deliver, report
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._live: dict[Choice, TokenSequence] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._busy_since: float | None = None  # start of the running or pending step

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread after its current step, and wait for that at most `timeout` seconds."""
        self._commands.put(None)
        self._thread.join(timeout)

    @property
    def step_age(self) -> float:
        """Seconds since the last step ended; 0 without pending work."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, choices: Sequence[Choice]) -> Future[None]:
        """Submit the choices of one request, all or none; the future raises UserError if one can never run."""
        done: Future[None] = Future()
        self._commands.put(lambda: self._submit(choices, done))
        return done

    def abort(self, choices: Sequence[Choice]) -> None:
        """Abort choices; the next step frees their memory."""
        self._commands.put(lambda: self._abort(choices))

    def _work(self) -> None:
        meanwhile = self._work_during_pass if self.engine.target.is_asynchronous else None
        while self._run_commands():
            self._busy_since = time.monotonic()
            try:
                self.engine.step(meanwhile)
            except Exception as error:  # errors of single requests do not get here
                self._report(error)
                for run in self._live.values():
                    run.fail(error)
                self.engine.sweep()
            if meanwhile is None or all(run.finish_reason is not None for run in self._live.values()):
                self._deliver_updates()  # else they are delivered during the next pass
        while not self._commands.empty():  # submitted after `stop`
            if (command := self._commands.get()) is not None:
                command()
        self._abort(list(self._live))
        self.engine.sweep()
        self._deliver_updates()

    def _work_during_pass(self) -> None:
        """Deliver the output of the previous step, and run the commands that have arrived since."""
        self._deliver_updates()
        while not self._commands.empty():  # only this thread takes commands
            if (command := self._commands.get()) is None:
                self._commands.put(None)  # `stop` takes effect after this step
                break
            command()

    def _run_commands(self) -> bool:
        """Run all pending commands; without work, wait for one. Return False after `stop`."""
        if not self._live:
            self._busy_since = None
        while True:
            try:
                command = self._commands.get(block=not self._live)
            except Empty:
                return True
            if command is None:
                return False
            command()

    def _submit(self, choices: Sequence[Choice], done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            for choice in choices:
                given = choice.prepared
                run = self.engine.submit(given.request, given.decoder, given.options, given.text.watch, given.drafter)
                choice.run = self._live[choice] = run
            done.set_result(None)
        except BaseException as error:
            self._abort(choices)
            for choice in choices:
                self._live.pop(choice, None)
            done.set_exception(error)

    def _abort(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            if choice in self._live:
                self.engine.abort(self._live[choice])

    def _deliver_updates(self) -> None:
        updates = []
        for choice, run in list(self._live.items()):
            ended = self._ended(choice, run) if run.finish_reason is not None else None
            delta = self._delta(choice, run)
            begins = bool(run.history.began) and not choice.is_start_sent
            choice.is_start_sent |= begins
            if begins or delta is not None or ended is not None:
                updates.append(ChoiceUpdate(choice, delta, ended))
            if ended is not None:
                del self._live[choice]
        if updates:
            self._deliver(updates)

    def _delta(self, choice: Choice, run: TokenSequence) -> ChoiceDelta | None:
        pieces, history = choice.prepared.text.pieces, run.history
        if not pieces:
            return None
        text = "".join(piece.text for piece in pieces)
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        start, choice.num_sent = choice.num_sent, choice.num_sent + len(tokens)
        sources, records = history.sources[start : choice.num_sent], history.logprobs[start : choice.num_sent]
        rounds = zip(history.rounds, history.steps[-len(history.rounds) :], strict=False) if history.rounds else ()
        delta = ChoiceDelta(text, tokens, tuple(sources), tuple(records), tuple(rounds))
        pieces.clear()
        history.rounds.clear()
        return delta

    def _ended(self, choice: Choice, run: TokenSequence) -> ChoiceEnd:
        """Flush the text that was held back for a stop string, and describe the end."""
        assert run.finish_reason is not None
        text, stop = choice.prepared.text, None
        if run.error is None:
            text.finish()
        if run.finish_reason == "stop":
            last = run.committed[-1]
            stop = text.stop_string if text.stop_string is not None else last if last in choice.stop_ids else None
        speedup = self.engine.costs.speedup(len(self._live))
        return ChoiceEnd(run.finish_reason, stop, run.error, run.history, len(run.tokens), speedup)
