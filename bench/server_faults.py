"""What a server is done to: clients that leave, that are too many, that do not read; signals; a drafter that is killed.

python bench/server_faults.py disconnects overload slow fairness drafter sigterm    # any of them

Each part starts a server of its own, of the shipped model, and ends it. A table, and one JSON line last; status 1 where
something is not as it must be: an answer without its end, a text that differs from plain decoding's, work that goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from server_load import PROMPTS, Client, Seen, cpu_seconds, idle_after, metrics, quantile, request, resident

STARTS = 120.0
HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
LONG = "Read this and say what it is about. " + "The keeper climbed the stairs and lit the lamp again. " * 150
PHASES = ("half a body", "sent", "prompt", "writing", "whole", "queued")


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
        asyncio.run(Client(server.url).ask(body("Hello", 8), Seen()))
        yield server
    finally:
        server.end()


def body(text: str, most: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0, **more}


@asynccontextmanager
async def sent(url: str, asked: dict[str, Any], part: float = 1.0) -> Any:
    """A connection that has sent a request, or a part of its body; closed in the end."""
    host, port = url.rpartition("//")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = json.dumps(asked).encode()
        head = HEAD.format(path="/v1/chat/completions") + f"Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data[: round(part * len(data))])
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def figures(url: str) -> dict[str, float]:
    """The server's gauges and counters."""
    lines = [line.decode().rpartition(" ") for line in await metrics(url) if line.startswith(b"outpace:")]
    return {name.removeprefix("outpace:"): float(value) for name, _, value in lines}


async def leave(url: str, phase: str, draw: random.Random) -> None:
    """Sends a request and leaves in this phase of it."""
    asked = body(LONG if phase == "prompt" else draw.choice(PROMPTS), 200, stream=phase != "whole")
    async with sent(url, asked, 0.5 if phase == "half a body" else 1.0) as reader:
        if phase == "writing":
            for _ in range(draw.randrange(4, 40)):
                await reader.readline()
        elif phase in ("prompt", "whole"):
            await asyncio.sleep(draw.random() * 0.2)


async def disconnects(url: str, count: int) -> dict[str, Any]:
    """So many, an equal share in each phase; then how soon nothing runs and nothing waits."""
    draw, room = random.Random(3), asyncio.Semaphore(12)
    before = await figures(url)

    async def one(phase: str) -> None:
        async with room:
            await leave(url, phase, draw)

    phases = [PHASES[n % (len(PHASES) - 1)] for n in range(count - count // len(PHASES))]
    await asyncio.gather(*(one(phase) for phase in phases))
    crowd = [asyncio.create_task(leave(url, "writing", draw)) for _ in range(16)]
    await asyncio.gather(*(leave(url, "queued", draw) for _ in range(count // len(PHASES))))
    await asyncio.gather(*crowd)
    seconds = await idle_after(url)
    after = await figures(url)
    left = after["client_disconnects_total"] - before["client_disconnects_total"]
    memory = {name: row["kv_cache_usage_perc"] for name, row in (("before", before), ("after", after))}
    whole = Seen()
    await Client(url).ask(body("Hello", 8), whole)
    bad = seconds > 1.0 or whole.statuses != {200: 1}
    return {"disconnects": count, "noticed": left, "idle_after": round(seconds, 3), "kv_share": memory, "bad": bad}


async def crowd(url: str, clients: int, seconds: float, seen: Seen, most: int = 60) -> list[int]:
    """Closed loops: each client asks again when its answer has ended. Tokens of each."""
    end = time.monotonic() + seconds

    async def client(number: int) -> int:
        draw, own = random.Random(number), Seen()
        while time.monotonic() < end:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(Client(url).ask(request(draw, False, most), own), end - time.monotonic())
        seen.tokens += own.tokens
        for status, times in own.statuses.items():
            seen.statuses[status] = seen.statuses.get(status, 0) + times
        return own.tokens

    return list(await asyncio.gather(*(client(n) for n in range(clients))))


async def written(url: str) -> float:
    return (await figures(url))["generation_tokens_total"]


async def rate(url: str, work: Awaitable[Any]) -> float:
    """Tokens a second that the server writes while something goes on."""
    before, began = await written(url), time.perf_counter()
    await work
    return (await written(url) - before) / (time.perf_counter() - began)


async def overload(url: str, seconds: float) -> dict[str, Any]:
    """Ten times the requests that it can answer, as many in each second, against what as many as its batch ask."""
    seen = Seen()
    await crowd(url, 16, 5.0, Seen())
    before = await rate(url, crowd(url, 16, seconds, seen))
    done = sum(seen.statuses.values())
    each, flood, draw = seconds / max(done, 1) / 10, Seen(), random.Random(7)
    tasks: list[asyncio.Task[None]] = []

    async def arrive() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(Client(url).ask(request(draw, False, 60), flood)))
            await asyncio.sleep(each)

    cpu = cpu_seconds()
    under = await rate(url, arrive())
    cpu = (cpu_seconds() - cpu) / seconds
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await idle_after(url)
    after = await rate(url, crowd(url, 16, seconds, Seen()))
    peak = (before + after) / 2
    late = quantile(flood.refusals, 0.99)
    share = under / peak
    told = {
        "before": round(before, 1),
        "after": round(after, 1),
        "under_load": round(under, 1),
        "share": round(share, 3),
        "arrivals": len(tasks),
    }
    told |= {"client_cpu": round(cpu, 3)}
    bad = share < 0.9 or late is None or late > 0.2 or set(flood.statuses) - {200, 429}
    return {**told, "statuses": flood.statuses, "refused_p99": late, "refused": len(flood.refusals), "bad": bool(bad)}


async def slow(url: str, rounds: int) -> dict[str, Any]:
    """How soon seven clients have their answers beside an eighth that reads one that does, over beside one that reads a
    byte a second. All decode plainly, so that each round is the same work."""
    plain = {"ignore_eos": True, "outpace": {"speculation": False}}

    async def seven() -> float:
        async def client(number: int) -> None:
            for _ in range(4):
                await Client(url).ask(body(PROMPTS[number % len(PROMPTS)], 40, **plain), Seen())

        began = time.perf_counter()
        await asyncio.gather(*map(client, range(7)))
        return time.perf_counter() - began

    async def beside(is_slow: bool) -> float:
        async def eighth() -> None:
            asked = body("Count from one to two thousand in words.", 2000, stream=True, **plain)
            async with sent(url, asked) as reader:
                while True:
                    await (reader.read(1) if is_slow else reader.readline())
                    await asyncio.sleep(1.0 if is_slow else 0.0)

        task = asyncio.create_task(eighth())
        await asyncio.sleep(0.3)
        seconds = await seven()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await idle_after(url)
        return seconds

    await beside(False)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for is_slow in (True, False) if number % 2 else (False, True):
            seconds[is_slow].append(await beside(is_slow))
    share = statistics.median(seconds[False]) / statistics.median(seconds[True])
    told = {str(is_slow): [round(one, 2) for one in found] for is_slow, found in seconds.items()}
    return {"share": round(share, 3), "seconds_by_slow": told, "bad": share < 0.97}


async def fairness(url: str, seconds: float) -> dict[str, Any]:
    """Jain's index of the tokens of sixteen clients that ask alike, all the time."""
    asked = body("Write a long story about a lighthouse keeper.", 2000, stream=True, ignore_eos=True)

    async def client(end: float) -> int:
        tokens = 0
        while time.monotonic() < end:
            with suppress(asyncio.TimeoutError):
                async with sent(url, {**asked, "max_tokens": 40, "return_token_ids": True}) as reader:
                    while line := await asyncio.wait_for(reader.readline(), end - time.monotonic()):
                        if line.startswith(b"data: {"):
                            choices = json.loads(line[6:])["choices"]
                            tokens += sum(len(choice.get("token_ids", ())) for choice in choices)
        return tokens

    end = time.monotonic() + seconds
    each = await asyncio.gather(*(client(end) for _ in range(16)))
    jain = sum(each) ** 2 / (len(each) * sum(count * count for count in each))
    return {"jain": round(jain, 4), "tokens": each, "bad": jain < 0.95}


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


def drafters(pid: int) -> list[int]:
    """Processes that a server has begun to draft."""
    found = [int(n) for t in Path(f"/proc/{pid}/task").iterdir() for n in (t / "children").read_text().split()]
    return [child for child in found if b"candidates.child" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def drafter(server: Server, kills: int) -> dict[str, Any]:
    """The process that drafts is killed again and again while eight answers are written."""
    asked = [body(PROMPTS[n % len(PROMPTS)], 96, seed=n, temperature=[0, 0.8][n % 2]) for n in range(8)]
    plain = await texts(server.url, [{**one, "outpace": {"speculation": False}} for one in asked])
    killed = rounds = 0
    differing: list[Any] = []
    while killed < kills and rounds < 3 * kills:
        rounds += 1
        task = asyncio.create_task(texts(server.url, asked))
        await asyncio.sleep(0.3 + 0.1 * (rounds % 5))
        for child in drafters(server.pid):
            os.kill(child, signal.SIGKILL)
            killed += 1
        pairs = zip(await task, plain, strict=True)
        differing += [[n, one, other] for n, (one, other) in enumerate(pairs) if one != other]
    told = {"killed": killed, "rounds": rounds, "texts": 8 * rounds, "differing": differing, "faults": server.faults}
    return {**told, "bad": bool(differing) or not killed or any(reason == "" for _, reason in plain)}


def sigterm(drain: float) -> dict[str, Any]:
    """Sixteen streams, and the server is told to go."""
    with serving("--drain", str(drain)) as server:
        asked = [body(PROMPTS[n % len(PROMPTS)], 150, seed=n, ignore_eos=True) for n in range(16)]

        async def run() -> list[tuple[str, str]]:
            task = asyncio.create_task(texts(server.url, asked))
            await asyncio.sleep(1.0)
            server.process.terminate()
            return await task

        ends = Counter(reason for _, reason in asyncio.run(run()))
        status = server.process.wait(60)
    return {"drain": drain, "ends": dict(ends), "status": status, "bad": status != 0 or any("cut" in e for e in ends)}


def parts(given: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Each part with a server of its own."""

    def alone(work: Callable[[Server], Awaitable[dict[str, Any]]], *options: str) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            with serving(*options) as server:
                told = asyncio.run(work(server))  # type: ignore[arg-type]
                return {**told, "memory_mib": resident(server.pid) >> 20, "server_faults": server.faults}

        return run

    card = ("--method", "card", "--worker", "process", "--draft", given.draft)
    return {
        "disconnects": alone(lambda server: disconnects(server.url, given.disconnects)),
        "overload": alone(lambda server: overload(server.url, given.seconds), "--max-queue", "16"),
        "slow": alone(lambda server: slow(server.url, given.rounds)),
        "fairness": alone(lambda server: fairness(server.url, given.seconds)),
        "drafter": alone(lambda server: drafter(server, given.kills), *card),
        "sigterm": lambda: sigterm(30.0),
        "sigterm_at_once": lambda: sigterm(0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--draft", default="layers:0,1,28,29")
    given = parser.parse_args()
    told = {}
    for name in given.parts:
        told[name] = parts(given)[name]()
        print(f"{name}: {told[name]}", flush=True)
    print(json.dumps(told))
    return 1 if any(part["bad"] for part in told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
