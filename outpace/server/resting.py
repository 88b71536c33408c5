"""Looks at connections together while the queue is full.

The event loop shares its cores with the engine's threads. Woken for each request of a flood, to refuse it, it would
stop them as often, and they wait for one another; woken once a step, when the engine has news anyway, it refuses many
in one go.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from collections.abc import Callable
from typing import Any

REST = 0.02  # seconds: a refusal comes later by so much, or by twice that over a new connection


class Resting(selectors.DefaultSelector):
    """An event loop's selector. While `is_full`, what comes from connections waits for news of another thread."""

    is_full: Callable[[], bool] = staticmethod(lambda: False)
    _waker: Any = None  # by which other threads wake the loop: it registers this first of all

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._waker = self._waker or key
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic()
        found = super().select(timeout)
        if timeout == 0 or not found or any(key is self._waker for key, _ in found) or not self.is_full():
            return found  # `timeout` 0: the loop has other things to do
        left = REST if timeout is None else min(REST, timeout - (time.monotonic() - began))
        select.select([self._waker.fd], [], [], max(left, 0.0))
        return super().select(0)


def run(main: Callable[[Resting], Any]) -> None:
    """As asyncio.run does, on a loop with such a selector, which `main` is given."""
    selector = Resting()
    loop = asyncio.SelectorEventLoop(selector)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main(selector))
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
