"""One client of a server against the library: tokens a second, and the time to the first text.

python bench/server_single.py PROMPTS.jsonl [--count 12] [--max-tokens 128]

A server of the shipped model, and the library in this process, answer the same prompts in turn (who begins changes),
each prompt once, greedily. The other process sleeps meanwhile. Medians by prompt, with the client's processor time,
which the server's cores bear too. A table, and one JSON line last; status 1 where a text differs, less than 0.93 of
the tokens a second are left, or the first text comes more than 5 ms later.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from server_client import body, cpu_seconds, serving

import outpace

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Answer(NamedTuple):
    """Seconds from the request on: to the first text, and to the end. `cpu`: the client's processor time."""

    text: str
    tokens: int
    first: float
    seconds: float
    cpu: float = 0.0


def by_library(llm: outpace.LLM, asked: dict[str, Any], plain: bool) -> Answer:
    """Reads piece by piece in this process; `cpu` stays 0."""
    began, first = time.perf_counter(), 0.0
    stream = llm.stream(asked["messages"], max_tokens=asked["max_tokens"], temperature=0, plain=plain)
    for piece in stream:
        if piece.text and not first:
            first = time.perf_counter() - began
    seconds, result = time.perf_counter() - began, stream.finish()
    return Answer(result.text, len(result.tokens), first, seconds)


def by_server(connection: socket.socket, asked: dict[str, Any], plain: bool) -> Answer:
    """Reads bytes, and looks into them when all have come, but for the first text's. The connection is kept."""
    cpu, began, first = cpu_seconds(), time.perf_counter(), 0.0
    more = {"stream": True, "stream_options": {"include_usage": True}, "outpace": {"speculation": not plain}}
    data = json.dumps({**asked, **more}).encode()
    chunks: list[bytes] = []
    connection.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    while not chunks or not chunks[-1].endswith(b"0\r\n\r\n"):
        chunks.append(connection.recv(1 << 16) or sys.exit("the server broke the connection off"))
        if not first and b'"delta":{"content":"' in chunks[-1]:
            first = time.perf_counter() - began
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    lines = [line for line in b"".join(chunks).split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line[6:]) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return Answer(text, events[-1]["usage"]["completion_tokens"], first, seconds, cpu)


def connected(url: str) -> socket.socket:
    """A connection that is kept for all answers."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80))


def in_turn(llm: outpace.LLM, connection: socket.socket, asked: list[dict[str, Any]], plain: bool) -> dict[str, Any]:
    """The first two prompts warm both up."""
    rows = []
    for number, one in enumerate(asked):
        if number % 2:
            ours, theirs = by_library(llm, one, plain), by_server(connection, one, plain)
        else:
            theirs, ours = by_server(connection, one, plain), by_library(llm, one, plain)
        rows.append((ours, theirs))
    return compared(rows[2:])


def compared(rows: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Of library and server, by prompt."""
    shares = [(theirs.tokens / theirs.seconds) / (ours.tokens / ours.seconds) for ours, theirs in rows]
    later = [1000 * (theirs.first - ours.first) for ours, theirs in rows]
    return {
        "prompts": len(rows),
        "share": round(statistics.median(shares), 3),
        "shares": [round(min(shares), 3), round(max(shares), 3)],
        "library_tokens_per_second": round(statistics.median(ours.tokens / ours.seconds for ours, _ in rows), 1),
        "library_first_ms": round(1000 * statistics.median(ours.first for ours, _ in rows), 2),
        "first_later_ms": round(statistics.median(later), 2),
        "client_cpu": round(sum(theirs.cpu for _, theirs in rows) / sum(theirs.seconds for _, theirs in rows), 3),
        "differing_texts": sum(ours.text != theirs.text for ours, theirs in rows),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()
    lines = given.prompts.read_text().splitlines()
    asked = [body(json.loads(line)["turns"][0], given.max_tokens) for line in lines[: given.count + 2]]
    told: dict[str, Any] = {}
    with serving() as server, outpace.load() as llm, connected(server.url) as connection:
        for way in ("auto", "plain"):
            told[way] = in_turn(llm, connection, asked, way == "plain")
            print(f"{way}: {told[way]}", flush=True)
            asked = [body("Again: " + one["messages"][0]["content"], given.max_tokens) for one in asked]
    print(json.dumps(told))
    bad = [way["share"] < 0.93 or way["first_later_ms"] > 5 or way["differing_texts"] for way in told.values()]
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
