"""The drafter in a thread of its own, which runs freely for the life of the engine and serves all its requests."""

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
from outpace.core.arrays import is_torch_loaded, torch
from outpace.core.types import Drafter

_POLL_SECONDS = 0.2  # how often an idle thread checks whether the program has ended
_PATIENCE = 2.0  # longest wait, in average forwards per requested level


class ThreadWorker(DraftWorker):
    """Runs the drafter in a thread that reads corrections between forwards and never synchronises with the target's
    rounds. An exception ends the thread and is kept in `failure`."""

    def __init__(self, drafter: Drafter, threads: int = 1, device: torch.device | str | None = None) -> None:
        """`threads`: CPU threads that one forward of the drafter may use. `device`: the device of its model; on CUDA
        the thread has its own stream, so that neither it nor the target waits for the other's work."""
        super().__init__()
        self._loop = DraftLoop(drafter)
        self._threads = threads
        self._device = device
        self._stopping = self._resting = False
        self.step_seconds = 0.01
        self._ready: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outpace-drafter")

    def _begin(self) -> None:
        before = torch.get_num_threads() if is_torch_loaded() else 0
        self._thread.start()
        self._ready.get()
        if before:
            torch.set_num_threads(before)  # the count of a thread becomes the default of later threads

    @property
    def is_working(self) -> bool:
        return super().is_working and not self._resting

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        return 0 if self.failure else self._loop.drafter.capabilities.memory(lengths)

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        if self.failure is None:
            cache.wait(levels, _PATIENCE * self.step_seconds * (max(levels, depth) + 1), depth)

    def stop(self) -> None:
        self._stopping = True
        self._loop.inbox.put(None)

    def close(self) -> None:
        """End the thread after its current forward, and the drafter."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._loop.drafter.capabilities.save()

    def _post(self, message: Message) -> None:
        if self.failure is None:
            self._resting = False
            self._loop.post(message)

    def _run(self) -> None:
        try:
            try:
                if is_torch_loaded():
                    torch.set_num_threads(self._threads)
                self._loop.drafter.capabilities.limit_threads(self._threads)
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
        """Run the loop until the worker is closed. If the program ends without closing it, the thread ends too."""
        main = threading.main_thread()
        while main.is_alive() and not self._stopping:
            self._resting = False
            start = time.perf_counter()
            levels = self._loop.grow()
            if levels:
                self._publish(levels)
                self._count_step(seconds := time.perf_counter() - start)
                self._loop.learn_time(seconds)
            elif not self._loop.has_work:
                self._resting = self._loop.inbox.empty()
                self._loop.wait(_POLL_SECONDS)


@contextmanager
def own_stream(device: torch.device | str | None) -> Iterator[Any]:
    """Enter a new CUDA stream that starts after all work begun before; do nothing on other devices.

    Its priority differs from that of the streams on which passes are captured: torch hands out the streams of one
    priority from a pool of 32, and work launched on a capturing stream would become part of the capture.
    """
    if not str(device).startswith("cuda"):
        yield None
        return
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.default_stream(device))  # the weights may still be copied
    with torch.cuda.stream(stream):
        try:
            yield stream
        finally:
            stream.synchronize()  # its tensors may be freed next, also after a fault
