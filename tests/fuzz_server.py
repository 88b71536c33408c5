"""Fuzz the server: it must answer every request body in time, and never with an internal error.

python tests/fuzz_server.py --count 10000                  # mutations of valid bodies
python tests/fuzz_server.py --schemathesis 10000           # schemathesis, from the OpenAPI document

The model is a tiny random one. The last line is JSON: statuses, faults, and the slowest answer in seconds.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import HELLO, Served, served
from test_library import folder

import outpace
from outpace.server.options import ServerLimits

SLOW = 30.0  # seconds, after which a missing answer is a hang
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "maxProperties": 1}}}
COMMON = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stream": True,
    "logit_bias": {"5": 1.0},
    "bad_words": ["x"],
    "min_tokens": 1,
    "stop_token_ids": [7],
    "allowed_token_ids": [20, 21],
    "return_token_ids": True,
    "return_sources": True,
    "return_rounds": True,
    "outpace": {"speculation": True, "nodes": 4},
    "metadata": {"a": "b"},
    "repetition_penalty": 1.1,
    "ignore_eos": False,
    "model": "tiny",
}
VALID: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # path, required fields, optional fields
    (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 3},
        {
            **COMMON,
            "n": 2,
            "stop": ["a"],
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "response_format": JSON_FORMAT,
            "structured_outputs": {"regex": "[ab]+"},
            "prediction": {"type": "content", "content": "hello"},
            "chat_template_kwargs": {},
        },
    ),
    (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 3},
        {**COMMON, "n": 2, "best_of": 2, "echo": True, "logprobs": 2, "stop": "a", "suffix": "b"},
    ),
    (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 3},
        {**COMMON, "instructions": "be", "text": {"format": {"type": "text"}}, "top_logprobs": 1, "tools": []},
    ),
    (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 3},
        {**COMMON, "system": "be", "stop_sequences": ["a"], "tools": [], "tool_choice": {"type": "auto"}},
    ),
    ("/v1/messages/count_tokens", {"messages": HELLO}, {"system": [{"type": "text", "text": "be"}]}),
    ("/tokenize", {"prompt": "hello"}, {"messages": HELLO, "add_special_tokens": False, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}, {"model": "tiny"}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 127, 10**6, 2**31, 2**63, 2**70, -(2**70), 0.5, 1.5, -0.0, 1e308, -1e-308),
    *("", "a", "hello", "\0", "\ud83d", "ü" * 300, "[" * 100, "a" * 5000, "{% raw %}", "<|im_end|>", "none"),
    *([], [[]], [None], [1, 2], ["x"], [{}], {}, {"a": {}}, {"type": "text"}, {"type": "object"}, [HELLO], HELLO),
    [{"role": "user"}],
    [{"role": "tool", "content": [{"type": "text", "text": "x"}]}],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "function", "function": {"name": "add"}},
    {"regex": "(a*)*b"},
    {"grammar": 'start: start "a" | "b"'},
    {"json": {"enum": []}},
]
CONTENT_TYPES = ("application/json", "application/json; charset=utf-8", "text/plain", "", "application/x-www-form")


@dataclass
class FuzzResult:
    """Statuses, faults, the slowest answer in seconds, and the number of repeated requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    repeated: int = 0  # because the machine was suspended


class SuspendDetector:
    """Measures how long this machine or process was suspended, which is not a hang of the server."""

    def __init__(self) -> None:
        self.lost = 0.0  # seconds
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            before, used = time.monotonic(), time.process_time()
            time.sleep(0.1)
            late = time.monotonic() - before - 0.1
            if late > 1.0 and time.process_time() - used < 0.1 * late:  # otherwise it was computing
                self.lost += late


def requests(seed: int) -> Iterator[tuple[str, bytes, str]]:
    """Yield paths, bodies and content types without end; the same for the same seed."""
    random_ = random.Random(seed)
    while True:
        path, needed, more = random_.choice(VALID)
        chosen = random_.sample(sorted(more), random_.randint(0, min(4, len(more))))
        body = copy.deepcopy({**needed, **{name: more[name] for name in chosen}})
        for _ in range(random_.choice((0, 1, 1, 1, 2, 4))):
            mutate(body, random_)
        data = json.dumps(body).encode()
        if random_.random() < 0.1:
            data = corrupt(data, random_)
        yield path, data, CONTENT_TYPES[0] if random_.random() < 0.95 else random_.choice(CONTENT_TYPES)


def mutate(body: Any, random_: random.Random) -> None:
    """Change one place of a body, at any depth."""
    places = list(_places(body))
    holder, key = random_.choice(places) if places else (body, "x")
    way = random_.random()
    if way < 0.7 or not isinstance(holder, dict):
        holder[key] = copy.deepcopy(random_.choice(VALUES))
    elif way < 0.85:
        holder.pop(key, None)
    else:
        holder[random_.choice(("x", "stop", "type", "n", "", "role", str(key) * 2))] = copy.deepcopy(
            random_.choice(VALUES)
        )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def corrupt(data: bytes, random_: random.Random) -> bytes:
    """Cut bytes off, change one, or repeat all."""
    place = random_.randrange(len(data))
    return random_.choice(
        [
            data[:place],
            data[:place] + bytes([random_.randrange(256)]) + data[place + 1 :],
            data + data,
            b"",
            data[place:],
        ]
    )


def fuzz(site: Served, count: int, seed: int, found: FuzzResult, detector: SuspendDetector) -> None:
    """Send requests one after the other over one connection. Repeat those that a suspended machine did not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=SLOW)
    for (path, data, kind), _ in zip(requests(seed), range(count), strict=False):
        while True:
            lost, began = detector.lost, time.monotonic()
            try:
                fault = send_one(connection, path, data, kind, found)
            except (OSError, http.client.HTTPException) as error:
                fault = type(error).__name__
                connection.close()
                connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=SLOW)
                time.sleep(0.5)  # so that the detector notices a suspension
                if isinstance(error, TimeoutError) and detector.lost > lost:
                    found.repeated += 1
                    continue
            break
        if fault is not None:
            found.faults.append(f"{fault} {path} {data[:2000]!r}")
        found.slowest = max(found.slowest, time.monotonic() - began - (detector.lost - lost))
    connection.close()


def send_one(
    connection: http.client.HTTPConnection, path: str, data: bytes, kind: str, found: FuzzResult
) -> str | None:
    """Send one body; return a fault, or None."""
    connection.request("POST", path, data, {"Content-Type": kind} if kind else {})
    reply = connection.getresponse()
    text = reply.read()
    found.statuses[reply.status] += 1
    is_fault = reply.status >= 500 or b'"internal_error"' in text
    return f"{reply.status} {text[:300]!r}" if is_fault else None


def fuzz_server(site: Served, count: int, seed: int, workers: int) -> dict[str, Any]:
    """Send mutated bodies from several clients at once."""
    found, detector, each = FuzzResult(), SuspendDetector(), -(-count // workers)
    threads = [threading.Thread(target=fuzz, args=(site, each, seed + n, found, detector)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    site.wait_idle()
    assert site.ask("/health").status == 200
    statuses = dict(sorted(found.statuses.items()))
    result = {
        "bodies": each * workers,
        "statuses": statuses,
        "faults": found.faults,
        "slowest": round(found.slowest, 3),
    }
    return {**result, "sent_again": found.repeated}


def run_schemathesis(site: Served, examples: int, seed: int) -> dict[str, Any]:
    """Run schemathesis in the environment that tests/clients/run.py makes."""
    sys.path.insert(0, str(Path(__file__).parent / "clients"))
    import run

    python = run.environment(Path(__file__).parent / "clients" / "schemathesis_needs.py")[0]
    each = -(-examples // 7)  # for each path with a body
    command = [str(python.parent / "schemathesis"), "run", f"http://127.0.0.1:{site.port}/openapi.json"]
    command += ["--phases", "fuzzing", "--max-examples", str(each), "--seed", str(seed), "--mode", "all"]
    command += ["--checks", "not_a_server_error", "--request-timeout", str(int(SLOW)), "--no-color"]
    command += ["--suppress-health-check", "all", "--continue-on-failure", "--include-method", "POST"]
    with tempfile.TemporaryDirectory() as where:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where)
    site.wait_idle()
    print(done.stdout[-3000:], file=sys.stderr)
    return {"status": done.returncode, "said": done.stdout.splitlines()[-12:]}


def tiny(where: Path) -> str:
    """Make a model with a short context."""
    return folder(where, "target", max_position_embeddings=256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--schemathesis", type=int, default=0, help="examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as where, outpace.load(tiny(Path(where)), "layers:0") as llm:
        limits = ServerLimits(request_timeout=SLOW * 4)
        with served(llm, limits, names=("tiny",), methods=("speculative",), tool_prompt=True) as site:
            if given.count:
                results["own"] = fuzz_server(site, given.count, given.seed, given.workers)
            if given.schemathesis:
                results["schemathesis"] = run_schemathesis(site, given.schemathesis, given.seed)
    print(json.dumps(results))
    return 1 if results.get("own", {}).get("faults") or results.get("schemathesis", {}).get("status") else 0


if __name__ == "__main__":
    sys.exit(main())
