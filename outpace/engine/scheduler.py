"""The scheduler: admits requests in order of arrival, preempts them when memory ends, and releases finished ones."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from outpace.engine.draft_runner import DraftRunner
from outpace.engine.earlier_texts import AnswerCache
from outpace.engine.kv_memory import KVMemory
from outpace.engine.sequence import TokenSequence


class Scheduler:
    """Keeps `waiting` (paused sequences included) and `running` in order of arrival.

    The oldest sequence is never paused while another runs, so it finishes, and then the next is the oldest.

    An interrupt may come between any two statements. Therefore a sequence enters `running` before it acquires anything
    and leaves it after everything was released, and each release may be repeated.
    """

    def __init__(
        self,
        memory: KVMemory,
        drafting: DraftRunner,
        batch: int,
        clock: Callable[[], float],
        answers: AnswerCache | None,
    ) -> None:
        """`batch` sequences run at once; `answers` stores the texts of finished ones."""
        self._memory, self._drafting, self._batch, self._clock = memory, drafting, batch, clock
        self._answers = answers
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []

    def enqueue(self, sequence: TokenSequence) -> None:
        insort(self.waiting, sequence, key=_age)

    def admit(self) -> list[TokenSequence]:
        """Start waiting sequences in order of arrival while there is memory; return those that were tried."""
        tried: list[TokenSequence] = []
        for sequence in list(self.waiting) if self.waiting else ():
            if len(self.running) >= self._batch or not self._memory.has_room(sequence):
                break
            if self._memory.should_wait(sequence):
                continue
            insort(self.running, sequence, key=_age)
            self.waiting.remove(sequence)
            tried.append(sequence)
            try:
                self._memory.open(sequence)
                self._start(sequence)
            except Exception as error:
                self.fail([sequence], error)
                self.sweep()
        return tried

    def reserve(self, rows: Iterable[tuple[TokenSequence, int]]) -> bool:
        """Reserve slots for the rows of each sequence, oldest first. Return False if memory ended, after pausing the
        youngest sequence: the caller must build its batch again."""
        for sequence, count in rows:
            try:
                if not self._memory.fit(sequence, count):
                    self._pause(self.running[-1])
                    return False
            except Exception as error:
                self.fail([sequence], error)
                return False
        return True

    def sweep(self) -> list[TokenSequence]:
        """Release finished sequences; return those that had been started."""
        done = dict.fromkeys([one for one in [*self.running, *self.waiting] if one.finish_reason is not None])
        if not done:
            return []
        started = [sequence for sequence in done if sequence in self.running or sequence.coroutine]
        for sequence in started:
            self._end(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if sequence not in done)
        self.running = [sequence for sequence in self.running if sequence not in done]
        return started

    def fail(self, sequences: Sequence[TokenSequence], error: Exception, reason: str = "error") -> None:
        """End these sequences, whose rounds failed, so that the content of their sessions is unknown. Each keeps its
        tokens."""
        for sequence in sequences:
            sequence.kv.is_broken = True
            if sequence.finish_reason is None:
                sequence.error, sequence.finish_reason = error, reason

    def _start(self, sequence: TokenSequence) -> None:
        """Start a sequence that has got a session, or continue it after a pause."""
        if sequence.coroutine is None:
            sequence.history.began, sequence.history.reused = self._clock(), sequence.prefilled
            self._drafting.open(sequence)
            sequence.coroutine = sequence.decoder.decode(sequence.context, sequence.options)
        else:
            self._drafting.resume(sequence)

    def _end(self, sequence: TokenSequence) -> None:
        if sequence.coroutine:
            sequence.coroutine.close()
        sequence.coroutine = sequence.action = None  # releases the last tree and its q rows
        self._drafting.close(sequence)
        self._memory.close(sequence)
        if self._answers is not None:
            self._answers.store(sequence.request, sequence.committed)

    def _pause(self, sequence: TokenSequence) -> None:
        """Preempt a sequence: release its keys and values and its draft's until there is memory for them. Everything
        else stays: its text is read again like a prompt, and then what its decoder waits for now is done."""
        self._drafting.pause(sequence)
        self._memory.release(sequence)
        if sequence.needs_prompt_logprobs:
            sequence.history.prompt_logprobs.clear()
        insort(self.waiting, sequence, key=_age)
        self.running.remove(sequence)


def _age(sequence: TokenSequence) -> int:
    """Return the sort key for the order of arrival."""
    return sequence.key
