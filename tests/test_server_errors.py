"""Bad requests get a status and a sentence in the format of the API, and never a 500."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz_server import fuzz_server
from serving import CHAT, HELLO, Answered, Served, head, served, wait_for

import outpace
from outpace.core.errors import UserError
from outpace.server.app import GETS
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.request_body import parse_json

KEYS = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two"))


@pytest.fixture(scope="module")
def llm(tiny_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(tiny_folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def site(llm: outpace.LLM) -> Iterator[Served]:
    with served(llm, ServerLimits(max_body=20_000, body_seconds=1.0)) as site:
        yield site


@pytest.fixture(scope="module")
def locked(llm: outpace.LLM) -> Iterator[Served]:
    with served(llm, keys=KEYS) as site:
        yield site


def raw(site: Served, sent: bytes) -> Answered:
    """Send bytes on a connection of their own."""
    with site.socket() as connection:
        connection.sendall(sent)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return Answered(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "x"}, "previous_response_id", "this API does not support it"),
        ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search", "use_beam_search is True"),
        ({"typical_p": 0.5}, "typical_p", "typical_p is 0.5"),
        ({"max_new_tokens": "5"}, "max_new_tokens", "max_new_tokens is '5'"),
        ({"seed": 1, "random_seed": 2}, "random_seed", "seed is 1, but random_seed is 2: give one of them"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'"),
        *[({"top_p": value}, "top_p", f"top_p is {value}") for value in (-0.1, 2)],
        *[({"n": value}, "n", f"n is {value}") for value in (0, 129, 2.5)],
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "stop has an empty string"),
        ({"stop": 5}, "stop", "stop is 5"),
        ({"seed": 2**63}, "seed", "seed is"),
        ({"logit_bias": {"x": 1}}, None, "a token of logit_bias is 'x'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias of token 5 is 101"),
        ({"stop_token_ids": [99999]}, None, "a token of stop_token_ids is 99999"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "min_tokens is 9"),
        ({"store": True}, "store", "stores nothing"),
        ({"outpace": {"method": "crad"}}, "outpace", "method 'crad' is not allowed"),
        ({"model": "gpt-9"}, "model", "there is no model 'gpt-9'"),
        *[
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs", f"may not have {name}")
            for name in ("tools", "chat_template")
        ],
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools",
            "strict of tool f is 'yes'",
        ),
        ({"messages": []}, "messages", "messages is []"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages", "messages.0.role is 'clown'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages.0.content"),
        ({"messages": "hello"}, "messages", "messages is 'hello'"),
    ],
)
def test_an_error_names_the_field(site: Served, fields: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True):
        found = site.ask(CHAT, {"messages": HELLO, "max_tokens": 5, "stream": stream, **fields})
        assert found.status == (404 if "model" in fields else 400), found.body
        assert says in found.error["message"]
        assert found.error["param"] == param
        assert found.error["type"] == "invalid_request_error"
    assert site.is_idle()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "empty list"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": {}}, "prompt is {}"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "token 99999"),
        ({"prompt": "x", "max_tokens": 0}, "without echo"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of is 2"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "cannot be streamed"),
        ({"prompt": "x", "logprobs": 21}, "logprobs is 21"),
        ({"prompt": ["x"] * 20, "n": 128}, "exceed the limit of 1024 answers"),
        ({}, "prompt is missing"),
    ],
)
def test_errors_of_completions(site: Served, fields: dict[str, Any], says: str) -> None:
    found = site.ask("/v1/completions", fields)
    assert found.status == 400
    assert says in found.error["message"]


def test_a_too_long_prompt_has_its_own_code(site: Served) -> None:
    for found in (site.chat("hello " * 200), site.complete("hello " * 200), site.chat("hello " * 200, stream=True)):
        assert found.status == 400
        assert found.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        *[(body, {}, 400) for body in (b"{", b"[]", b"", b"\xff", b'{"n": NaN}', b'{"messages": "\\ud800"}')],
        *[
            (b'{"metadata": {"x": [%b]}}' % number, {}, 400)
            for number in (b"1e999", b"-1e400", b"Infinity", b"-Infinity")
        ],
        (b"[" * 10_000, {}, 400),
        (b'{"a":' * 70 + b"1" + b"}" * 70, {}, 400),
        (b'{"n": ' + b"9" * 5000 + b"}", {}, 400),
        (b"{}" + b" " * 20_000, {}, 413),
        (b"{}", {"Content_Type": "text/plain"}, 415),
        (b"{}", {"Content_Type": ""}, 415),
        *[
            (b"{}", {"Content_Encoding": encoding}, 415)
            for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity")
        ],
    ],
)
def test_invalid_json_is_refused(site: Served, body: bytes, headers: dict[str, str], status: int) -> None:
    found = site.ask(CHAT, body, **headers)
    assert found.status == status, found.body
    assert found.error["message"]


def test_json_depth_is_bounded() -> None:
    assert parse_json(b'{"a":' * 64 + b"1" + b"}" * 64, 64)
    with pytest.raises(ApiError, match="more than 63"):
        parse_json(b'{"a":' * 64 + b"1" + b"}" * 64, 63)


def test_a_large_body_without_a_length_is_refused(site: Served) -> None:
    connection = site.connect()
    body = iter([b" " * 10_000] * 5)
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413


def test_an_unfinished_body_times_out(site: Served) -> None:
    with site.socket() as connection:
        connection.sendall(head(CHAT, 100) + b"{")
        assert connection.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"408"), (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, b"431")],
    ids=["unfinished", "long"],
)
def test_an_unfinished_or_long_head_is_refused(site: Served, sent: bytes, status: bytes) -> None:
    with site.socket() as connection:
        connection.sendall(sent)
        assert connection.recv(12) == b"HTTP/1.1 " + status


def test_an_idle_connection_is_closed(llm: outpace.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(llm) as site:
        monkeypatch.setattr(site.server.config, "timeout_keep_alive", 0.05)
        with site.socket() as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            reply = connection.makefile("rb").read()  # to the connection's end
        assert reply.startswith(b"HTTP/1.1 200 OK")


def test_every_response_has_a_request_id(site: Served) -> None:
    found = [site.ask("/health"), site.ask("/nothing"), site.ask(CHAT, {}), site.chat(max_tokens=2)]
    assert [answer.status for answer in found] == [200, 404, 400, 200]
    assert len({answer.headers["x-request-id"] for answer in found}) == 4
    assert site.ask("/health", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    assert site.ask("/health", x_request_id="no good").headers["x-request-id"].startswith("req_")


def test_unknown_paths_and_methods(site: Served) -> None:
    assert site.ask("/v1/nothing").error["code"] == "not_found"
    assert [site.ask(CHAT).status, site.ask("/health", {}).status] == [405, 405]


def test_head_is_answered_like_get(site: Served) -> None:
    for path in [*GETS, "/openapi.json", "/v1/models/" + site.service.names[0]]:
        connection = site.connect()
        connection.request("HEAD", path)
        found = connection.getresponse()
        got = site.ask(path)
        assert (found.status, found.getheader("content-type")) == (got.status, got.headers["content-type"]), path
        assert found.read() == b""
        connection.request("GET", "/version")  # the connection is still in order
        assert connection.getresponse().status == 200
        connection.close()


def test_unknown_fields_and_tools_are_ignored_and_listed(site: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Null counts as missing, and unsupported fields with neutral values are ignored."""
    function = {"type": "function", "function": {"name": "f", "parametrs": {}, "absent": None}}
    more = {"größe": 1, "absent": None, "n_probs": 0, "use_beam_search": False, "best_of": 1}
    given = {"tools": [{"type": "web_search"}, function], "tool_choice": "none", "stream_options": {"more": 2}, **more}
    names = "n_probs,use_beam_search,best_of,stream_options.more,tools.0.function.parametrs,tools.0=web_search"
    for stream in (False, True):
        found = site.chat(max_tokens=2, stream=stream, wrong=1, **given)
        assert found.status == 200, found.body
        assert found.headers["x-ignored-fields"].replace("wrong,gr\\xf6\\xdfe,", "") == names
    wait_for(lambda: not site.server.server_state.tasks)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["ignored"].endswith(names) for line in logged if "ignored" in line] == [True, True]
    assert "x-ignored-fields" not in site.chat(max_tokens=2).headers


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "did you mean 'include_usage'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strct": True}}]},
            "tools.0.function.strct",
            "did you mean 'strict'",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type is 'web_search', this API supports 'function'"),
    ],
)
def test_strict_servers_refuse_unknown_names(llm: outpace.LLM, fields: dict[str, Any], param: str, says: str) -> None:
    with served(llm, strict=True) as site:
        found = site.chat(max_tokens=2, **fields)
        assert (found.status, found.error["param"]) == (400, param)
        assert says in found.error["message"]


def test_api_keys_are_checked(llm: outpace.LLM) -> None:
    with served(llm, keys=KEYS) as site:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"x_api_key": "One"}):
            found = site.ask(CHAT, {"messages": HELLO}, **headers)
            assert found.status == 401
            assert found.error["type"] == "authentication_error"
            assert "three" not in found.error["message"]
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "bearer two"}, {"x_api_key": "two"}):
            assert site.ask(CHAT, {"messages": HELLO, "max_tokens": 2}, **headers).status == 200
        assert site.ask("/metrics").status == 401
        assert [site.ask(path).status for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Authorization: Bearer one", "X-Api-Key: other"], 200),
        (["Authorization: Bearer other", "X-Api-Key: two"], 200),
        (["X-Api-Key: two", "Authorization: Basic b3RoZXI="], 200),
        (["Authorization: Bearer ", "X-Api-Key: one"], 200),
        (["Authorization: Bearer one", "X-Api-Key:"], 200),
        (["Authorization: Bearer one", "Authorization: Bearer one"], 200),
        (["Authorization: Bearer other", "X-Api-Key: another"], 401),
        (["Authorization: Bearer one", "Authorization: Bearer other"], 400),
        (["X-Api-Key: other", "X-Api-Key: one"], 400),
    ],
)
def test_any_right_credential_passes(locked: Served, headers: list[str], status: int) -> None:
    found = raw(locked, head("/tokenize", 15, *headers) + b'{"prompt": "a"}')
    assert found.status == status, found.body
    assert status == 200 or not {"other", "another"} & set(found.error["message"].split())


def test_requests_count_for_the_key_of_authorization(locked: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for headers in ({"Authorization": "Bearer one"}, {"Authorization": "Bearer one", "x_api_key": "two"}):
        assert locked.ask("/version", **headers).status == 200
    wait_for(lambda: not locked.server.server_state.tasks)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["key"] for line in logged if "key" in line] == [hashlib.sha256(b"one").hexdigest()[:12]] * 2


def test_the_prefix_cache_is_separate_for_each_key(llm: outpace.LLM) -> None:
    with served(llm, keys=KEYS) as site:
        body = {"prompt": "12 world hello " * 5, "max_tokens": 4}
        keys = ("one", "one", "two", "two")
        usages = [site.ask("/v1/completions", body, x_api_key=key).json["usage"] for key in keys]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0


def test_other_hosts_are_refused_without_keys(site: Served) -> None:
    for host, status in (("evil.example", 400), ("localhost:1", 200), ("[::1]:5", 200), ("127.0.0.1", 200), ("", 400)):
        assert site.ask("/health", Host=host).status == status, host


LINE, HOST = "POST /tokenize HTTP/1.1", "Host: localhost"
JSON, LENGTH, CHUNKED = "Content-Type: application/json", "Content-Length: 15", "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        ([LINE, HOST, JSON, LENGTH], 200, ""),
        ([LINE, HOST, HOST, JSON, LENGTH], 400, "2 Host headers"),
        ([LINE, HOST, "Host: evil.example", JSON, LENGTH], 400, "2 Host headers"),
        ([LINE, "host: evil.example", JSON, LENGTH, HOST], 400, "2 Host headers"),
        ([LINE, JSON, LENGTH], 400, "0 Host headers"),
        ([LINE.replace("1.1", "1.0"), HOST, HOST, JSON, LENGTH], 400, "2 Host headers"),
        *(
            ([LINE, f"Host: {host}", JSON, LENGTH], 400, f"the Host header is '{host}'")
            for host in (
                "localhost evil",
                "localhost, localhost",
                "a@localhost",
                "localhost/",
                "localhost:http",
                "[::1",
            )
        ),
        ([LINE, "Host: [::1]:80", JSON, LENGTH], 200, ""),
        ([LINE.replace("/t", "http://evil.example/t"), HOST, JSON, LENGTH], 400, "host 'evil.example' is not allowed"),
        ([LINE.replace("/t", "http://localhost/t"), "Host: evil.example", JSON, LENGTH], 200, ""),
        ([LINE, HOST, JSON, LENGTH, "Content-Length: 16"], 400, "Content-Length"),
        ([LINE, HOST, JSON, "Content-Length: 1x"], 400, "Content-Length"),
        ([LINE, HOST, JSON, "Content-Length: -15"], 400, "Content-Length"),
        ([LINE, HOST, JSON, LENGTH, CHUNKED], 400, "Transfer-Encoding"),
        ([LINE, HOST, JSON, CHUNKED, LENGTH], 400, "Content-Length"),
        ([LINE, HOST, JSON, CHUNKED, CHUNKED], 400, "Transfer-Encoding"),
        ([LINE, HOST, JSON, "Transfer-Encoding: gzip"], 400, "Transfer-Encoding"),
        ([LINE, HOST, JSON, "Transfer-Encoding: gzip, chunked"], 501, "'gzip, chunked', it must be chunked"),
        ([LINE.replace("1.1", "1.0"), HOST, JSON, CHUNKED], 400, "HTTP/1.0 has none"),
        ([LINE, HOST, JSON, "Content-Type: text/plain", LENGTH], 400, "different content-type headers"),
        ([LINE, HOST, JSON, JSON, LENGTH], 200, ""),
        ([LINE, HOST, JSON, LENGTH, "Content-Encoding: identity", "Content-Encoding: gzip"], 415, "'identity, gzip'"),
        ([LINE.replace("1.1", "2.0"), HOST, JSON, LENGTH], 505, "HTTP/2.0"),
        ([LINE, HOST, JSON, LENGTH, "X-A : b"], 400, "not valid HTTP"),
        ([LINE, HOST, JSON, LENGTH, "X-A: b\r\n c"], 400, "not valid HTTP"),
    ],
)
def test_contradictory_requests_are_refused(site: Served, lines: list[str], status: int, says: str) -> None:
    body = b'5\r\n{"pro\r\na\r\nmpt": "a"}\r\n0\r\n\r\n' if "chunked" in str(lines) else b'{"prompt": "a"}'
    found = raw(site, "\r\n".join([*lines, "", ""]).encode() + body)
    assert found.status == status, found.body
    assert found.headers["x-request-id"]
    assert status == 200 or says in found.error["message"]


def test_other_machines_need_keys() -> None:
    with pytest.raises(UserError, match="set API keys by --api-key-file"):
        ServerOptions(host="0.0.0.0")
    assert ServerOptions(host="0.0.0.0", insecure=True).allowed_hosts == ()


def test_there_are_no_cors_headers(site: Served) -> None:
    found = site.ask("/health", Origin="http://evil.example")
    assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize("seed", range(3))
def test_no_body_causes_an_internal_error(site: Served, seed: int) -> None:
    found = fuzz_server(site, 150, seed, 3)
    assert not found["faults"]
    assert {200, 400} <= found["statuses"].keys()


def test_connections_are_bounded(llm: outpace.LLM) -> None:
    with served(llm, ServerLimits(max_connections=3)) as site:
        connections = [site.connect() for _ in range(4)]
        for number, connection in enumerate(connections):
            connection.request("GET", "/health")
            reply = connection.getresponse()
            assert reply.status == (200 if number < 3 else 503)
            reply.read()
        connections[0].close()
        for connection in connections:
            connection.close()
