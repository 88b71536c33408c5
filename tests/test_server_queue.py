"""The queue of a server that runs: who is refused, when that is told, and what a place in it costs."""

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
from outpace.server.options import Limits


@pytest.fixture
def llm(served_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(served_folder, drafter="ngram", batch=2) as llm:
        yield llm


def test_a_full_queue_refuses_with_the_time_to_come_back(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, Limits(max_queue=3)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(5)]
        wait_for(lambda: len(site.service.admission.groups) == 5)
        refused = site.chat(**LONG)
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["code"] == "queue_full"
        assert site.ask("/v1/chat/completions", b"no JSON").status == 429  # told before the body is read
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0
        assert site.figure("requests_rejected_total", reason="queue_full") == 2
        brake.release()
        answers = [connection.makefile("rb").read(15) for connection in asked]
        assert answers == [b"HTTP/1.1 200 OK"] * 5
        site.wait_idle()
        assert site.chat(max_tokens=2).status == 200


def test_a_refusal_needs_the_head_alone_and_keeps_the_connection(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, Limits(max_queue=1)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(3)]
        wait_for(lambda: len(site.service.admission.groups) == 3)
        before = site.server.server_state.total_requests
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            answers = connection.makefile("rb")
            for _ in range(3):
                connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n".encode())
                assert read_refusal(answers)["error"]["code"] == "queue_full"
                connection.sendall(b"half")
                connection.sendall(b" a bod")  # which is dropped
            assert site.server.server_state.total_requests == before  # none of them came as far as the application
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
        assert site.figure("requests_rejected_total", reason="queue_full") == 3
        brake.release()
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 3


def read_refusal(answers: Any) -> Any:
    """The body of an answer that refuses, whose connection stays."""
    head = {}
    assert answers.readline() == b"HTTP/1.1 429 Too Many Requests\r\n"
    while (line := answers.readline()) != b"\r\n":
        name, _, value = line.decode().partition(": ")
        head[name] = value.strip()
    assert set(head) >= {"date", "retry-after", "retry-after-ms", "x-request-id", "x-content-type-options"}
    assert "connection" not in head
    return json.loads(answers.read(int(head["content-length"])))


@pytest.mark.parametrize("header", ["Connection: close", "Expect: 100-continue"])
def test_a_refused_connection_that_cannot_be_kept_is_closed(llm: outpace.LLM, brake: Brake, header: str) -> None:
    with served(llm, Limits(max_queue=1)) as site:
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


def test_a_full_queue_tells_who_may_not_ask_that_alone(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, Limits(max_queue=1), keys=frozenset([hashlib.sha256(b"mine").digest()])) as site:
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


def test_of_many_in_one_moment_those_that_are_too_many_are_refused_by_their_heads(
    llm: outpace.LLM, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have come before the event loop looks at the first of them."""
    with served(llm, Limits(max_queue=3)) as site:
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
        wait_for(lambda: len(site.service.admission.groups) == 5)  # two are taken up at once, three wait
        assert site.server.server_state.total_requests == reached  # none of the others came as far as the application
        wait_for(lambda: not site.service.admission.preparing)
        brake.release()
        statuses = sorted(one.recv(12) for one in connections)
        assert statuses == [b"HTTP/1.1 200"] * 5 + [b"HTTP/1.1 429"] * 15
        assert site.figure("requests_rejected_total", reason="queue_full") == 15
        site.wait_idle()


@pytest.mark.parametrize("wrong", [b"no JSON", b'{"messages": 3}', b'{"messages": [], "model": "another"}'])
def test_a_wrong_request_gives_its_place_back(llm: outpace.LLM, wrong: bytes) -> None:
    with served(llm, Limits(max_queue=1)) as site:
        for _ in range(4):
            assert site.ask(CHAT, wrong).status in (400, 404)
        assert site.ask(CHAT, wrong, content_type="text/plain").status in (400, 415)
        wait_for(lambda: not site.service.admission.preparing)
        assert site.chat(max_tokens=2).status == 200


def test_who_leaves_before_the_body_has_come_holds_no_place(llm: outpace.LLM) -> None:
    """A place is held from the body's end on: or heads alone would keep others out."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served(llm, Limits(max_queue=1)) as site:
        halves = [socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) for _ in range(8)]
        for half in halves:
            half.sendall(f"{head}Content-Length: 10\r\n\r\nhalf".encode())
        wait_for(lambda: len(site.server.server_state.tasks) >= 8)
        assert site.chat(max_tokens=2).status == 200
        for half in halves:
            half.close()
        wait_for(lambda: not site.server.server_state.tasks)
        wait_for(lambda: not site.service.admission.preparing)


def test_an_idle_server_takes_more_choices_than_its_queue_holds(llm: outpace.LLM) -> None:
    with served(llm, Limits(max_queue=1)) as site:
        assert len(site.chat(n=8, max_tokens=3).json["choices"]) == 8


def test_prompts_that_wait_are_bounded_in_tokens(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, Limits(max_queued_tokens=50)) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(2)]
        wait_for(lambda: len(site.service.admission.groups) == 2)
        assert site.chat("hello " * 60, max_tokens=3).status == 429
        brake.release()
        del asked


def test_a_key_has_a_bound_of_its_own(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, Limits(per_key=1)) as site:
        asked = send(site, {"messages": HELLO, **LONG})
        wait_for(lambda: site.service.admission.groups)
        assert site.chat(max_tokens=3).error["code"] == "key_limit"
        brake.release()
        assert asked.recv(15) == b"HTTP/1.1 200 OK"
        site.wait_idle()
        assert site.chat(max_tokens=3).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_room_so_long(llm: outpace.LLM, brake: Brake, stream: bool) -> None:
    """Then it is told by a status after which clients ask again, streamed or not: a stream begins with the engine."""
    with served(llm, Limits(queue_timeout=0.2)) as site:
        found = site.chat(stream=stream, **LONG)
        assert (found.status, found.error["code"]) == (429, "queue_timeout")
        assert found.error["type"] == "rate_limit_error"
        assert int(found.headers["retry-after"]) >= 1
        assert int(found.headers["retry-after-ms"]) > 0
        assert site.figure("requests_rejected_total", reason="queue_timeout") == 1
        brake.release()
        site.wait_idle()


def test_a_request_that_cannot_begin_in_time_is_refused_at_once(
    llm: outpace.LLM, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(llm) as site:
        asked = [send(site, {"messages": HELLO, **LONG}) for _ in range(4)]
        wait_for(lambda: len(site.service.admission.groups) == 4)
        assert not site.service.admission.is_full
        monkeypatch.setattr(site.service.admission._pace, "seconds", lambda tokens: tokens)  # one a second
        for found in (site.chat(**LONG), site.chat(stream=True, **LONG), site.ask(CHAT, b"no JSON")):
            assert (found.status, found.error["code"]) == (429, "queue_slow")
            assert int(found.headers["retry-after"]) >= 1
        assert site.figure("requests_rejected_total", reason="queue_slow") == 3
        brake.release()
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 4
        site.wait_idle()
        assert site.chat(max_tokens=3).status == 200
