"""What benches of the server share: a server of their own, clients over asyncio's streams, and figures."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "List ten animals, and say one fact about each.",
    "Write a Python function that reverses a linked list, with a comment a line.",
    "Repeat this sentence five times: the quick brown fox jumps over the lazy dog.",
)
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
)


@dataclass
class Seen:
    """What clients met. Times in seconds."""

    tokens: int = 0
    texts: dict[str, set[str]] = field(default_factory=dict)  # by request
    first: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    refusals: list[float] = field(default_factory=list)  # how long a 429 took

    def note(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def ask(url: str, body: dict[str, Any], seen: Seen, leave_after: float | None = None) -> float:
    """Streams one answer; `leave_after` so many seconds the connection is closed. Gives the seconds after which the
    server wants to be asked again, 0 where it answered."""
    began = time.perf_counter()
    async with sent(url, {**body, "stream": True, "stream_options": {"include_usage": True}}) as reader:
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(_read(reader, body, seen, began), leave_after)
    return 0.0


async def _read(reader: asyncio.StreamReader, body: dict[str, Any], seen: Seen, began: float) -> float:
    status = int((await reader.readline()).split()[1])
    seen.note(status)
    if status != 200:
        seen.refusals.append(time.perf_counter() - began)
        return wait_of(await reader.read())
    texts, is_first, chunks, usage = dict[int, str](), True, 0, None
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            seen.note(599)
            return 0.0
        for choice in event["choices"]:
            if choice["delta"].get("content") and is_first:
                seen.first.append(time.perf_counter() - began)
                is_first = False
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            chunks += bool(choice["delta"].get("content"))
        usage = event.get("usage") or usage
    seen.tokens += usage["completion_tokens"] if usage else chunks  # a server that tells no usage: a token a chunk
    key = json.dumps({name: value for name, value in body.items() if name != "outpace"})
    seen.texts.setdefault(key, set()).add(json.dumps([texts[index] for index in sorted(texts)]))
    return 0.0


def wait_of(answer: bytes) -> float:
    """Seconds that a refused client is told to stay away."""
    found = re.search(rb"retry-after-ms: (\d+)", answer)
    return int(found[1]) / 1000 if found else 0.0


async def _open(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 80)


@asynccontextmanager
async def sent(url: str, asked: dict[str, Any], part: float = 1.0) -> Any:
    """A connection that has sent a request, or a part of its body; closed in the end."""
    reader, writer = await _open(url)
    try:
        data = json.dumps(asked).encode()
        head = f"{HEAD}Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data[: round(part * len(data))])
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def texts(url: str, asked: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Texts, each with how its stream ended."""

    async def one(request: dict[str, Any]) -> tuple[str, str]:
        text, reason, done = "", "", False
        async with sent(url, {**request, "stream": True}) as reader:
            status = (await reader.readline()).split()[1].decode()
            if status != "200":
                return (await reader.read()).decode(), f"cut {status}"
            while line := await reader.readline():
                done = done or line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return text, f"error {event['error']['code']}"
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
        return text, reason if done else f"cut {reason}"

    return list(await asyncio.gather(*map(one, asked)))


def request(draw: random.Random, plain: bool, max_tokens: int) -> dict[str, Any]:
    """One of few different requests, so that equal ones meet often."""
    messages = [{"role": "user", "content": draw.choice(PROMPTS)}]
    asked = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": draw.choice([0, 0.8]),
        "seed": draw.randrange(2),
    }
    return {**asked, "outpace": {"speculation": not plain}}


def body(text: str, most: int, **more: Any) -> dict[str, Any]:
    """A greedy request of one message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0, **more}


async def metrics(url: str) -> list[bytes]:
    """Lines of the page of metrics that hold a value."""
    reader, writer = await _open(url)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    page = await reader.read()
    writer.close()
    return [line for line in page.splitlines() if b":" in line and not line.startswith(b"#")]


async def figures(url: str) -> dict[str, float]:
    """The server's gauges and counters."""
    lines = [line.decode().rpartition(" ") for line in await metrics(url) if line.startswith(b"outpace:")]
    return {name.removeprefix("outpace:"): float(value) for name, _, value in lines}


async def idle_after(url: str) -> float:
    """Seconds until the server says that it runs nothing and that nothing waits."""
    began = time.perf_counter()
    while any(line.split()[-1] != b"0.0" for line in await metrics(url) if b":num_requests_" in line):
        await asyncio.sleep(0.02)
    return time.perf_counter() - began


class Server:
    """A process that serves the shipped model."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "outpace", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            sys.exit("the server did not start")
        self.url, self.faults = found[0], 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.faults += '"event": "fault"' in line

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> int:
        """Its status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    """A server whose model has written once."""
    server = Server(*options)
    try:
        asyncio.run(ask(server.url, body("Hello", 8), Seen()))
        yield server
    finally:
        server.end()


async def crowd(url: str, clients: int, asked: Callable[[int], dict[str, Any]], seen: Seen) -> None:
    """Clients that ask again as soon as they have an answer, and 0.1 s after a refusal, until they are cancelled."""

    async def client(number: int) -> None:
        while True:
            await asyncio.sleep(min(await ask(url, asked(number), seen), 0.1))

    await asyncio.gather(*map(client, range(clients)))


async def compared(
    url: str,
    without: Callable[[], Awaitable[Any]],
    with_it: Callable[[], Awaitable[Any]],
    windows: int,
    seconds: float,
    settle: float = 0.3,
) -> list[tuple[float, float]]:
    """Tokens a second that the server writes without something and with it, in short windows in turn: the machine's own
    speed changes too. Each is counted after `settle` seconds."""

    async def rate(work: Callable[[], Awaitable[Any]]) -> float:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(settle)
        before, began = (await figures(url))["generation_tokens_total"], time.perf_counter()
        await asyncio.sleep(seconds)
        after = (await figures(url))["generation_tokens_total"]
        found = (after - before) / (time.perf_counter() - began)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    rows = []
    for number in range(windows):
        first, second = (without, with_it) if number % 2 else (with_it, without)
        found = [await rate(first), await rate(second)]
        rows.append((found[0], found[1]) if number % 2 else (found[1], found[0]))
    return rows


def told_of(rows: list[tuple[float, float]]) -> dict[str, Any]:
    """The share that is left, of all windows, and what each gave."""
    share = sum(after for _, after in rows) / sum(before for before, _ in rows)
    ratios = sorted(after / max(before, 1e-9) for before, after in rows)
    return {"share": round(share, 3), "median": round(statistics.median(ratios), 3), "windows": len(rows)}


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def loop_seconds(pid: int) -> float:
    """Processor time of a server's event loop so far, which is its first thread, in seconds."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def cpu_seconds() -> float:
    """Processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def quantile(values: list[float], share: float) -> float | None:
    """None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]
