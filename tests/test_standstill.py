"""A process that stood still, stopped or frozen with its machine, meets no limit that nobody could have kept."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from serving import CHAT, HELLO, LONG, PATIENCE, Brake, Served, send, served, wait_for

import outpace
from outpace.core import clock
from outpace.core.clock import MOST, SuspendAwareClock, Watchdog
from outpace.grammar import compiler
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import Structure
from outpace.models.text import chat_template
from outpace.models.text.chat_template import ChatTemplate
from outpace.server.options import ServerLimits
from outpace.server.timers import LoopClock, Timer

LONG_TIME = 100_000.0


class Stated:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Jumping:
    """The system's clock, with what is jumped over."""

    def __init__(self) -> None:
        self.jumped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.jumped


class Loop:
    """Timers of an event loop, called when they are due on a clock that runs on in a standstill."""

    def __init__(self, now: Stated) -> None:
        self._now, self._due = now, list[Any]()

    def call_later(self, seconds: float, call: Any) -> Any:
        handle = Handle(self._now() + seconds, call)
        self._due.append(handle)
        return handle

    def run(self, seconds: float, jump: bool = False) -> None:
        """So many seconds, in steps, or in one."""
        end = self._now() + seconds
        while self._now.seconds < end:
            self._now.seconds = end if jump else min(end, self._now.seconds + 0.25)
            due = [handle for handle in self._due if handle.when <= self._now()]
            self._due = [handle for handle in self._due if handle.when > self._now()]
            for handle in due:
                if not handle.is_cancelled:
                    handle.call()


class Handle:
    def __init__(self, when: float, call: Any) -> None:
        self.when, self.call, self.is_cancelled = when, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_clock_that_is_looked_at_tells_the_time() -> None:
    now = Stated()
    clock = SuspendAwareClock(now)
    for _ in range(100):
        now.seconds += 0.5
        assert clock.time() == clock.look() == pytest.approx(now.seconds)
    now.seconds += 1.5
    assert clock.time() == pytest.approx(51.5)  # without a look


def test_a_standstill_counts_little() -> None:
    now = Stated()
    clock = SuspendAwareClock(now)
    now.seconds += LONG_TIME
    assert clock.time() == MOST  # whoever asks first
    assert clock.look() == MOST
    now.seconds += 1.0
    assert clock.time() == MOST + 1.0


def loop_clock() -> tuple[Stated, Loop, LoopClock]:
    now = Stated()
    loop: Any = Loop(now)
    clock = LoopClock(now)
    clock.begin(loop)
    return now, loop, clock


def test_a_timer_calls_in_time() -> None:
    _, loop, clock = loop_clock()
    calls = list[float]()
    clock.after(60.0, lambda: calls.append(clock.time()))
    loop.run(59.0)
    assert not calls
    loop.run(2.0)
    loop.run(LONG_TIME, jump=True)
    assert calls == [pytest.approx(60.0, abs=0.5)]


def test_a_timer_that_is_due_after_a_standstill_goes_on() -> None:
    _, loop, clock = loop_clock()
    calls = list[float]()
    clock.after(60.0, lambda: calls.append(clock.time()))
    loop.run(30.0)
    for _ in range(3):
        loop.run(LONG_TIME, jump=True)
        loop.run(1.0)
    assert not calls
    loop.run(30.0)
    assert calls == [pytest.approx(60.0, abs=0.5)]


def test_a_cancelled_timer_stays_silent() -> None:
    now = Stated()
    loop: Any = Loop(now)
    clock = SuspendAwareClock(now)
    calls = list[int]()
    timer = Timer(loop, clock.time, 10.0, lambda: calls.append(1))
    loop.run(LONG_TIME, jump=True)  # it goes on with another timer of the loop
    timer.cancel()
    for _ in range(20):
        loop.run(1.0)
        clock.look()
    assert not calls


def test_patience_counts_looks_and_not_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "TICK", 0.001)
    looks, over = count(), threading.Event()
    with Watchdog(100 * MOST, over.set, now=lambda: next(looks) * LONG_TIME):
        assert over.wait(300)
    assert next(looks) > 100  # one look would have been enough for a clock that goes on


def test_patience_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with Watchdog(LONG_TIME, over.set):
        assert "patience" in {thread.name for thread in threading.enumerate()}
    wait_for(lambda: "patience" not in {thread.name for thread in threading.enumerate()})
    assert not over.is_set()


def test_a_grammar_is_compiled_across_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Jumping()
    looks = count()
    monkeypatch.setattr(compiler, "SuspendAwareClock", lambda: SuspendAwareClock(lambda: (next(looks), now())[1]))

    def work(asked: Structure) -> str:
        now.jumped += LONG_TIME
        seen = next(looks)
        wait_for(lambda: next(looks) > seen + 3)
        return "compiled"

    tokenizer: Any = None
    grammars = Grammars(tokenizer)
    monkeypatch.setattr(grammars, "_matcher", work)
    assert grammars.compile(Structure("regex", "a")) == "compiled"


def test_a_template_is_rendered_across_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps at each look, so that one look would be too late."""
    monkeypatch.setattr(clock, "TICK", 0.001)
    looks = count()
    frozen = lambda: 0.0 if next(looks) < 1 else LONG_TIME  # noqa: E731
    monkeypatch.setattr(chat_template, "Watchdog", lambda seconds, call: Watchdog(seconds, call, frozen))
    template = ChatTemplate("{% for i in range(20000) %}x{% endfor %}")
    assert template.render([]) == 20000 * "x"
    template.close()


@pytest.fixture
def llm(served_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(served_folder, drafter="ngram", batch=1) as llm:
        yield llm


def stand_still(site: Served, now: Jumping) -> None:
    """What a server sees of a standstill: all clocks have jumped, and all the loop's timers are due at once."""
    now.jumped += LONG_TIME
    for _ in range(3):  # answers of a loop that has gone on
        assert site.ask("/version").status == 200


def test_no_limit_of_the_server_is_met_in_a_standstill(llm: outpace.LLM, brake: Brake) -> None:
    now = Jumping()
    limits = ServerLimits(queue_timeout=3600, request_timeout=3600, stuck=3600, write_timeout=3600)
    with served(llm, limits, now=now) as site:
        loop: Any = site.service._loop
        loop.time = now
        running = send(site, {"messages": HELLO, "stream": True, **LONG})
        wait_for(lambda: llm.engine.waiting or llm.engine.running)
        waiting = send(site, {"messages": HELLO, "stream": True, **LONG}, CHAT)
        wait_for(lambda: len(site.service.admission.groups) == 2)
        stand_still(site, now)
        assert site.ask("/health").status == 200
        assert site.ask("/ready").status == 200
        brake.release()
        for connection in (running, waiting):
            assert last_event(connection) == "[DONE]"
        site.wait_idle()


def test_a_head_a_body_and_another_request_may_come_across_a_standstill(llm: outpace.LLM) -> None:
    now = Jumping()
    with served(llm, ServerLimits(body_seconds=3600), now=now) as site:
        loop: Any = site.service._loop
        loop.time = now
        data = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        parts = [0, 20, len(whole) - 5]  # nothing, half a head, all but the body's end
        connections = [socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) for _ in parts]
        for connection, part in zip(connections, parts, strict=True):
            connection.sendall(whole[:part])
        wait_for(lambda: len(site.server.server_state.connections) == 3 and len(site.server.server_state.tasks) == 1)
        idle = site.connect()
        idle.request("GET", "/version")
        idle.getresponse().read()
        stand_still(site, now)
        for connection, part in zip(connections, parts, strict=True):
            connection.sendall(whole[part:])
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        idle.request("GET", "/version")  # over the connection that was kept
        assert idle.getresponse().status == 200


def last_event(connection: Any) -> Any:
    """The data of a stream's last event."""
    received = b""
    while b"[DONE]" not in received and b'"error"' not in received:
        more = connection.recv(65536)
        assert more, received
        received += more
    last = [line for line in received.decode().splitlines() if line.startswith("data: ")][-1].removeprefix("data: ")
    return last if last == "[DONE]" else json.loads(last)
