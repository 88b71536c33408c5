"""Loads a server: tokens a second by number of clients, first tokens, disconnects, and more requests than it takes.

outpace serve --port 8000
python bench/server_load.py http://127.0.0.1:8000            # a table, and one JSON line last
python bench/server_load.py URL --peer http://127.0.0.1:8080  # beside another server that has the same API
python bench/server_load.py URL --seconds 3600 --clients 32 --pid PID --known soak.json   # mixed requests for an hour
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from server_client import PROMPTS, Seen, ask, cpu_seconds, idle_after, quantile, request, resident

LEAVES = 0.2  # of the mixed requests end by a disconnect


def mixed(draw: random.Random) -> dict[str, Any]:
    """One of some hundred requests of all kinds, with speculation or without."""
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {**schema, "additionalProperties": False}}}
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 3},
        {"response_format": form},
        {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){2,5}"}},
        {"stop": ["the", "\n"]},
        {"presence_penalty": 0.5, "top_p": 0.9},
        {"prediction": {"type": "content", "content": "The quick brown fox jumps over the lazy dog. " * 5}},
        {"messages": [{"role": "user", "content": "Sum this up. " + draw.choice(PROMPTS) * draw.choice([20, 60])}]},
    ]
    return {**request(draw, draw.random() < 0.2, draw.choice([8, 60, 200])), **draw.choice(kinds)}


async def rates(url: str, peer: str | None, counts: list[int], each: int, max_tokens: int) -> list[dict[str, Any]]:
    """Tokens a second of all clients together, with and without speculation, and of another server; in turn."""
    rows = []
    ways = {"auto": url, "plain": url} | ({"peer": peer} if peer else {})
    for count in counts:
        for way, where in ways.items():
            seen, draw = Seen(), random.Random(1)
            asked = [[request(draw, way == "plain", max_tokens) for _ in range(each)] for _ in range(count)]
            for body in (body for bodies in asked for body in bodies if way == "peer"):
                del body["outpace"]

            async def client(bodies: list[dict[str, Any]], seen: Seen = seen, where: str = where) -> None:
                for body in bodies:
                    await ask(where, body, seen)

            cpu, began = cpu_seconds(), time.perf_counter()
            await asyncio.gather(*(client(bodies) for bodies in asked))
            seconds = time.perf_counter() - began
            row = {"method": way, "clients": count, "tokens_per_second": seen.tokens / seconds}
            row |= {"first_p50": quantile(seen.first, 0.5), "first_p99": quantile(seen.first, 0.99)}
            row |= {"statuses": seen.statuses, "client_cpu": (cpu_seconds() - cpu) / seconds}
            row["differing_texts"] = sum(len(texts) - 1 for texts in seen.texts.values())
            rows.append(row)
            print(
                "  ".join(
                    f"{name} {round(value, 3) if isinstance(value, float) else value}" for name, value in row.items()
                )
            )
    return rows


async def overload(url: str, count: int, max_tokens: int) -> dict[str, Any]:
    """So many at once, most of them too many: how fast these are refused, and what is written meanwhile."""
    seen, draw = Seen(), random.Random(2)
    began = time.perf_counter()
    await asyncio.gather(*(ask(url, request(draw, False, max_tokens), seen) for _ in range(count)))
    seconds = time.perf_counter() - began
    told = {"requests": count, "statuses": seen.statuses, "tokens_per_second": seen.tokens / seconds}
    return told | {"refused_p99": quantile(seen.refusals, 0.99)}


async def disconnects(url: str, count: int) -> dict[str, Any]:
    """Clients that leave at any moment, sixteen at a time."""
    seen, draw, room = Seen(), random.Random(3), asyncio.Semaphore(16)

    async def leave() -> None:
        async with room:
            await ask(url, request(draw, False, 200), seen, leave_after=draw.random() ** 3)

    await asyncio.gather(*(leave() for _ in range(count)))
    return {"disconnects": count, "statuses": seen.statuses, "idle_after": await idle_after(url)}


async def soak(url: str, seconds: float, clients: int, pid: int | None, known: Path | None) -> dict[str, Any]:
    """Everything mixed for so long; the server's memory once a minute. What was seen is kept in a file, from where a
    later call goes on."""
    seen, end = Seen(), time.monotonic() + seconds
    before: dict[str, Any] = json.loads(known.read_text()) if known and known.exists() else {}
    memory: list[int] = before.get("memory", [])
    seen.texts = {key: set(texts) for key, texts in before.get("texts", {}).items()}
    seen.statuses = {int(status): count for status, count in before.get("statuses", {}).items()}
    seen.tokens = before.get("tokens", 0)

    async def client(number: int) -> None:
        draw = random.Random(f"{number} {len(memory)}")
        while time.monotonic() < end:
            leaves = draw.random() * 2 if draw.random() < LEAVES else None
            await ask(url, mixed(draw), seen, leaves)

    async def watch() -> None:
        while time.monotonic() < end and pid is not None:
            memory.append(resident(pid))
            print(f"{len(memory):4d} min  {memory[-1] >> 20} MiB  {seen.statuses}  {seen.tokens} tokens", flush=True)
            await asyncio.sleep(min(60.0, max(end - time.monotonic(), 0.0)))

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    told = {"seconds": before.get("seconds", 0) + seconds, "clients": clients, "tokens": seen.tokens}
    told |= {"statuses": seen.statuses, "memory": memory, "requests": len(seen.texts)}
    if known is not None:
        texts = {key: sorted(found) for key, found in seen.texts.items()}
        known.write_text(json.dumps({**told, "texts": texts}))
    return {**told, "differing_texts": sum(len(found) - 1 for found in seen.texts.values())}


def main() -> None:
    """Reads the options and runs the load that they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--peer", help="another server, of the same model")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--each", type=int, default=3, help="requests of each client")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--overload", type=int, default=0, help="requests at once")
    parser.add_argument("--disconnects", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of mixed requests")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--known", type=Path, help="file that keeps what was seen, so that a soak may go on")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    given = parser.parse_args()
    told: dict[str, Any] = {}
    if given.seconds:
        told["soak"] = asyncio.run(soak(given.url, given.seconds, given.clients, given.pid, given.known))
    else:
        told["rates"] = asyncio.run(rates(given.url, given.peer, given.counts, given.each, given.max_tokens))
        if given.overload:
            told["overload"] = asyncio.run(overload(given.url, given.overload, given.max_tokens))
        if given.disconnects:
            told["disconnects"] = asyncio.run(disconnects(given.url, given.disconnects))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
