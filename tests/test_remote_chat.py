"""`outpace chat --url`: conversations with the own server and with faulty ones."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from serving import Served, served

import outpace
from outpace.cli.remote import RemoteModel
from outpace.core.errors import UserError


@pytest.fixture(scope="module")
def site(tiny_folder: str) -> Iterator[Served]:
    with outpace.load(tiny_folder) as llm, served(llm, served_name=["tiny"]) as site:
        yield site


def test_a_conversation_with_a_server(site: Served, run: Run) -> None:
    options = ("--max-tokens", "8", "--ignore-eos")
    code, out, err = run("chat", "--url", f"127.0.0.1:{site.port}", *options, stdin="hello\n12\n/reset\nhello\n")
    messages, answers = [], []
    for question in ("hello", "12"):
        messages.append({"role": "user", "content": question})
        reply = site.chat(messages, temperature=0, max_tokens=8, ignore_eos=True).json["choices"][0]["message"]
        messages.append({"role": "assistant", "content": reply["content"]})
        answers.append(reply["content"].removesuffix("\n") + "\n")
    assert (code, out) == (0, "".join([*answers, answers[0]]))
    assert "tokens/s" in err
    assert "the conversation is forgotten" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["http://127.0.0.1:1", "--method=card"], "leave out --method"),
        (["http://127.0.0.1:1", "--draft-length=3"], "leave out --draft-length"),
        (["http://127.0.0.1:1", "--dtype=float32"], "leave out --dtype"),
        (["ftp://x"], "it must be an address"),
        (["http://"], "it must be an address"),
        (["http://127.0.0.1:x"], "its port must be"),
        (["http://127.0.0.1:1"], "no answer from 127.0.0.1"),
    ],
)
def test_wrong_addresses_and_flags_of_local_models(run: Run, words: list[str], says: str) -> None:
    code, _, err = run("chat", "--url", *words, stdin="hello\n")
    assert (code, says in err) == (2, True), err


class Odd(http.server.BaseHTTPRequestHandler):
    """Sends the status and body that the path requests."""

    replies: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def answer(self) -> None:
        status, body = self.replies[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"hello", "does not have the OpenAI API"),
        (200, b"[]", "does not have the OpenAI API"),
        (200, b'{"data": []}', "lists no model"),
        (401, b'{"error": {"message": "a key is needed"}}', "status 401: a key is needed"),
        (500, b"oh", "status 500"),
    ],
)
def test_other_servers(odd: str, status: int, body: bytes, says: str) -> None:
    Odd.replies = {"/v1/models": (status, body)}
    with pytest.raises(UserError, match=says):
        RemoteModel(odd, None, None)


def test_an_error_in_a_stream(odd: str) -> None:
    stream = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\ndata: {"error": {"message": "no more"}}\n\n'
    Odd.replies = {"/base/v1/chat/completions": (200, stream)}
    shown: list[str] = []
    with pytest.raises(UserError, match="the server ended the answer: no more"):
        RemoteModel(f"{odd}/base", "key", "x").answer([], {}, shown.append)
    assert shown == ["hi"]
