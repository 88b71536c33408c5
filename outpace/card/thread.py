"""The drafter in a thread of its own that runs freely for the life of the engine and serves all its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from outpace.card.cache import CandidateCache
from outpace.card.loop import DraftLoop, Message
from outpace.card.worker import DraftWorker
from outpace.core.lazy import is_torch_loaded, torch
from outpace.core.types import Drafter

_POLL_SECONDS = 0.2  # how often an idle thread looks whether the program has ended
_PATIENCE = 2.0  # a wait lasts at most this many times what the drafter's forwards take on average


class ThreadWorker(DraftWorker):
    """Never joined a round: it reads corrections between forwards. An exception ends it and is kept in `failure`."""

    def __init__(self, drafter: Drafter, threads: int = 1, device: torch.device | str | None = None) -> None:
        """`threads`: how many cores one forward of the drafter may use (CPU). `device`: where its model is; on CUDA it
        works on a stream of its own, so that neither it nor the target waits for the other's work."""
        super().__init__()
        self._loop = DraftLoop(drafter)
        self._loop.begin_concurrent()
        self._threads = threads
        self._device = device
        self._stopping = self._resting = False
        self.step_seconds = 0.01
        self._ready: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outpace-drafter")
        before = torch.get_num_threads() if is_torch_loaded() else 0
        self._thread.start()
        try:
            self._ready.get()
        finally:
            if before:
                torch.set_num_threads(before)  # a thread's count is also the default of all threads that come after it

    @property
    def is_working(self) -> bool:
        return super().is_working and not self._resting

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        return 0 if self.failure else self._loop.stored_bytes(lengths)

    @property
    def num_captures(self) -> int:
        return self._loop.num_captures

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        if self.failure is None:
            cache.wait(layers, _PATIENCE * self.step_seconds * (max(layers, depth) + 1), depth)

    def stop(self) -> None:
        self._stopping = True
        self._loop.mail.put(None)

    def close(self) -> None:
        """Ends the thread after the forward that it is in, and the drafter."""
        self.stop()
        self._thread.join()
        self._loop.end()

    def _post(self, message: Message) -> None:
        if self.failure is None:
            self._resting = False
            self._loop.post(message)

    def _run(self) -> None:
        try:
            try:
                if is_torch_loaded():
                    torch.set_num_threads(self._threads)
                self._loop.limit_threads(self._threads)
            finally:
                self._ready.put(None)
            with own_stream(self._device):
                self._work()
        except BaseException as failure:
            self.failure = failure
            self._loop.drop(failure)
            for cache in list(self._caches.values()):
                cache.give_up()

    def _work(self) -> None:
        """Turns until it is closed, or the program ends without closing it: that is neither held up nor torn down."""
        main = threading.main_thread()
        while main.is_alive() and not self._stopping:
            self._resting = False
            start = time.perf_counter()
            layers = self._loop.grow()
            if layers:
                self._publish(layers)
                self.step_seconds += 0.1 * (time.perf_counter() - start - self.step_seconds)
            elif not self._loop.has_work:
                self._resting = self._loop.mail.empty()
                self._loop.wait(_POLL_SECONDS)


@contextmanager
def own_stream(device: torch.device | str | None) -> Iterator[Any]:
    """A new CUDA stream for the thread that enters, behind all that was begun before; nothing on other devices.

    Its priority is another than that of the streams on which passes are captured: torch deals the streams of one
    priority out of 32, in turn, and what is launched on a stream that captures becomes part of what is captured.
    """
    if not str(device).startswith("cuda"):
        yield None
        return
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.default_stream(device))  # the weights may still be on their way
    with torch.cuda.stream(stream):
        try:
            yield stream
        finally:
            stream.synchronize()  # what it works on may be freed next, after a fault too
