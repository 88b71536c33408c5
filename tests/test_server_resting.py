"""The event loop of a full server looks at its connections when the engine has news, and no later than a rest."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from outpace.server import resting
from outpace.server.resting import Resting

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[tuple[Pair, Pair]]:
    """By which other threads wake the loop, and a connection."""
    waker, connection = socket.socketpair(), socket.socketpair()
    yield waker, connection
    for one in (*waker, *connection):
        one.close()


def selector_of(pairs: tuple[Pair, Pair]) -> Resting:
    selector = Resting()
    for number, (reader, _) in enumerate(pairs):
        selector.register(reader, selectors.EVENT_READ, number)
    return selector


def numbers(found: Any) -> list[int]:
    return sorted(key.data for key, _ in found)


def test_connections_wait_for_news_while_the_queue_is_full(
    pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "REST", 300.0)
    (_, wake), (_, client) = pairs
    with selector_of(pairs) as selector:
        resting_now = threading.Event()
        selector.is_full = lambda: bool(resting_now.set()) or True  # type: ignore[method-assign]
        client.send(b"x")
        threading.Thread(target=lambda: (resting_now.wait(), wake.send(b"x"))).start()
        assert numbers(selector.select(None)) == [0, 1]
        assert numbers(selector.select(300.0)) == [0, 1]  # news are there: nobody rests


@pytest.mark.parametrize("timeout", [None, 0.001, 300.0])
def test_a_rest_ends(pairs: tuple[Pair, Pair], timeout: float | None) -> None:
    with selector_of(pairs) as selector:
        selector.is_full = lambda: True  # type: ignore[method-assign]
        pairs[1][1].send(b"x")
        assert numbers(selector.select(timeout)) == [1]


@pytest.mark.parametrize(("is_full", "timeout"), [(False, None), (True, 0)])
def test_nobody_rests_without_need(
    pairs: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, is_full: bool, timeout: float | None
) -> None:
    """There is room, or the loop has other things to do."""
    monkeypatch.setattr(resting.select, "select", None)
    with selector_of(pairs) as selector:
        selector.is_full = lambda: is_full  # type: ignore[method-assign]
        pairs[1][1].send(b"x")
        assert numbers(selector.select(timeout)) == [1]


def test_a_loop_is_woken_by_other_threads_while_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it registers first is indeed what they wake it by."""
    monkeypatch.setattr(resting, "REST", 300.0)

    async def main(selector: Resting) -> None:
        loop, (reader, writer) = asyncio.get_running_loop(), socket.socketpair()
        resting_now, came, told = threading.Event(), asyncio.Event(), asyncio.Event()
        selector.is_full = lambda: bool(resting_now.set()) or True  # type: ignore[method-assign]
        loop.add_reader(reader, lambda: (reader.recv(1), came.set()))
        threading.Thread(target=lambda: (resting_now.wait(), loop.call_soon_threadsafe(told.set))).start()
        threading.Thread(target=writer.send, args=(b"x",)).start()
        await told.wait()
        await came.wait()
        loop.remove_reader(reader)
        reader.close()
        writer.close()

    resting.run(main)
