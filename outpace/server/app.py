"""The application: which handler answers which path, and what every request passes.

That is request ids, API keys, Host headers, refusals, and the request log.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace import __version__
from outpace.card.link import match_key
from outpace.models.files.find import short_name
from outpace.server import chat_completions, completions, logs, messages, responses
from outpace.server.chat_completions import ChatBody, ChatFormat, PromptBody
from outpace.server.completions import CompletionBody, CompletionFormat, InfillBody, InfillFormat, TokenIds
from outpace.server.errors import ApiError
from outpace.server.messages import CountBody, MessagesBody, MessagesFormat
from outpace.server.replies import EventStream, JsonReply, WholeReply, error_reply, new_id
from outpace.server.request_body import B, Body, read_json, refuse_others, validate
from outpace.server.responses import ResponsesBody, ResponsesFormat
from outpace.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]
PAGE = files("outpace.server") / "page.html"
LIBRARY = re.compile(r'<script src="(vendor/[\w.]+)"></script>')
MAX_IGNORED = 500  # characters of the list of ignored fields
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # not allowed in headers


def build_app(service: Service) -> Middleware:
    """Build the web application of a service; its lifespan starts and stops the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        yield
        service.end()

    app = FastAPI(title="outpace", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    schemas: dict[str, Any] = {}  # to which the schemas of bodies refer
    for path, (summary, kind, function, response_format) in POSTS.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        handler = partial(_post, service, kind, function, response_format)
        _add_route(app, "POST", path, summary, handler, openapi_extra={"requestBody": body})
    for path, (summary, function) in GETS.items():
        handler = partial(_get, service, function)
        _add_route(app, "GET", path, summary, handler)
        _add_route(app, "HEAD", path, summary, handler, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.openapi()["components"] = {"schemas": schemas}  # the document is cached
    queued = frozenset(path for path, (*_, response_format) in POSTS.items() if response_format)
    return Middleware(app, queued, service)


def _add_route(app: FastAPI, method: str, path: str, summary: str, handler: Handler, **more: Any) -> None:
    """Add a handler. Its errors become responses in the format of the path's API."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_reply(error, _record(request))

    app.add_api_route(path, run, methods=[method], summary=summary, response_model=None, **more)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "another method")
    sentences = {
        404: f"there is no path {request.url.path[:200]!r}",
        405: f"{request.method} is not allowed for this path, it accepts {allowed}",
    }
    found = ApiError(error.status_code, sentences.get(error.status_code, str(error.detail)), code="not_found")
    reply = error_reply(found, _record(request))
    reply.headers.update(error.headers or {})
    return reply


def _record(request: Request) -> dict[str, Any]:
    record: dict[str, Any] = request.scope["state"]["record"]
    return record


async def _post(
    service: Service, kind: type[Any], function: Callable[..., Any], response_format: Any, request: Request
) -> Response:
    """Generate text, streamed or whole; without a `response_format`, call the function in a worker thread."""
    if response_format is None:
        body, headers = await _body(service, request, kind)
        return JsonReply(await service.run_in_thread(function, body, service), headers=headers)
    service.check_ready()
    body, headers = await _body(service, request, kind)
    generation, group = await service.start(function, body, _record(request).get("key", ""))
    reply = EventStream if body.stream else WholeReply
    return reply(service, group, response_format(service, body, generation, group), headers)


async def _get(service: Service, function: Callable[[Service, Request], Any], request: Request) -> Response:
    """Answer with a function's value, as JSON unless it is a response."""
    found = function(service, request)
    return found if isinstance(found, Response) else JsonReply(found)


async def _body(service: Service, request: Request, kind: type[B]) -> tuple[B, Mapping[str, str]]:
    """Read and validate a body; return it with response headers that list ignored fields. The log lists them too."""
    given, record = await read_json(request, service.limits), _record(request)
    if service.options.log_prompts:
        logs.write("body", id=record["id"], body=given)
    body, names = validate(kind, given, service.options.strict)
    ignored = ",".join(names)[:MAX_IGNORED].encode("ascii", "backslashreplace").decode()
    headers = {"x-ignored-fields": CONTROL.sub("?", ignored)} if names else {}
    record |= {"ignored": ignored} if names else {}
    name = getattr(body, "model", None)
    if name is not None and name not in service.names:
        message = f"there is no model {name!r:.100}, this server has {', '.join(service.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body, headers


class TokenizeBody(PromptBody):
    """A text, or a conversation that is rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds


def tokenize(body: TokenizeBody, service: Service) -> dict[str, Any]:
    """Return token ids, their number, and the context length."""
    tokenizer = service.llm.tokenizer
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        refuse_others(
            body.model_extra or {}, ChatBody.model_fields, {}
        )  # such as `documents`, which would change the prompt
        tokens = chat_completions.conversation(body, service).render()
    else:
        assert text is not None
        tokens = tokenizer.continuation(text) if body.add_special_tokens is False else tokenizer.encode(text)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": list(tokens)}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.spelled(token).decode("utf-8", "replace") for token in tokens]
    return found


def detokenize(body: DetokenizeBody, service: Service) -> dict[str, Any]:
    """Return the text of token ids, with special tokens."""
    last = service.llm.target.model.vocab_size - 1
    bad = next((token for token in body.tokens if token > last), None)
    if bad is not None:
        raise ApiError(400, f"a token is {bad}, allowed are 0 to {last}", param="tokens")
    text = service.llm.tokenizer.decode(body.tokens, skip_special=False)
    return {"prompt": text, "content": text}


def _models(service: Service, request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_entry(service, name) for name in service.names]}


def _model(service: Service, request: Request) -> dict[str, Any]:
    name = request.path_params["name"]
    if name not in service.names:
        raise ApiError(404, f"there is no model {name!r:.100}", param="model", code="model_not_found")
    return _model_entry(service, name)


def _model_entry(service: Service, name: str) -> dict[str, Any]:
    root = short_name(service.llm.target.name)  # without folders, which are no business of clients
    entry = {"id": name, "object": "model", "created": service.created, "owned_by": "outpace", "root": root}
    entry["default_sampling_params"] = service.chat_model.default_sampling
    return {**entry, "parent": None, "max_model_len": service.max_model_len}


def _tokenizer_info(service: Service, request: Request) -> dict[str, Any]:
    tokenizer = service.llm.tokenizer
    special = tokenizer.special_texts
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": service.llm.target.model.vocab_size,
        "max_model_len": service.max_model_len,
        **{name: special.get(name) for name in ("eos_token", "bos_token", "pad_token")},
        "eos_token_ids": sorted(tokenizer.stop_ids),
        "chat_template": tokenizer.chat_template,
    }


def _health(service: Service, request: Request) -> dict[str, Any]:
    if service.is_stuck:
        logs.stacks()
        raise ApiError(503, f"the engine has been stuck for {service.thread.step_age:.0f} seconds", code="stuck")
    return {"status": "ok"}


def _ready(service: Service, request: Request) -> dict[str, Any]:
    service.check_ready()
    return {"status": "ready"}


def _metrics(service: Service, request: Request) -> Response:
    return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _page(service: Service, request: Request) -> Response:
    """Return the chat page with its libraries in it, and a policy that allows nothing but these blocks and the API."""
    folder = files("outpace.server")
    text = LIBRARY.sub(
        lambda found: f"<script>{folder.joinpath(found[1]).read_text(encoding='utf-8')}</script>",
        PAGE.read_text(encoding="utf-8"),
    )
    policy = (
        f"default-src 'none'; script-src {_block_hashes(text, 'script')}; style-src {_block_hashes(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return HTMLResponse(text, headers={"content-security-policy": policy, "cache-control": "no-cache"})


def _docs(service: Service, request: Request) -> Response:
    """Return a page that lists the paths, with a first command."""
    paths = {path: ("POST", entry[0]) for path, entry in POSTS.items()}
    paths |= {path: ("GET", entry[0]) for path, entry in GETS.items()}
    shown = {path.replace(":path", ""): entry for path, entry in paths.items()}
    rows = "".join(f"<tr><td>{kind}<td><code>{path}</code><td>{what}" for path, (kind, what) in shown.items())
    command = (
        f"curl {request.base_url}v1/chat/completions -H 'Content-Type: application/json' -d '"
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}\''
    )
    head = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><title>outpace</title>"
    links = "<p><a href=/>Chat page</a> · <a href=/openapi.json>OpenAPI schema of the requests</a>"
    body = f"<h1>outpace {__version__}</h1>{links}<pre>{html.escape(command)}</pre><table>{rows}</table>"
    return HTMLResponse(head + body, headers={"content-security-policy": "default-src 'none'; frame-ancestors 'none'"})


def _block_hashes(text: str, tag: str) -> str:
    """Return the hashes by which a policy allows the page's blocks with this tag."""
    blocks = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


POSTS: dict[str, tuple[str, Any, Callable[..., Any], Any]] = {  # summary, body, function, format of generated text
    "/v1/chat/completions": ("Answer a conversation", ChatBody, chat_completions.to_request, ChatFormat),
    "/v1/completions": ("Continue texts", CompletionBody, completions.to_request, CompletionFormat),
    "/infill": ("Fill in the text at a cursor", InfillBody, completions.infill_request, InfillFormat),
    "/v1/responses": ("Answer as OpenAI's Responses API", ResponsesBody, responses.to_request, ResponsesFormat),
    "/v1/messages": ("Answer as Anthropic's Messages API", MessagesBody, messages.to_request, MessagesFormat),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation", CountBody, messages.count_tokens, None),
    "/tokenize": ("Split a text into tokens", TokenizeBody, tokenize, None),
    "/detokenize": ("Join tokens to a text", DetokenizeBody, detokenize, None),
}
GETS: dict[str, tuple[str, Callable[[Service, Request], Any]]] = {
    "/v1/models": ("List the models", _models),
    "/v1/models/{name:path}": ("Describe a model", _model),
    "/tokenizer_info": ("Describe the tokenizer", _tokenizer_info),
    "/health": ("Report whether the engine works", _health),
    "/ready": ("Report whether requests are accepted", _ready),
    "/version": ("Return the version", lambda service, request: {"version": __version__}),
    "/metrics": ("Return metrics for Prometheus", _metrics),
    "/": ("A chat page", _page),
    "/docs": ("This list", _docs),
}


KEYLESS_PATHS = ("/", "/docs", "/health", "/ready")
UNLOGGED_PATHS = ("/health", "/ready")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")  # RFC 3986, 3.2.2
SINGLE_HEADERS = (b"authorization", b"x-api-key", b"content-type")  # read here; several lines must be equal
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
Headers = Iterable[tuple[bytes, bytes]]


class Middleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, queued: frozenset[str], service: Service) -> None:
        """`queued` are the paths whose requests go through the queue."""
        self._app, self._options, self._queued, self._service = app, service.options, queued, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets: the lifespan
            await self._app(scope, receive, send)
            return
        headers = _by_name(scope["headers"])
        record = _new_record(scope["method"], scope["path"], headers)
        scope.setdefault("state", {})["record"] = record
        began = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.setdefault("status", message["status"])
                message = {**message, "headers": [*message["headers"], *_own_headers(record)]}
            await send(message)

        try:
            _check_head(scope["http_version"], scope["headers"])
            record["key"] = self._authenticate(scope["path"], headers)
            if scope["path"] in self._queued:
                self._service.admission.check()
        except ApiError as error:
            reply = error_reply(error, record)
            await reply(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
        finally:
            record["seconds"] = round(time.perf_counter() - began, 4)
            if scope["path"] not in UNLOGGED_PATHS:
                logs.write("request", **record)

    def refuse_invalid(self, path: str, reason: str) -> Response:
        """Return the response to bytes that the HTTP parser refuses; `path` may be incomplete."""
        error = ApiError(400, f"the request is not valid HTTP: {reason}", code="invalid_http")
        record = _new_record("", path, {})
        reply = error_reply(error, record)
        logs.write("request", **record, status=error.status, seconds=0.0)
        reply.raw_headers.extend(_own_headers(record))
        return reply

    def _authenticate(self, path: str, headers: Mapping[bytes, str]) -> str:
        """Return an id of the request's API key; raise ApiError for a wrong key or Host header."""
        allowed = self._options.allowed_hosts
        host = _without_port(headers.get(b"host", ""))
        if allowed and host not in allowed:
            raise ApiError(400, f"host {host[:100]!r} is not allowed; --allow-host adds it", code="invalid_host")
        if not self._options.keys or path in KEYLESS_PATHS:
            return ""
        given = [key for key in (_bearer(headers.get(b"authorization", "")), headers.get(b"x-api-key")) if key]
        for key in given:  # clients may send a key of another service too
            if (found := match_key(key, self._options.keys)) is not None:
                return found
        why = "the API key is wrong" if given else "an API key is needed, as Authorization: Bearer or x-api-key"
        raise ApiError(401, why, code="invalid_api_key")


def _check_head(version: str, pairs: Headers) -> None:
    """Raise ApiError for what RFC 9110 and RFC 9112 call errors and the HTTP parser accepts.

    Programs in between might read such a request differently. The parser itself checks the length of the body.
    """
    values: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    hosts, codings = values.get(b"host", []), b", ".join(values.get(b"transfer-encoding", []))
    why = ""
    if version in ("0.9", "2.0"):
        raise ApiError(505, f"the version is HTTP/{version}, this server supports HTTP/1.1 and HTTP/1.0")
    if len(hosts) != 1 and (hosts or version == "1.1"):
        why = f"the request has {len(hosts)} Host headers, it must have one"
    elif hosts and not HOST.fullmatch(hosts[0]):
        why = f"the Host header is {_quoted(hosts[0])}, it must be a name or an address, and may have a port"
    elif codings and version == "1.0":
        why = f"the transfer-encoding is {_quoted(codings)}, HTTP/1.0 has none"
    for name in SINGLE_HEADERS:
        if len(set(values.get(name, []))) > 1:
            why = why or f"the request has different {name.decode()} headers, it may have one"
    if why:
        raise ApiError(400, why, code="invalid_http")
    if codings and codings.lower() != b"chunked":
        raise ApiError(501, f"the transfer-encoding is {_quoted(codings)}, it must be chunked", code="invalid_http")


def _quoted(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])


def _by_name(pairs: Headers) -> dict[bytes, str]:
    """Return headers by name, the first of each."""
    return {name: value.decode("latin-1") for name, value in reversed(list(pairs))}


def _new_record(method: str, path: str, headers: Mapping[bytes, str]) -> dict[str, Any]:
    """Return the log record of a request, with the client's request id if it has a valid one."""
    given = headers.get(b"x-request-id", "")
    request_id = given if CLIENT_ID.fullmatch(given) else new_id("req_")
    return {"id": request_id, "method": method, "path": path[:200]}


def _own_headers(record: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", record["id"].encode()), *SECURITY_HEADERS]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
