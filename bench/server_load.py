"""Load a server: throughput and time to first token by number of clients, and a long soak of mixed requests.

outpace serve --port 8000 --no-reuse   # without reuse, because all variants send the same prompts
python bench/server_load.py http://127.0.0.1:8000 --rounds 9   # prints a table, and one line of JSON last
python bench/server_load.py URL --peer llama-server=http://127.0.0.1:8080 --rows rows.json   # compare with servers of
    # the same model in the same rounds; another call with the same file adds rounds
python bench/server_load.py URL --seconds 3600 --clients 32 --pid PID --known soak.json   # an hour of mixed requests
python bench/server_load.py URL --known soak.json --by-library   # compare the texts of a soak with those of the library
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import resource
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from common import finish, parse, run, show
from rich.console import Console
from rich.progress import Progress

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
    """Results of all clients; times in seconds."""

    tokens: int = 0
    texts: dict[str, set[str]] = field(default_factory=dict)  # by request
    first: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


async def ask(url: str, body: dict[str, Any], seen: Seen, leave_after: float | None = None) -> float:
    """Stream one answer, at most `leave_after` seconds. Return the seconds to wait before a retry."""
    began = time.perf_counter()
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 80)
    with closing(writer):
        writer.write(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(_read(reader, body, seen, began), leave_after)
    return 0.0


async def _read(reader: asyncio.StreamReader, body: dict[str, Any], seen: Seen, began: float) -> float:
    status = int((await reader.readline()).split()[1])
    seen.statuses[status] += 1
    if status != 200:
        found = re.search(rb"retry-after-ms: (\d+)", await reader.read())
        return int(found[1]) / 1000 if found else 0.0
    texts, is_first, chunks, usage = dict[int, str](), True, 0, None
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            seen.statuses[599] += 1
            return 0.0
        for choice in event["choices"]:
            if choice["delta"].get("content") and is_first:
                seen.first.append(time.perf_counter() - began)
                is_first = False
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            chunks += bool(choice["delta"].get("content"))
        usage = event.get("usage") or usage
    seen.tokens += usage["completion_tokens"] if usage else chunks  # without usage, count one token per chunk
    key = json.dumps({name: value for name, value in body.items() if name != "outpace"})
    seen.texts.setdefault(key, set()).add(json.dumps([texts[index] for index in sorted(texts)]))
    return 0.0


def request(draw: random.Random, plain: bool, max_tokens: int) -> dict[str, Any]:
    """Draw one of a few requests, so that equal requests occur often."""
    messages = [{"role": "user", "content": draw.choice(PROMPTS)}]
    asked = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": draw.choice([0, 0.8]),
        "seed": draw.randrange(2),
    }
    return {**asked, "outpace": {"speculation": not plain}}


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


LEAVES = 0.2  # share of mixed requests that the client disconnects


def mixed(draw: random.Random) -> dict[str, Any]:
    """Draw a request of any kind, with or without speculation."""
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
    """Send the requests of all clients concurrently. Each prompt is sent once before, so that it is cached."""
    for body in (body for bodies in asked for body in bodies):
        await ask(url, {**body, "max_tokens": 1}, Seen())
    seen = Seen()

    async def client(bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            await ask(url, body, seen)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(client, asked))
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": seen.tokens / seconds,
        "first_p50": median(seen.first) if seen.first else None,
        "client_cpu": (time.process_time() - cpu) / seconds,
        "statuses": seen.statuses,
        "differing_texts": sum(len(texts) - 1 for texts in seen.texts.values()),
    }


class Rates:
    """Throughput with and without speculation and of other servers, which all get the same requests."""

    def __init__(self, url: str, peers: dict[str, str], each: int, max_tokens: int, kept: Path | None) -> None:
        """`kept` is a file of rows that each round extends."""
        self._variants = {"auto": url, "plain": url, **peers}
        self._peers, self._each, self._max_tokens, self._kept = peers, each, max_tokens, kept
        self.rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else []

    async def run(self, counts: list[int], rounds: int) -> list[dict[str, Any]]:
        """Run more rounds."""
        first = max((row["round"] for row in self.rows), default=-1) + 1
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("rounds", total=len(counts) * rounds)
            for number, count in itertools.product(range(first, first + rounds), counts):
                turn, variants = number % len(self._variants), list(self._variants)
                found = [await self._row(count, number, variant) for variant in (*variants[turn:], *variants[:turn])]
                self.rows += found  # only whole rounds
                if self._kept is not None:
                    self._kept.write_text(json.dumps(self.rows))
                progress.advance(task)
        return self.rows

    async def _row(self, count: int, number: int, variant: str) -> dict[str, Any]:
        draw = random.Random(number)
        asked = [[request(draw, variant == "plain", self._max_tokens) for _ in range(self._each)] for _ in range(count)]
        for body in (body for bodies in asked for body in bodies if variant in self._peers):
            del body["outpace"]
        return {"clients": count, "round": number, "variant": variant, **await measured(self._variants[variant], asked)}


def show_rates(rows: list[dict[str, Any]]) -> None:
    """Print medians over rounds, and the ratio of each variant to plain decoding in the same round."""
    plain, shown = (
        {(row["clients"], row["round"]): row["tokens_per_second"] for row in rows if row["variant"] == "plain"},
        [],
    )
    for count, variant in dict.fromkeys((row["clients"], row["variant"]) for row in rows):
        its = [row for row in rows if (row["clients"], row["variant"]) == (count, variant)]
        ratios = sorted(row["tokens_per_second"] / plain[count, row["round"]] for row in its)
        cells: dict[str, Any] = {"clients": count, "variant": variant}
        cells["tokens/s"] = median(row["tokens_per_second"] for row in its)
        cells["over plain decoding"] = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        cells["first text, ms"] = 1000 * median(row["first_p50"] or 0.0 for row in its)
        cells["client's cores"] = median(row["client_cpu"] for row in its)
        shown.append(cells | {"differing": sum(row["differing_texts"] for row in its)})
    show(shown, width=120)


class Soak:
    """A soak of mixed requests. Its state is written to a file every minute, and a later call continues it."""

    def __init__(self, url: str, pid: int | None, known: Path | None) -> None:
        self._url, self._pid, self._known = url, pid, known
        before: dict[str, Any] = json.loads(known.read_text()) if known and known.exists() else {}
        self.seen = Seen(tokens=before.get("tokens", 0))
        self.seen.texts = {key: set(texts) for key, texts in before.get("texts", {}).items()}
        self.seen.statuses.update({int(status): count for status, count in before.get("statuses", {}).items()})
        self.memory: list[tuple[str, int, int]] = [tuple(row) for row in before.get("memory", [])]
        self.ran, self._end = before.get("seconds", 0.0), 0.0

    async def run(self, seconds: float, clients: int) -> dict[str, Any]:
        """Run for more seconds. Time during which the whole machine was suspended does not count."""
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
        return self.summary()

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{number} {len(self.memory)}")
        while self.ran < self._end:
            leaves = draw.random() * 2 if draw.random() < LEAVES else None
            try:
                await asyncio.sleep(await ask(self._url, mixed(draw), self.seen, leaves))
            except (OSError, IndexError) as error:  # the server is gone or closed the connection
                self.seen.statuses[0] += 1
                print(f"{type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(1.0)

    def summary(self) -> dict[str, Any]:
        totals = {"seconds": round(self.ran, 1), "tokens": self.seen.tokens, "statuses": self.seen.statuses}
        totals |= {"memory": self.memory, "requests": len(self.seen.texts)}
        return {**totals, "differing_texts": sum(len(found) - 1 for found in self.seen.texts.values())}

    def keep(self) -> None:
        """Print a line and write the state."""
        totals, pid = self.summary(), self._pid
        if pid is not None:
            self.memory.append((str(pid), round(self.ran), resident(pid)))
            print(f"{self.ran / 60:5.1f} min  {self.memory[-1][2] >> 20} MiB  {totals['statuses']}", flush=True)
        if self._known is not None:
            texts = {key: sorted(found) for key, found in self.seen.texts.items()}
            new = self._known.with_suffix(".new")
            new.write_text(json.dumps({**totals, "texts": texts}))
            new.replace(self._known)


def by_library(known: Path) -> dict[str, Any]:
    """Compare the texts of a soak with plain decoding by the library."""
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
    """Convert a request to SamplingParams. Greedy choices of one request are equal, so `n` is dropped for them."""
    from outpace import SamplingParams

    given = {key: value for key, value in asked.items() if key not in ("messages", "logprobs", "top_logprobs")}
    if "prediction" in given:
        given["prediction"] = given["prediction"]["content"]
    if not asked["temperature"]:
        given.pop("n", None)
    return SamplingParams(**given, logprobs=asked.get("top_logprobs"))


def main() -> int:
    """Run the command."""
    rates = {"counts": [1, 4, 8, 16], "each": 3, "max_tokens": 100, "rounds": 3, "peer": [""], "rows": Path}
    soak = {"seconds": 0.0, "clients": 32, "known": Path, "by_library": False, "pid": int}
    args = parse(__doc__, {"url": str}, **rates, **soak)
    totals: dict[str, Any] = {}
    if args.by_library:
        totals = by_library(args.known)
    elif args.seconds:
        totals["soak"] = asyncio.run(Soak(args.url, args.pid, args.known).run(args.seconds, args.clients))
    else:
        peers = {name: url for name, _, url in (peer.partition("=") for peer in args.peer if peer)}
        variants = Rates(args.url, peers, args.each, args.max_tokens, args.rows)
        totals["rates"] = asyncio.run(variants.run(args.counts, args.rounds))
        show_rates(totals["rates"])
    return finish(totals, False)


if __name__ == "__main__":
    run(main)
