"""Who waits and who runs: requests join in the order in which they came, pause where memory ends, and go when over."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from outpace.engine.answer_cache import AnswerCache
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.kv_memory import KVMemory
from outpace.engine.sequence import TokenSequence


class Scheduler:
    """`waiting` and `running` are in the order in which the requests came; those that are paused wait, too.

    The oldest request is never paused while another one runs, so it comes to its end, and then the next is the oldest.
    """

    def __init__(
        self,
        memory: KVMemory,
        drafting: DraftRunner,
        batch: int,
        clock: Callable[[], float],
        recall: AnswerCache | None,
    ) -> None:
        """`batch` requests run at once; `load_state_dict` keeps the texts of those that are over."""
        self._memory, self._drafting, self._batch, self._clock = memory, drafting, batch, clock
        self._recall = recall
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []

    @property
    def may_join(self) -> bool:
        """Whether somebody waits for whom there is a place."""
        return bool(self.waiting) and len(self.running) < self._batch

    def join(self) -> list[TokenSequence]:
        """Opens waiting requests, first come first served, while there is room for them; gives those tried."""
        tried: list[TokenSequence] = []
        for run in list(self.waiting) if self.waiting else ():
            if len(self.running) >= self._batch or not self._memory.has_room(run):
                break
            if self._memory.should_wait(run):
                continue
            self.waiting.remove(run)
            tried.append(run)
            try:
                self._memory.open(run)
                self._begin(run)
            except BaseException as error:
                if run not in self.running:
                    self._end(run)
                self.fail([run], error)
        return tried

    def fit(self, rows: Iterable[tuple[TokenSequence, int]]) -> bool:
        """Makes slots for so many rows of each request, which come oldest first. False: memory ended, the youngest
        request was paused, and what is left is to be asked again."""
        for run, count in rows:
            try:
                if not self._memory.fit(run, count):
                    self._pause(self.running[-1])
                    return False
            except BaseException as error:
                self.fail([run], error)
                return False
        return True

    def sweep(self) -> list[TokenSequence]:
        """Lets the requests go that are over; gives those that had begun."""
        over = [run for run in [*self.running, *self.waiting] if run.finish_reason is not None]
        if not over:
            return over
        begun = [run for run in over if run in self.running or run.coroutine]
        self.waiting = deque(run for run in self.waiting if run.finish_reason is None)
        self.running = [run for run in self.running if run.finish_reason is None]
        for run in begun:
            self._end(run)
        return begun

    def fail(self, runs: Sequence[TokenSequence], error: BaseException) -> None:
        """A round broke off: what its sessions hold is unknown, so all its requests end; each keeps what it wrote."""
        for run in runs:
            run.storage.is_broken = True
            if run.finish_reason is None:
                run.error = error if isinstance(error, Exception) else None
                run.finish_reason = "error" if run.error else "abort"
        if not isinstance(error, Exception):  # an interrupt is the caller's
            self.sweep()
            raise error

    def _begin(self, run: TokenSequence) -> None:
        """A request that has a session runs, or goes on after a pause."""
        insort(self.running, run, key=_age)
        if run.coroutine is None:
            run.history.began, run.history.reused = self._clock(), run.prefilled
            self._drafting.open(run)
            run.coroutine = run.decoder.decode(run.place, run.options)
        else:
            self._drafting.resume(run)
        run.is_due = run.ask is None and not run.is_prefilling

    def _end(self, run: TokenSequence) -> None:
        if run.coroutine:
            run.coroutine.close()
        run.coroutine = run.ask = None  # with the last tree, and the q rows in it
        self._drafting.close(run)
        self._memory.close(run)
        if self._recall is not None:
            self._recall.keep(run.request, run.committed)

    def _pause(self, run: TokenSequence) -> None:
        """Takes a request's keys and values away, its draft's too, until there is room for them. All else stays as it
        is: what it has is read again as a prompt is, then it asks for what it asks for now."""
        self._drafting.pause(run)
        self.running.remove(run)
        self._memory.release(run)
        if run.reports_prompt:
            run.history.prompt_logprobs.clear()
        run.history.pauses += 1
        insort(self.waiting, run, key=_age)


def _age(run: TokenSequence) -> int:
    """Requests in the order in which they came."""
    return run.key
