"""Requests that end early: disconnects, timeouts, errors in the engine, and the shutdown of the server."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CHAT, HELLO, LONG, PATIENCE, Answered, Brake, send, served, wait_for

import outpace
from outpace.server.options import ServerLimits


@pytest.fixture
def llm(served_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(served_folder, drafter="ngram", batch=2) as llm:
        yield llm


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
        wait_for(lambda: not site.service.admission.groups)
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
    with served(llm) as site, socket.create_connection(("127.0.0.1", site.port)):
        wait_for(lambda: site.server.server_state.connections)
        for connection in site.server.server_state.connections:
            found = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_request_timeout(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(request_timeout=0.5)) as site:
        brake.left = 3
        found = site.chat(**LONG)
        assert (found.status, found.error["code"]) == (504, "timeout")
        assert found.headers["x-should-retry"] == "false"
        assert site.chat(stream=True, **LONG).status == 504  # before its start
        brake.left = 9
        site.wait_idle()
        brake.left = 1
        assert error_of(site.chat(stream=True, **LONG))["code"] == "timeout"
        brake.release()
        site.wait_idle()


def error_of(stream: Answered) -> dict[str, Any]:
    """Return the error that ends a stream."""
    assert stream.status == 200
    last = stream.body.decode().rstrip().split("\n\n")[-1]
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error


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

    def faulty() -> Any:
        if next(faults, False):
            raise RuntimeError("no more")
        return step()

    monkeypatch.setattr(llm.engine, "step", faulty)
    with served(llm) as site:
        assert site.chat(**LONG).status == 500
        assert site.chat(**LONG).status == 200
        site.wait_idle()


def test_a_stuck_engine_is_unhealthy(llm: outpace.LLM, brake: Brake, capsys: pytest.CaptureFixture[str]) -> None:
    with served(llm, ServerLimits(stuck=0.1)) as site:
        one = send(site, {"messages": HELLO, **LONG})
        wait_for(lambda: site.ask("/health").status == 503)
        assert site.ask("/ready").status == 503
        assert site.chat().error["code"] == "stuck"
        brake.release()
        wait_for(lambda: site.ask("/health").status == 200)
        one.close()
    assert '"event": "stack"' in capsys.readouterr().err


def test_write_timeout(llm: outpace.LLM) -> None:
    with served(llm, ServerLimits(write_timeout=0.3)) as site:
        body = {"prompt": "hello", "n": 48, "stream": True, "logprobs": 20, **LONG, "temperature": 1}
        connection = send(site, body, "/v1/completions", room=4096)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        wait_for(lambda: site.service.admission.groups)
        site.wait_idle()
        assert site.figure("client_disconnects_total") == 1
        connection.close()


def test_draining_finishes_running_answers(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(drain=PATIENCE)) as site:
        streams = [send(site, {"messages": HELLO, "stream": True, **LONG}) for _ in range(4)]
        wait_for(lambda: len(site.service.admission.groups) == 4)
        site.server.handle_exit(signal.SIGTERM, None)
        assert site.ask("/ready").error["code"] == "draining"
        assert site.chat().status == 503
        assert site.ask("/health").status == 200
        brake.release()
        for stream in streams:
            body = stream.makefile("rb").read()
            assert b"data: [DONE]" in body


def test_draining_ends_late_answers_with_an_error(llm: outpace.LLM, brake: Brake) -> None:
    with served(llm, ServerLimits(drain=0.2)) as site:
        stream = send(site, {"messages": HELLO, "stream": True, **LONG})
        whole = send(site, {"messages": HELLO, **LONG})
        wait_for(lambda: len(site.service.admission.groups) == 2)
        site.server.handle_exit(signal.SIGTERM, None)
        body = stream.makefile("rb").read()
        assert b"shutting down" in body
        assert b"[DONE]" not in body
        assert whole.makefile("rb").read(12) == b"HTTP/1.1 503"
        brake.release()


def test_concurrent_requests_get_the_texts_of_single_ones(llm: outpace.LLM) -> None:
    with served(llm) as site:
        prompts = [f"hello {number} world" for number in range(12)]
        asked = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
        alone = [site.complete(prompt, **asked).json["choices"][0]["text"] for prompt in prompts]
        found: dict[int, str] = {}

        def ask(number: int) -> None:
            found[number] = site.complete(prompts[number], **asked).json["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(12)] == alone


def test_the_log_has_one_line_per_request_and_no_text(llm: outpace.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with served(llm) as site:
        site.chat("the secret word", max_tokens=3)
        wait_for(lambda: site.is_idle())
        time.sleep(0.05)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("path") == CHAT]
    assert (line["status"], line["completion_tokens"]) == (200, 3)
    assert "secret" not in json.dumps(lines)
    with served(llm, log_prompts=True) as site:
        site.chat("the secret word", max_tokens=3)
    assert "secret" in capsys.readouterr().err


def test_the_log_has_error_codes(llm: outpace.LLM, brake: Brake, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for a stream that had started with status 200."""
    with served(llm, ServerLimits(request_timeout=0.5)) as site:
        site.chat(wrong=1)
        site.chat(stream=True, **LONG)
        brake.left = 1 << 30  # the abort may take effect many steps later
        site.wait_idle()
        brake.left = 1
        site.chat(stream=True, **LONG)
        brake.release()
        site.wait_idle()
        wait_for(lambda: not site.server.server_state.tasks)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    found = [(line["status"], line["error"]) for line in lines if line.get("path") == CHAT]
    assert found == [(400, "unknown_field"), (504, "timeout"), (200, "timeout")]
