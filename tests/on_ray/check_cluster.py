"""Checks of outpace on a Ray cluster of two nodes on this machine: `make test-ray`.

Texts equal the library's through killed replicas and nodes. Times are printed and not compared with anything.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

import outpace
from outpace.cluster.on_ray import place_draft_worker
from outpace.core.errors import UserError
from outpace.server.on_ray import build

for name, value in (("period_ms", 500), ("timeout_ms", 500), ("initial_delay_ms", 500), ("failure_threshold", 3)):
    os.environ.setdefault(f"RAY_health_check_{name}", str(value))  # Ray notices a dead node in 1.5 s instead of 14 s

ADDRESS = "http://127.0.0.1:8000"
PROMPTS = [
    f"Name {count} things that one finds in a {place}."
    for count in range(2, 10)
    for place in ["kitchen", "forest", "port", "school"]
]
TOKENS, PATIENCE = 24, 120.0


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The library's answers to the prompts."""
    with outpace.load(draft="none", method="autoregressive") as llm:
        texts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return [result.text for result in llm.generate(texts, max_tokens=TOKENS, temperature=0.0)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, each with room for one replica and a draft worker, and the shipped pair served by two replicas."""
    node = {"num_cpus": 3, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=3, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    serve.run(build({"replicas": "2", "num_cpus": "2", "batch": "32"}), name="outpace", route_prefix="/")
    until_answered()
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def ask(prompt: str, session: str = "") -> tuple[str, int]:
    """Return an answer's text, and the number of prompt tokens that were in the prefix cache."""
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0}
    headers = {"content-type": "application/json", **({"x-session-id": session} if session else {})}
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        found = json.load(reply)
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def until_answered() -> float:
    """Wait for an answer; return the seconds until it came."""
    began = time.monotonic()
    while True:
        try:
            ask(PROMPTS[0])
            return time.monotonic() - began
        except OSError:  # also HTTPError
            assert time.monotonic() < began + PATIENCE, "no replica answers"
            time.sleep(0.05)


def ask_all(expected: list[str]) -> int:
    """Ask all prompts at once; return how many clients saw a failure. All other texts must be equal."""

    def answer(number: int) -> bool:
        try:
            return ask(PROMPTS[number])[0] == expected[number]
        except (OSError, json.JSONDecodeError):
            broken.append(number)
            return True

    broken: list[int] = []
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert all(clients.map(answer, range(len(PROMPTS))))
    return len(broken)


def replicas() -> list[int]:
    """Return the process ids of all replicas."""
    named = {one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    return [pid for pid, command in named.items() if command.startswith("ray::ServeReplica:outpace")]


def test_texts_equal_those_of_the_library(cluster: Cluster, expected: list[str]) -> None:
    assert len(PROMPTS) == 32
    assert ask_all(expected) == 0
    assert len(replicas()) == 2


def test_a_session_stays_on_its_replica(cluster: Cluster) -> None:
    """The second request of a session finds the first one's prompt in the prefix cache."""
    for number in range(8):
        prompt = f"This is conversation {number}. Say which one it is."
        first, again = ask(prompt, f"session-{number}"), ask(prompt, f"session-{number}")
        assert first[0] == again[0]
        assert again[1] > first[1], f"session {number}: {first[1]} and {again[1]} cached tokens"


def test_a_killed_replica_costs_only_its_own_answers(cluster: Cluster, expected: list[str]) -> None:
    with ThreadPoolExecutor(1) as other:
        running = other.submit(ask_all, expected)
        time.sleep(0.3)
        os.kill(replicas()[0], signal.SIGKILL)
        print(f"the next answer came {until_answered():.2f} s after the end of a replica")
        print(f"{running.result()} of {len(PROMPTS)} clients saw a failure")
    assert ask_all(expected) == 0


def test_killing_a_draft_worker_changes_no_text(cluster: Cluster) -> None:
    address = place_draft_worker(resources={"num_cpus": 1})
    assert address.startswith("grpc://")
    with outpace.load(draft="none", method="autoregressive") as llm:
        texts = [llm.chat(prompt, max_tokens=96, temperature=0.0).text for prompt in PROMPTS[:3]]
    with outpace.load(worker=address) as llm:
        end, drafted = time.monotonic() + PATIENCE, 0
        while not drafted:  # on a busy machine the first layers may come too late
            result = llm.chat(PROMPTS[0], max_tokens=96, temperature=0.0)
            assert result.text == texts[0]
            drafted = result.figures.drafted
            assert time.monotonic() < end, "the worker drafted nothing"
        [worker] = [
            one.pid for one in psutil.process_iter(["cmdline"]) if "ray::DraftActor" in str(one.info["cmdline"])
        ]
        os.kill(worker, signal.SIGKILL)
        with pytest.warns(UserWarning, match="drafter"):
            assert [llm.chat(prompt, max_tokens=96, temperature=0.0).text for prompt in PROMPTS[1:3]] == texts[1:]


def test_a_draft_worker_that_cannot_load_gives_one_sentence(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="no-such-draft"):
        place_draft_worker("/no-such-draft.gguf")


def test_a_killed_node_costs_only_its_own_answers(cluster: Cluster, expected: list[str]) -> None:
    [node] = [one for one in cluster.list_all_nodes() if one is not cluster.head_node]
    with ThreadPoolExecutor(1) as other:
        running = other.submit(ask_all, expected)
        time.sleep(0.3)
        cluster.remove_node(node, allow_graceful=False)
        print(f"the next answer came {until_answered():.2f} s after the end of a node")
        print(f"{running.result()} of {len(PROMPTS)} clients saw a failure")
    assert ask_all(expected) == 0
