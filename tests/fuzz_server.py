"""Fuzz the server: it must answer every request body in time, and never with an internal error.

python tests/fuzz_server.py --count 10000                  # mutations of valid bodies
python tests/fuzz_server.py --schemathesis 10000           # schemathesis, from the OpenAPI document

The model is a tiny random one. The last line is JSON: statuses, faults, and the slowest answer in seconds.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import itertools
import json
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import HELLO, PATIENCE, Served, served
from test_library import folder

import outpace
from outpace.server.options import ServerLimits

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "maxProperties": 1}}}
THOUGHT, UNKNOWN = {"type": "thinking", "thinking": "a"}, {"type": "x", "content": [{"type": "text", "text": "a"}]}
TURN = {"role": "assistant", "content": [THOUGHT, UNKNOWN, {"type": "text", "text": "b"}]}
CALLS = [
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
]
COMMON = {
    **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3},
    **{"min_tokens": 1, "stop_token_ids": [7], "allowed_token_ids": [20, 21], "bad_words": ["x"]},
    **{"return_token_ids": True, "return_sources": True, "return_rounds": True, "ignore_eos": False, "stream": True},
    **{"skip_special_tokens": False, "cache_salt": "a", "random_seed": 3, "repeat_penalty": 1.1, "repeat_last_n": 64},
    **{"logit_bias": {"5": 1.0}, "outpace": {"speculation": True, "nodes": 4}, "metadata": {"a": "b"}, "model": "tiny"},
}
TEMPLATE = {
    **{"chat_template_kwargs": {}, "enable_thinking": False, "reasoning_effort": "low", "verbosity": "low"},
    **{"thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}, "add_generation_prompt": True},
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
            **TEMPLATE,
            "messages": [*HELLO, TURN, {"role": "assistant", "function_call": {"name": "f"}}, *HELLO],
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
        {
            **{**COMMON, **TEMPLATE, "truncation": "auto", "instructions": "be", "top_logprobs": 1, "tools": []},
            "text": {"format": {"type": "text"}},
            "input": [*HELLO, {"type": "reasoning", "summary": []}, UNKNOWN, *CALLS, TURN],
        },
    ),
    (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 3},
        {**COMMON, **TEMPLATE, "system": "be", "stop_sequences": ["a"], "tools": [], "tool_choice": {"type": "auto"}}
        | {"messages": [*HELLO, TURN, *HELLO]},
    ),
    ("/v1/messages/count_tokens", {"messages": HELLO}, {"system": [{"type": "text", "text": "be"}]}),
    ("/tokenize", {"prompt": "hello"}, {"messages": HELLO, "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [*HELLO, TURN]}, {"tools": [TOOL], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [5, 6]}, {"model": "tiny"}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3.0, 127, 10**6, 2**31, 2**63, 2**70, -(2**70), 0.5, 1.5, -0.0, 1e308, -1e-308),
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
    """What the server answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds


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
        name = random_.choice(("x", "stop", "type", "n", "", "role", str(key) * 2))
        holder[name] = copy.deepcopy(random_.choice(VALUES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def corrupt(data: bytes, random_: random.Random) -> bytes:
    """Cut bytes off, change one, or repeat all."""
    place = random_.randrange(len(data))
    changed = data[:place] + bytes([random_.randrange(256)]) + data[place + 1 :]
    return random_.choice([data[:place], changed, data + data, b"", data[place:]])


def fuzz(site: Served, count: int, seed: int, found: FuzzResult) -> None:
    """Send requests one after the other over one connection."""
    connection = site.connect()  # a missing answer is a hang after PATIENCE seconds
    for path, data, kind in itertools.islice(requests(seed), count):
        began, fault = time.monotonic(), ""
        try:
            connection.request("POST", path, data, {"Content-Type": kind} if kind else {})
            reply = connection.getresponse()
            text = reply.read()
            found.statuses[reply.status] += 1
            if reply.status >= 500 or b'"internal_error"' in text:
                fault = f"{reply.status} {text[:300]!r}"
        except (OSError, http.client.HTTPException) as error:
            fault = type(error).__name__
            connection.close()  # the next request opens it again
        if fault:
            found.faults.append(f"{fault} {path} {data[:2000]!r}")
        found.slowest = max(found.slowest, time.monotonic() - began)
    connection.close()


def fuzz_server(site: Served, count: int, seed: int, workers: int) -> dict[str, Any]:
    """Send mutated bodies from several clients at once."""
    found, each = FuzzResult(), -(-count // workers)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda number: fuzz(site, each, seed + number, found), range(workers)))
    site.wait_idle()
    assert site.ask("/health").status == 200
    result = {"bodies": each * workers, "statuses": dict(sorted(found.statuses.items())), "faults": found.faults}
    return {**result, "slowest": round(found.slowest, 3)}


def run_schemathesis(site: Served, examples: int, seed: int) -> dict[str, Any]:
    """Run schemathesis in the environment that tests/clients/run.py makes."""
    clients = Path(__file__).parent / "clients"
    python = runpy.run_path(str(clients / "run.py"))["environment"](clients / "schemathesis_needs.py")[0]
    each = -(-examples // 7)  # for each path with a body
    command = [str(python.parent / "schemathesis"), "run", f"http://127.0.0.1:{site.port}/openapi.json"]
    command += ["--phases", "fuzzing", "--max-examples", str(each), "--seed", str(seed), "--mode", "all"]
    command += ["--checks", "not_a_server_error", "--request-timeout", str(int(PATIENCE)), "--no-color"]
    command += ["--suppress-health-check", "all", "--continue-on-failure", "--include-method", "POST"]
    with tempfile.TemporaryDirectory() as where:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where)
    site.wait_idle()
    print(done.stdout[-3000:], file=sys.stderr)
    return {"status": done.returncode, "said": done.stdout.splitlines()[-12:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--schemathesis", type=int, default=0, help="examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    limits = ServerLimits(request_timeout=PATIENCE)
    with tempfile.TemporaryDirectory() as where:
        model = folder(Path(where), "target", max_position_embeddings=256)
        options = {"names": ("tiny",), "methods": ("speculative",), "tool_prompt": True}
        with outpace.load(model, "layers:0") as llm, served(llm, limits, **options) as site:
            if given.count:
                results["own"] = fuzz_server(site, given.count, given.seed, given.workers)
            if given.schemathesis:
                results["schemathesis"] = run_schemathesis(site, given.schemathesis, given.seed)
    print(json.dumps(results))
    return 1 if results.get("own", {}).get("faults") or results.get("schemathesis", {}).get("status") else 0


if __name__ == "__main__":
    sys.exit(main())
