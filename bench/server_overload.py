"""Ten times the requests that a server can answer: what it writes meanwhile, and how soon it refuses the rest.

python bench/server_overload.py [--only impatient]

As many clients as the batch holds ask all the time, but a second after they were refused; beside them, in every second
window, the flood. `impatient`: they arrive at ten times the rate that was answered, whatever was refused before.
`patient`: ten times as many clients as the batch holds, each of which waits as long as it was told and asks again, as
the OpenAI and Anthropic clients do. `elsewhere`: as `impatient`, but a program of its own refuses them, with one write
for each and no look at it: what the clients themselves take from a server on the same cores. All clients keep their
connections. A table, and one JSON line last; status 1 where less than 0.9 of the tokens are left, or a refusal takes
more than 0.2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from server_client import (
    Seen,
    Server,
    compared,
    cpu_seconds,
    loop_seconds,
    quantile,
    request,
    serving,
    told_of,
    wait_of,
)

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TIMES = 10
BATCH = 16
SETTLE = 2.5  # seconds, about an answer's: or the batch, refilled at once, would not read prompts while it is counted


class Caller(asyncio.Protocol):
    """One connection that is kept, with one request at a time. It looks for an answer's end alone, so that it costs the
    cores, which the server shares, as little as clients elsewhere would."""

    def __init__(self) -> None:
        self._found, self._done = b"", asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, asked: bytes, seen: Seen) -> float:
        """Sends a request and waits for its answer; seconds that the client is told to stay away."""
        assert self._transport is not None
        self._found, self._done, began = b"", asyncio.get_running_loop().create_future(), time.perf_counter()
        self._transport.write(asked)
        status = await self._done
        seen.note(status)
        if status != 429:
            return 0.0
        seen.refusals.append(time.perf_counter() - began)
        return wait_of(self._found)

    def data_received(self, data: bytes) -> None:
        self._found = self._found[-2000:] + data if self._found.startswith(b"HTTP/1.1 4") else self._found[:20] + data
        is_whole = data.endswith(b"}}") if self._found.startswith(b"HTTP/1.1 4") else data.endswith(b"0\r\n\r\n")
        if is_whole and not self._done.done():
            self._done.set_result(int(self._found.split(b" ", 2)[1]))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(0)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Flood:
    """Requests that are too many."""

    def __init__(self, url: str, pid: int) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._pid = parts.hostname or "127.0.0.1", parts.port or 80, pid
        self.seen, self.client, self.loop, self.seconds = Seen(), 0.0, 0.0, 0.0
        draw = random.Random(7)
        self._asked = [self._sent(request(draw, False, 60)) for _ in range(20)]

    @staticmethod
    def _sent(asked: dict[str, Any]) -> bytes:
        data = json.dumps({**asked, "stream": True}).encode()
        return f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def patient(self, clients: int, most: float = 3600.0) -> None:
        """So many, until they are cancelled. They stay away as long as they are told, at most so many seconds."""

        async def one(number: int) -> None:
            caller, draw = await self._caller(), random.Random(number)
            try:
                while True:
                    asked = draw.choice(self._asked)  # not its own: or short answers would be asked for more often
                    await asyncio.sleep(min(await caller.ask(asked, self.seen), most))
            finally:
                caller.close()

        await self._counted(asyncio.gather(*map(one, range(clients))))

    async def impatient(self, each: float) -> None:
        """One in so many seconds, until it is cancelled."""
        free: list[Caller] = []
        tasks: set[asyncio.Task[None]] = set()

        async def one(number: int) -> None:
            caller = free.pop() if free else await self._caller()
            try:
                await caller.ask(self._asked[number % len(self._asked)], self.seen)
                free.append(caller)
            except BaseException:
                caller.close()
                raise

        async def arrive() -> None:
            number, due = 0, time.perf_counter()
            try:
                while True:
                    tasks.add(task := asyncio.create_task(one(number)))
                    task.add_done_callback(tasks.discard)
                    number, due = number + 1, due + each
                    await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            finally:
                for task in list(tasks):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for caller in free:
                    caller.close()

        await self._counted(arrive())

    async def _caller(self) -> Caller:
        return (await asyncio.get_running_loop().create_connection(Caller, self._host, self._port))[1]

    async def _counted(self, work: Awaitable[Any]) -> None:
        """Processor time of the clients, and of the server's event loop, meanwhile."""
        client, loop, began = cpu_seconds(), loop_seconds(self._pid), time.perf_counter()
        try:
            await work
        finally:
            self.client += cpu_seconds() - client
            self.loop += loop_seconds(self._pid) - loop
            self.seconds += time.perf_counter() - began


class Refusing(asyncio.Protocol):
    """Refuses whatever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 12\r\n\r\n{"error":{}}')


def refuse(listener: socket.socket) -> None:
    """In a process of its own."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Refusing, sock=listener)
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def elsewhere(is_asked: bool) -> Iterator[str | None]:
    """The address of a program that refuses, where it is asked for."""
    if not is_asked:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=refuse, args=(listener,))
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.join()


async def overload(server: Server, way: str, windows: int, seconds: float, where: str) -> dict[str, Any]:
    """The share of tokens a second that is left under a flood, and how soon it is refused."""
    usual, flood = Flood(server.url, server.pid), Flood(where, server.pid)
    full = asyncio.create_task(usual.patient(BATCH, most=1.0))
    await asyncio.sleep(6.0)
    each = 6.0 / max(usual.seen.statuses.get(200, 0), 1) / TIMES
    work: Callable[[], Awaitable[None]] = lambda: (  # noqa: E731
        flood.patient(TIMES * BATCH) if way == "patient" else flood.impatient(each)
    )
    rows = await compared(server.url, lambda: asyncio.sleep(3600), work, windows, seconds, SETTLE)
    full.cancel()
    await asyncio.gather(full, return_exceptions=True)
    late, told = quantile(flood.seen.refusals, 0.99), told_of(rows)
    bad = told["share"] < 0.9 or late is None or late > 0.2 or set(flood.seen.statuses) - {200, 429}
    told |= {"statuses": flood.seen.statuses, "refused_p99": late, "refused_a_second": 0.0, "bad": bool(bad)}
    if flood.seconds:
        told["refused_a_second"] = round(flood.seen.statuses.get(429, 0) / flood.seconds, 1)
        told["client_cpu"] = round(flood.client / flood.seconds, 3)
        told["loop_cpu"] = round(flood.loop / flood.seconds, 3)
    told["arrivals_a_second"] = None if way == "patient" else round(1 / each, 1)
    return {**told, "rates": [[round(rate) for rate in row] for row in rows], "server_faults": server.faults}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--only", choices=("patient", "impatient", "elsewhere"))
    given = parser.parse_args()
    told = {}
    for name in [given.only] if given.only else ["impatient", "patient", "elsewhere"]:
        with elsewhere(name == "elsewhere") as other, serving("--max-queue", str(BATCH)) as server:
            told[name] = asyncio.run(overload(server, name, given.windows, given.seconds, other or server.url))
        print(f"{name}: {told[name]}", flush=True)
    print(json.dumps(told))
    return 1 if any(part["bad"] for part in told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
