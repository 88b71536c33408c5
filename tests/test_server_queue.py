"""The queue of a running server: refusals, reservations, and limits."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CHAT, HELLO, LONG, PATIENCE, Brake, send, served, wait_for

import outpace
from outpace.server.options import ServerLimits


@pytest.fixture
def llm(served_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(served_folder, drafter="ngram", batch=2) as llm:
        yield llm


def test_a_full_queue_refuses_with_retry_headers(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(max_queue=3)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(5)]
        wait_for(lambda: len(site.service.admission.groups) == 5)
        refused = site.chat(**LONG)
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["code"] == "queue_full"
        assert site.ask("/v1/chat/completions", b"no JSON").status == 429  # before the body is parsed
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0
        assert site.figure("requests_rejected_total", reason="queue_full") == 2
        brake.release()
        answers = [connection.makefile("rb").read(15) for connection in asked]
        assert answers == [b"HTTP/1.1 200 OK"] * 5
        site.wait_idle()
        assert site.chat(max_tokens=2).status == 200


def test_a_refusal_needs_only_the_head_and_keeps_the_connection(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(max_queue=1)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(3)]
        wait_for(lambda: len(site.service.admission.groups) == 3)
        before = site.server.server_state.total_requests
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            answers = connection.makefile("rb")
            for _ in range(3):
                connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n".encode())
                assert read_refusal(answers)["error"]["code"] == "queue_full"
                connection.sendall(b"half")
                connection.sendall(b" a bod")  # dropped
            assert site.server.server_state.total_requests == before  # none reached the application
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
        assert site.figure("requests_rejected_total", reason="queue_full") == 3
        brake.release()
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 3


def read_refusal(answers: Any) -> Any:
    """Read a refusal on a connection that stays open; return its body."""
    head = {}
    assert answers.readline() == b"HTTP/1.1 429 Too Many Requests\r\n"
    while (line := answers.readline()) != b"\r\n":
        name, _, value = line.decode().partition(": ")
        head[name] = value.strip()
    assert set(head) >= {"date", "retry-after", "retry-after-ms", "x-request-id", "x-content-type-options"}
    assert "connection" not in head
    return json.loads(answers.read(int(head["content-length"])))


@pytest.mark.parametrize("header", ["Connection: close", "Expect: 100-continue"])
def test_a_refusal_closes_a_connection_that_cannot_be_kept(llm: outpace.LLM, brake: Brake, header: str) -> None:
    with served(llm, ServerLimits(max_queue=1)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(3)]
        wait_for(lambda: len(site.service.admission.groups) == 3)
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{header}\r\nContent-Length: 4\r\n\r\n"
            connection.sendall(head.encode() + (b"body" if "close" in header else b""))
            reply = connection.makefile("rb").read()  # to the connection's end
        assert reply.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nconnection: close\r\n" in reply
        brake.release()
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 3


def test_a_full_queue_reports_a_wrong_key_first(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(max_queue=1), keys=frozenset([hashlib.sha256(b"mine").digest()])) as site:
        body = {"messages": HELLO, **LONG}
        threads = [threading.Thread(target=site.ask, args=(CHAT, body), kwargs={"X_Api_Key": "mine"}) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(site.service.admission.groups) == 3)
        assert site.ask(CHAT, body, X_Api_Key="yours").status == 401
        assert site.ask(CHAT, body, X_Api_Key="mine").status == 429
        assert site.ask("/v1/messages", body, X_Api_Key="mine").json["type"] == "error"
        assert site.ask("/tokenize", {"prompt": "a"}, X_Api_Key="mine").status == 200
        brake.release()
        for thread in threads:
            thread.join()


def test_a_burst_is_refused_by_the_heads(llm: outpace.LLM, brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests arrive before the event loop handles the first of them."""
    with served(llm, ServerLimits(max_queue=3)) as site:
        loop, reached = site.service._loop, site.server.server_state.total_requests
        held, go = threading.Event(), threading.Event()
        connections = [socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) for _ in range(20)]
        wait_for(lambda: len(site.server.server_state.connections) == 20)
        assert loop is not None
        loop.call_soon_threadsafe(lambda: (held.set(), go.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        data = json.dumps({"messages": HELLO, **LONG}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for one in connections:
            one.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        go.set()
        wait_for(lambda: len(site.service.admission.groups) == 5)  # two run, three wait
        assert site.server.server_state.total_requests == reached  # none of the others reached the application
        wait_for(lambda: not site.service.admission.num_reserved)
        brake.release()
        statuses = sorted(one.recv(12) for one in connections)
        assert statuses == [b"HTTP/1.1 200"] * 5 + [b"HTTP/1.1 429"] * 15
        assert site.figure("requests_rejected_total", reason="queue_full") == 15
        site.wait_idle()


@pytest.mark.parametrize("wrong", [b"no JSON", b'{"messages": 3}', b'{"messages": [], "model": "another"}'])
def test_an_invalid_request_releases_its_reservation(llm: outpace.LLM, wrong: bytes) -> None:
    with served(llm, ServerLimits(max_queue=1)) as site:
        for _ in range(4):
            assert site.ask(CHAT, wrong).status in (400, 404)
        assert site.ask(CHAT, wrong, content_type="text/plain").status in (400, 415)
        wait_for(lambda: not site.service.admission.num_reserved)
        assert site.chat(max_tokens=2).status == 200


def test_an_unfinished_body_has_no_reservation(llm: outpace.LLM) -> None:
    """Reservations start at the body's end: otherwise heads alone could fill the queue."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served(llm, ServerLimits(max_queue=1)) as site:
        halves = [socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) for _ in range(8)]
        for half in halves:
            half.sendall(f"{head}Content-Length: 10\r\n\r\nhalf".encode())
        wait_for(lambda: len(site.server.server_state.tasks) >= 8)
        assert site.chat(max_tokens=2).status == 200
        for half in halves:
            half.close()
        wait_for(lambda: not site.server.server_state.tasks)
        wait_for(lambda: not site.service.admission.num_reserved)


def test_an_idle_server_accepts_more_choices_than_max_queue(llm: outpace.LLM) -> None:
    with served(llm, ServerLimits(max_queue=1)) as site:
        assert len(site.chat(n=8, max_tokens=3).json["choices"]) == 8


def test_waiting_prompt_tokens_are_bounded(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(max_queued_tokens=50)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(2)]
        wait_for(lambda: len(site.service.admission.groups) == 2)
        assert site.chat("hello " * 60, max_tokens=3).status == 429
        brake.release()
        del asked


def test_requests_per_key_are_bounded(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(per_key=1)) as site:
        asked = send(site, {"messages": HELLO, **LONG})
        wait_for(lambda: site.service.admission.groups)
        assert site.chat(max_tokens=3).error["code"] == "key_limit"
        brake.release()
        assert asked.recv(15) == b"HTTP/1.1 200 OK"
        site.wait_idle()
        assert site.chat(max_tokens=3).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_queue_timeout(llm: outpace.LLM, brake: Brake, stream: bool) -> None:
    """Streamed or not, the status is one after which clients retry: a stream starts with the engine."""
    with served(llm, ServerLimits(queue_timeout=0.2)) as site:
        found = site.chat(stream=stream, **LONG)
        assert (found.status, found.error["code"]) == (429, "queue_timeout")
        assert found.error["type"] == "rate_limit_error"
        assert int(found.headers["retry-after"]) >= 1
        assert int(found.headers["retry-after-ms"]) > 0
        assert site.figure("requests_rejected_total", reason="queue_timeout") == 1
        brake.release()
        site.wait_idle()


def test_a_slow_queue_refuses(llm: outpace.LLM, brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(llm) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(4)]
        wait_for(lambda: len(site.service.admission.groups) == 4)
        assert not site.service.admission.is_full
        monkeypatch.setattr(site.service.admission._estimator, "seconds", lambda tokens: tokens)  # one token a second
        for found in (site.chat(**LONG), site.chat(stream=True, **LONG), site.ask(CHAT, b"no JSON")):
            assert (found.status, found.error["code"]) == (429, "queue_slow")
            assert int(found.headers["retry-after"]) >= 1
        assert site.figure("requests_rejected_total", reason="queue_slow") == 3
        brake.release()
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 4
        site.wait_idle()
        assert site.chat(max_tokens=3).status == 200
