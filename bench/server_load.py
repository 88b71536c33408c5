"""Loads a server: tokens a second by number of clients, first tokens, disconnects, and more requests than it takes.

outpace serve --port 8000 --no-reuse  # the ways ask the same: none is to draft what another one was answered
python bench/server_load.py http://127.0.0.1:8000 --rounds 9  # ways in turn: a table, and one JSON line last
python bench/server_load.py URL --peer llama-server=http://127.0.0.1:8080 --rows rows.json  # beside others of the same
    # API, and of the same model, in the same rounds; a later call adds rounds to those that the file has
python bench/server_load.py URL --seconds 3600 --clients 32 --pid PID --known soak.json   # mixed requests for an hour
python bench/server_load.py URL --known soak.json --by-library   # their texts, against the library's plain ones
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
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


async def measured(url: str, asked: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Each client sends its requests one behind the other, all clients at once. Every prompt is asked once before, or
    whoever comes second would find the prompts of the first in the cache."""
    for body in (body for bodies in asked for body in bodies):
        await ask(url, {**body, "max_tokens": 1}, Seen())
    seen = Seen()

    async def client(bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            await ask(url, body, seen)

    cpu, began = cpu_seconds(), time.perf_counter()
    await asyncio.gather(*map(client, asked))
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": seen.tokens / seconds,
        "first_p50": quantile(seen.first, 0.5),
        "first_p99": quantile(seen.first, 0.99),
        "client_cpu": (cpu_seconds() - cpu) / seconds,
        "statuses": seen.statuses,
        "differing_texts": sum(len(texts) - 1 for texts in seen.texts.values()),
    }


class Rates:
    """Tokens a second of all clients together, with and without speculation, and of other servers: in each round the
    same requests by all ways in turn, of which another one begins."""

    def __init__(self, url: str, peers: dict[str, str], each: int, max_tokens: int, kept: Path | None) -> None:
        """`kept`: a file of rows, to which those of each round are added."""
        self._ways = {"auto": url, "plain": url, **peers}
        self._peers, self._each, self._max_tokens, self._kept = peers, each, max_tokens, kept
        self.rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else []

    async def run(self, counts: list[int], rounds: int) -> list[dict[str, Any]]:
        """So many rounds more."""
        first = max((row["round"] for row in self.rows), default=-1) + 1
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("rounds", total=len(counts) * rounds)
            for number, count in itertools.product(range(first, first + rounds), counts):
                turn, ways = number % len(self._ways), list(self._ways)
                found = [await self._row(count, number, way) for way in (*ways[turn:], *ways[:turn])]
                self.rows += found  # none of a round that is broken off
                if self._kept is not None:
                    self._kept.write_text(json.dumps(self.rows))
                progress.advance(task)
        return self.rows

    async def _row(self, count: int, number: int, way: str) -> dict[str, Any]:
        draw = random.Random(number)
        asked = [[request(draw, way == "plain", self._max_tokens) for _ in range(self._each)] for _ in range(count)]
        for body in (body for bodies in asked for body in bodies if way in self._peers):
            del body["outpace"]
        return {"clients": count, "round": number, "way": way, **await measured(self._ways[way], asked)}


def show_rates(rows: list[dict[str, Any]]) -> None:
    """Medians of the rounds, and what each way writes over plain decoding in the same round."""
    table = Table("clients", "way", "tokens/s", "over plain decoding", "first text, ms", "client's cores", "differing")
    plain = {(row["clients"], row["round"]): row["tokens_per_second"] for row in rows if row["way"] == "plain"}
    for count, way in dict.fromkeys((row["clients"], row["way"]) for row in rows):
        its = [row for row in rows if (row["clients"], row["way"]) == (count, way)]
        ratios = sorted(row["tokens_per_second"] / plain[count, row["round"]] for row in its)
        table.add_row(
            str(count),
            way,
            f"{median(row['tokens_per_second'] for row in its):.1f}",
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{1000 * median(row['first_p50'] or 0.0 for row in its):.0f}",
            f"{median(row['client_cpu'] for row in its):.2f}",
            str(sum(row["differing_texts"] for row in its)),
        )
    Console(width=110).print(table)


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


class Soak:
    """Everything mixed; what was seen is kept in a file once a minute, from where a later call goes on."""

    def __init__(self, url: str, pid: int | None, known: Path | None) -> None:
        self._url, self._pid, self._known = url, pid, known
        before: dict[str, Any] = json.loads(known.read_text()) if known and known.exists() else {}
        self.seen = Seen(tokens=before.get("tokens", 0))
        self.seen.texts = {key: set(texts) for key, texts in before.get("texts", {}).items()}
        self.seen.statuses = {int(status): count for status, count in before.get("statuses", {}).items()}
        self.memory: list[tuple[str, int, int]] = [tuple(row) for row in before.get("memory", [])]
        self.ran, self._end = before.get("seconds", 0.0), 0.0

    async def run(self, seconds: float, clients: int) -> dict[str, Any]:
        """So many seconds more. Those in which all processes stood still, as under a debugger, do not count."""
        self._end = self.ran + seconds
        work = [asyncio.ensure_future(self._client(number)) for number in range(clients)]
        due = self.ran
        while self.ran < self._end:
            if self.ran >= due:
                self.keep()
                due += 60.0
            began = time.monotonic()
            await asyncio.sleep(0.5)
            self.ran += min(time.monotonic() - began, 1.0)
        await asyncio.gather(*work)
        self.keep()
        return self.told()

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{number} {len(self.memory)}")
        while self.ran < self._end:
            leaves = draw.random() * 2 if draw.random() < LEAVES else None
            try:
                await asyncio.sleep(await ask(self._url, mixed(draw), self.seen, leaves))
            except (OSError, IndexError) as error:  # the server is gone, or broke the connection off
                self.seen.note(0)
                print(f"{type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(1.0)

    def told(self) -> dict[str, Any]:
        told = {"seconds": round(self.ran, 1), "tokens": self.seen.tokens, "statuses": self.seen.statuses}
        told |= {"memory": self.memory, "requests": len(self.seen.texts)}
        return {**told, "differing_texts": sum(len(found) - 1 for found in self.seen.texts.values())}

    def keep(self) -> None:
        """A line of the table, and the file. Memory in bytes, by the server's process."""
        told, pid = self.told(), self._pid
        if pid is not None:
            self.memory.append((str(pid), round(self.ran), resident(pid)))
            print(f"{self.ran / 60:5.1f} min  {self.memory[-1][2] >> 20} MiB  {told['statuses']}", flush=True)
        if self._known is not None:
            texts = {key: sorted(found) for key, found in self.seen.texts.items()}
            beside = self._known.with_suffix(".new")
            beside.write_text(json.dumps({**told, "texts": texts}))
            beside.replace(self._known)


def by_library(known: Path) -> dict[str, Any]:
    """Compares what a soak kept with what the library writes, plainly: requests, and those with another text."""
    import outpace

    asked_for = json.loads(known.read_text())["texts"]
    kept = {key: {tuple(json.loads(text)) for text in found} for key, found in asked_for.items()}
    asked, counts = [json.loads(key) for key in kept], [json.loads(key).get("n", 1) for key in kept]
    differing = 0
    with outpace.load() as llm:
        for first in range(0, len(asked), 64):
            params = [_params(one) for one in asked[first : first + 64]]
            found = iter(llm.generate([one["messages"] for one in asked[first : first + 64]], params, plain=True))
            for key, one, count in zip([*kept][first:], params, counts[first:], strict=False):
                texts = [next(found).text for _ in range(one.n)]
                differing += kept[key] != {tuple(texts * (count // one.n))}
    return {"requests": len(asked), "differing_from_library": differing}


def _params(asked: dict[str, Any]) -> Any:
    """A request's parameters in the library's words: greedy choices are alike, and it counts log-probabilities."""
    from outpace import SamplingParams

    given = {key: value for key, value in asked.items() if key not in ("messages", "logprobs", "top_logprobs")}
    if "prediction" in given:
        given["prediction"] = given["prediction"]["content"]
    if not asked["temperature"]:
        given.pop("n", None)
    return SamplingParams(**given, logprobs=asked.get("top_logprobs"))


def main() -> None:
    """Reads the options and runs the load that they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--rows", type=Path, help="file that keeps the rounds' rows")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--each", type=int, default=3, help="requests of each client")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="of all ways in turn")
    parser.add_argument("--overload", type=int, default=0, help="requests at once")
    parser.add_argument("--disconnects", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of mixed requests")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--known", type=Path, help="file that keeps what was seen, so that a soak may go on")
    parser.add_argument("--by-library", action="store_true", help="compare what --known keeps with the library's texts")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    given = parser.parse_args()
    told: dict[str, Any] = {}
    if given.by_library:
        told = by_library(given.known)
    elif given.seconds:
        told["soak"] = asyncio.run(Soak(given.url, given.pid, given.known).run(given.seconds, given.clients))
    else:
        peers = {name: url for name, _, url in (peer.partition("=") for peer in given.peer)}
        ways = Rates(given.url, peers, given.each, given.max_tokens, given.rows)
        told["rates"] = asyncio.run(ways.run(given.counts, given.rounds))
        show_rates(told["rates"])
        if given.overload:
            told["overload"] = asyncio.run(overload(given.url, given.overload, given.max_tokens))
        if given.disconnects:
            told["disconnects"] = asyncio.run(disconnects(given.url, given.disconnects))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
