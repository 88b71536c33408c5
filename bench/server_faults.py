"""What a server is done to: clients that leave, or that do not read; signals; a drafter that is killed.

python bench/server_faults.py disconnects slow fairness drafter sigterm    # any of them

Each part starts a server of its own, of the shipped model, and ends it. A table, and one JSON line last; status 1 where
something is not as it must be: an answer without its end, a text that differs from plain decoding's, work that goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from server_client import (
    PROMPTS,
    Seen,
    Server,
    ask,
    body,
    compared,
    crowd,
    figures,
    idle_after,
    resident,
    sent,
    serving,
    texts,
    told_of,
)

STARTS = 120.0
LONG = "Read this and say what it is about. " + "The keeper climbed the stairs and lit the lamp again. " * 150
PHASES = ("half a body", "sent", "prompt", "writing", "whole", "queued")


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
    await ask(url, body("Hello", 8), whole)
    bad = seconds > 1.0 or whole.statuses != {200: 1}
    return {"disconnects": count, "noticed": left, "idle_after": round(seconds, 3), "kv_share": memory, "bad": bad}


async def slow(url: str, windows: int, seconds: float) -> dict[str, Any]:
    """Seven clients ask all the time; beside them an eighth that reads, or one that reads a byte a second. All decode
    plainly, so that each round is the same work."""
    plain = {"ignore_eos": True, "outpace": {"speculation": False}}

    def eighth(is_slow: bool) -> Callable[[], Awaitable[None]]:
        async def read() -> None:
            async with sent(url, body("Count from one on.", 2000, stream=True, **plain)) as reader:
                while True:
                    await (reader.read(1) if is_slow else reader.readline())
                    await asyncio.sleep(1.0 if is_slow else 0.0)

        return read

    asked = [body(PROMPTS[number % len(PROMPTS)], 200, **plain) for number in range(7)]
    seven = asyncio.create_task(crowd(url, 7, lambda number: asked[number], Seen()))
    await asyncio.sleep(3.0)
    told = told_of(await compared(url, eighth(False), eighth(True), windows, seconds))
    seven.cancel()
    await asyncio.gather(seven, return_exceptions=True)
    return {**told, "bad": told["share"] < 0.97}


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
        "slow": alone(lambda server: slow(server.url, given.windows, 1.5)),
        "fairness": alone(lambda server: fairness(server.url, given.seconds)),
        "drafter": alone(lambda server: drafter(server, given.kills), *card),
        "sigterm": lambda: sigterm(30.0),
        "sigterm_at_once": lambda: sigterm(0.0),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--windows", type=int, default=8)
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
