"""Requests that are refused, wait or end early: the queue, limits, disconnects, timeouts, errors, and the shutdown."""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from serving import CHAT, HELLO, LONG, PATIENCE, Answered, Brake, Served, head, loaded, send, served, wait_for

import outpace
from outpace.core.errors import UserError
from outpace.server import logs
from outpace.server.choices import Choice, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.run import listen
from outpace.server.service import Admission

VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def llm(tiny_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(tiny_folder, drafter="ngram", batch=2) as llm:
        yield llm


def check_refusal(refused: Answered, code: str) -> None:
    assert (refused.status, refused.error["code"], refused.error["type"]) == (429, code, "rate_limit_error")
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")


def test_a_full_queue_refuses_with_retry_headers(llm: outpace.LLM, brake: Brake) -> None:
    with loaded(llm, brake, 5, max_queue=3) as site:
        check_refusal(site.chat(**LONG), "queue_full")
        check_refusal(site.ask(CHAT, b"no JSON"), "queue_full")  # before the body is parsed
        assert site.figure("requests_rejected_total", reason="queue_full") == 2


def test_a_refusal_needs_only_the_head_and_keeps_the_connection(llm: outpace.LLM, brake: Brake) -> None:
    with loaded(llm, brake, 3, max_queue=1) as site, site.socket() as connection:
        answers = connection.makefile("rb")
        for _ in range(3):
            connection.sendall(head(length=10))
            assert read_refusal(answers)["error"]["code"] == "queue_full"
            connection.sendall(b"half")
            connection.sendall(b" a bod")  # dropped
        connection.sendall(VERSION)
        assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
        assert site.figure("requests_rejected_total", reason="queue_full") == 3


def read_refusal(answers: Any) -> Any:
    """Read a refusal on a connection that stays open; return its body."""
    assert answers.readline() == b"HTTP/1.1 429 Too Many Requests\r\n"
    found = {}
    while (line := answers.readline()) != b"\r\n":
        name, _, value = line.decode().partition(": ")
        found[name] = value.strip()
    assert set(found) >= {"date", "retry-after", "retry-after-ms", "x-request-id", "x-content-type-options"}
    assert "connection" not in found
    return json.loads(answers.read(int(found["content-length"])))


def test_a_connection_that_never_ends_its_body_is_closed(llm: outpace.LLM, brake: Brake) -> None:
    """Also after a refusal, when nothing reads the body."""
    with loaded(llm, brake, 3, max_queue=1, body_seconds=0.2) as site, site.socket() as connection:
        connection.sendall(head(CHAT, 1000))
        answers = connection.makefile("rb")
        assert read_refusal(answers)["error"]["code"] == "queue_full"

        def is_closed() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return False

        wait_for(is_closed)


def test_a_full_queue_reports_a_wrong_key_first(llm: outpace.LLM, brake: Brake) -> None:
    keys = frozenset([hashlib.sha256(b"mine").digest()])
    with loaded(llm, brake, 3, key="mine", max_queue=1, keys=keys) as site:
        body = {"messages": HELLO, **LONG}
        assert site.ask(CHAT, body, X_Api_Key="yours").status == 401
        assert site.ask(CHAT, body, X_Api_Key="mine").status == 429
        assert site.ask("/v1/messages", body, X_Api_Key="mine").json["type"] == "error"
        assert site.ask("/tokenize", {"prompt": "a"}, X_Api_Key="mine").status == 200


def test_a_burst_is_refused(llm: outpace.LLM, brake: Brake) -> None:
    """All requests arrive before the event loop handles the first of them."""
    with served(llm, ServerLimits(max_queue=3)) as site:
        loop, held, go = site.service._loop, threading.Event(), threading.Event()
        connections = [site.socket() for _ in range(20)]
        wait_for(lambda: len(site.server.server_state.connections) == 20)
        assert loop is not None
        loop.call_soon_threadsafe(lambda: (held.set(), go.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        data = json.dumps({"messages": HELLO, **LONG}).encode()
        for one in connections:
            one.sendall(head(CHAT, len(data)) + data)
        go.set()
        site.wait_requests(5)  # two run, three wait
        wait_for(lambda: not site.service.admission.num_reserved)
        brake.release()
        assert sorted(one.recv(12) for one in connections) == [b"HTTP/1.1 200"] * 5 + [b"HTTP/1.1 429"] * 15
        assert site.figure("requests_rejected_total", reason="queue_full") == 15
        site.wait_idle()


BAD_REGEX = json.dumps({"messages": HELLO, "structured_outputs": {"regex": "("}}).encode()  # refused in a thread


@pytest.mark.parametrize("wrong", [b"no JSON", b'{"messages": [], "model": "another"}', BAD_REGEX])
def test_an_invalid_request_takes_no_place(llm: outpace.LLM, wrong: bytes) -> None:
    with served(llm, ServerLimits(max_queue=1)) as site:
        for _ in range(4):
            assert site.ask(CHAT, wrong).status in (400, 404)
        assert site.ask(CHAT, wrong, content_type="text/plain").status in (400, 415)
        wait_for(lambda: not site.service.admission.num_reserved)
        assert site.chat(max_tokens=2).status == 200


def test_an_unfinished_body_takes_no_place(llm: outpace.LLM) -> None:
    """Otherwise heads alone could fill the queue."""
    with served(llm, ServerLimits(max_queue=1)) as site:
        halves = [site.socket() for _ in range(8)]
        for half in halves:
            half.sendall(head(CHAT, 10) + b"half")
        wait_for(lambda: len(site.server.server_state.tasks) >= 8)
        assert site.chat(max_tokens=2).status == 200
        for half in halves:
            half.close()
        wait_for(lambda: not site.server.server_state.tasks)
        wait_for(lambda: not site.service.admission.num_reserved)
        assert len(site.chat(n=8, max_tokens=3).json["choices"]) == 8  # an idle server accepts more than max_queue


@pytest.mark.parametrize(
    ("limit", "code"), [({"max_queued_tokens": 50}, "queue_full"), ({"max_requests_per_key": 2}, "key_limit")]
)
def test_waiting_prompts_and_requests_per_key_are_bounded(
    llm: outpace.LLM, brake: Brake, limit: dict[str, int], code: str
) -> None:
    with loaded(llm, brake, 2, **limit) as site:
        check_refusal(site.chat("hello " * 60, max_tokens=3), code)


@pytest.mark.parametrize("stream", [False, True])
def test_queue_timeout(llm: outpace.LLM, brake: Brake, stream: bool) -> None:
    """Streamed or not, the status is one after which clients retry: a stream starts with the engine."""
    with served(llm, ServerLimits(queue_timeout=0.2)) as site:
        check_refusal(site.chat(stream=stream, **LONG), "queue_timeout")
        assert site.figure("requests_rejected_total", reason="queue_timeout") == 1
        brake.release()
        site.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_disconnect_aborts_the_request(llm: outpace.LLM, brake: Brake, stream: bool, steps: int) -> None:
    """After 0 steps the request is queued, after 1 its prefill is done, after 5 it is decoding."""
    with served(llm) as site:
        one = send(site, {"messages": HELLO, "stream": stream, **LONG})
        wait_for(lambda: llm.engine.waiting or llm.engine.running)
        brake.left = steps
        wait_for(lambda: brake.left == 0)
        one.close()
        site.wait_requests(0)
        brake.release()
        site.wait_idle()
        assert site.figure("client_disconnects_total") == 1
        assert site.figure("generation_tokens_total") < 100
        assert site.chat(max_tokens=3).status == 200


def test_disconnects_before_the_prefill_abort_no_other_request(llm: outpace.LLM) -> None:
    with served(llm) as site:
        for _ in range(20):
            send(site, {"messages": HELLO, **LONG}).close()
        assert site.chat(**LONG).status == 200
        site.wait_idle()


def test_sockets_have_no_delay(llm: outpace.LLM) -> None:
    """Without TCP_NODELAY the second event of a stream waits some 40 ms for the acknowledgement of the first."""
    with served(llm) as site, site.socket():
        wait_for(lambda: site.server.server_state.connections)
        for connection in site.server.server_state.connections:
            found = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_request_timeout(llm: outpace.LLM, brake: Brake, capsys: pytest.CaptureFixture[str]) -> None:
    """The log has the code of each error, also for a stream that had started with status 200."""
    with served(llm, ServerLimits(request_timeout=0.5)) as site:
        brake.left = 3
        found = site.chat(**LONG)
        assert (found.status, found.error["code"]) == (504, "timeout")
        assert found.headers["x-should-retry"] == "false"
        assert site.chat(stream=True, **LONG).status == 504  # before its start
        brake.left = 1 << 30  # the abort may take effect many steps later
        site.wait_idle()
        brake.left = 1
        assert error_of(site.chat(stream=True, **LONG))["code"] == "timeout"
        brake.release()
        site.wait_idle()
        site.chat(stop=5)
        wait_for(lambda: not site.server.server_state.tasks)
    found = [(line["status"], line["error"]) for line in logged(capsys) if line.get("path") == CHAT]
    assert found == [(504, "timeout"), (504, "timeout"), (200, "timeout"), (400, "invalid_value")]


def error_of(stream: Answered) -> dict[str, Any]:
    """Return the error that ends a stream."""
    assert stream.status == 200
    last = stream.body.decode().rstrip().split("\n\n")[-1]
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines of the log."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]


def test_a_silent_stream_reports_prefill_progress(llm: outpace.LLM, brake: Brake) -> None:
    brake.left = 1
    with served(llm, ServerLimits(ping=0.05)) as site:

        def release_later() -> None:
            wait_for(lambda: any(group.has_begun for group in list(site.service.admission.groups)))
            time.sleep(0.5)
            brake.release()

        threading.Thread(target=release_later).start()
        found = site.chat(stream=True, **LONG)
        assert re.search(rb": ping [01]/4\n", found.body)
        assert found.events


def test_an_error_of_one_request_ends_only_that(llm: outpace.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = llm.prepare

    def prepared(prompt: Any, params: outpace.SamplingParams, *more: Any) -> Any:
        asked = prepare(prompt, params, *more)
        if params.seed == 13:
            asked.text.watch = broken  # type: ignore[method-assign]
        return asked

    def broken(tokens: Any, drafted: int) -> int:
        raise ZeroDivisionError("the secret text")

    monkeypatch.setattr(llm, "prepare", prepared)
    with served(llm) as site:
        other = send(site, {"messages": HELLO, **LONG})
        found = site.chat(seed=13)
        assert (found.status, found.error["code"]) == (500, "internal_error")
        assert found.headers["x-should-retry"] == "false"
        assert b"secret" not in found.body
        assert error_of(site.chat(seed=13, stream=True))["type"] == "server_error"
        assert other.recv(15) == b"HTTP/1.1 200 OK"
        assert site.chat(max_tokens=3).status == 200
        site.wait_idle()


def test_an_engine_error_ends_the_running_answers(llm: outpace.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, faults = llm.engine.step, iter([True])

    def faulty(*given: Any) -> Any:
        if next(faults, False):
            raise RuntimeError("no more")
        return step(*given)

    monkeypatch.setattr(llm.engine, "step", faulty)
    with served(llm) as site:
        assert [site.chat(**LONG).status for _ in range(2)] == [500, 200]
        site.wait_idle()


def test_a_stuck_engine_is_unhealthy(llm: outpace.LLM, brake: Brake, capsys: pytest.CaptureFixture[str]) -> None:
    with loaded(llm, brake, 1, stuck=0.1) as site:
        wait_for(lambda: site.ask("/health").status == 503)
        assert site.ask("/ready").status == 503
        assert site.chat().error["code"] == "stuck"
        brake.release()
        wait_for(lambda: site.ask("/health").status == 200)
    assert any(line["event"] == "stack" for line in logged(capsys))


def test_write_timeout(llm: outpace.LLM) -> None:
    with served(llm, ServerLimits(write_timeout=0.3)) as site:
        body = {"prompt": "hello", "n": 48, "stream": True, "logprobs": 20, **LONG, "temperature": 1}
        connection = send(site, body, "/v1/completions", room=4096)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        wait_for(lambda: site.service.admission.groups)
        site.wait_idle()
        assert site.figure("client_disconnects_total") == 1
        connection.close()


def drain(site: Served, streams: int, whole: int = 0) -> list[socket.socket]:
    """Send requests, then the signal that stops the server."""
    sent = [send(site, {"messages": HELLO, "stream": n < streams, **LONG}) for n in range(streams + whole)]
    site.wait_requests(len(sent))
    site.server.handle_exit(signal.SIGTERM, None)
    return sent


def test_draining_finishes_running_answers(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(drain=PATIENCE)) as site:
        streams = drain(site, 4)
        assert site.ask("/ready").error["code"] == "draining"
        assert site.chat().status == 503
        assert site.ask("/health").status == 200
        brake.release()
        assert all(b"data: [DONE]" in stream.makefile("rb").read() for stream in streams)


def test_draining_ends_late_answers_with_an_error(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(drain=0.2)) as site:
        stream, whole = drain(site, 1, 1)
        body = stream.makefile("rb").read()
        assert b"shutting down" in body
        assert b"[DONE]" not in body
        assert whole.makefile("rb").read(12) == b"HTTP/1.1 503"
        brake.release()


def test_concurrent_requests_get_the_texts_of_single_ones(llm: outpace.LLM) -> None:
    with served(llm) as site:

        def ask(number: int) -> Any:
            return site.complete(f"hello {number} world", max_tokens=20, seed=3, ignore_eos=True).choice["text"]

        alone = list(map(ask, range(12)))
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(12))) == alone


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"status": 200, "prompt_tokens": 62, "completion_tokens": 11, "seconds": 0.07},
            "200 POST /v1/x  62+11 tokens  0.07 s  157 tokens/s",
        ),
        ({"status": 404, "seconds": 0.001, "error": "not_found"}, "404 POST /v1/x  0.00 s  error: not_found"),
        ({"status": 200, "seconds": 0.1, "ignored": "tools.0=web\x1b[2J"}, "ignored: tools.0=web?[2J"),
    ],
)
def test_the_log_is_readable_on_a_terminal(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], shown: str) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    logs.write("request", id="req_1", method="POST", path="/v1/x", **fields)
    (line,) = terminal.getvalue().splitlines()
    assert re.match(r"\d\d:\d\d:\d\d ", line)
    assert line.endswith(shown)


def test_the_log_has_one_line_per_request_and_no_text(llm: outpace.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with served(llm) as site:
        site.chat("the secret word", max_tokens=3, ignore_eos=True)
        site.wait_idle()
        time.sleep(0.05)
    lines = logged(capsys)
    (line,) = [line for line in lines if line.get("path") == CHAT]
    assert (line["status"], line["completion_tokens"]) == (200, 3)
    assert "secret" not in json.dumps(lines)
    with served(llm, log_prompts=True) as site:
        site.chat("the secret word", max_tokens=3)
    assert "secret" in capsys.readouterr().err


def test_two_servers_that_load_their_models_do_not_get_the_same_port() -> None:
    with listen(ServerOptions(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on .* port {port}: .*try --port {port + 1}"):
            listen(ServerOptions(port=port))


def group(choices: int = 1) -> Any:
    """A request that waits until `begin`."""
    request = SimpleNamespace(prompt=[1, 2, 3], max_tokens=1000)
    made = [Choice(cast(Any, SimpleNamespace(request=request)), [number]) for number in range(choices)]
    for choice in made:
        choice.run = cast(Any, SimpleNamespace(history=SimpleNamespace(began=0.0), tokens=[]))
    return ChoiceGroup(made, [[1, 2, 3]], "")


def begin(group: Any) -> None:
    group.choices[0].run.history.began = 1.0


def test_free_slots_are_filled_at_once() -> None:
    """They do not count as places in the queue."""
    queue, groups = Admission(ServerLimits(max_queue=2), batch=3), [group() for _ in range(5)]
    for one in groups:
        queue.check()
        queue.admit(one)
    with pytest.raises(ApiError, match="the queue is full: 5 answers are waiting; retry later") as refused:
        queue.check()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.headers == {"retry-after": "1", "retry-after-ms": "1000"}
    for one in groups[:3]:
        begin(one)
    assert queue.count() == (2, 3)
    with pytest.raises(ApiError, match="2 answers are waiting"):
        queue.admit(group())
    queue.remove(groups[0])
    queue.check()


def test_a_started_request_has_no_queue_timeout() -> None:
    """One started choice is enough: the others follow."""
    queue, one = Admission(ServerLimits(), batch=1), group(3)
    assert queue.timeout_error(one).code == "queue_timeout"  # type: ignore[union-attr]
    begin(one)
    assert queue.timeout_error(one) is None


def test_reserved_places_count() -> None:
    queue = Admission(ServerLimits(max_queue=1), batch=1)
    queue.reserve()
    queue.reserve()
    with pytest.raises(ApiError, match="the queue is full: 2 answers are waiting") as refused:
        queue.reserve()
    assert refused.value.status == 429
    queue.release()
    queue.reserve()
