"""The application: which handler answers which path."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from outpace import __version__
from outpace.server import chat_completions, completions, logs, messages, responses, tokens
from outpace.server.chat_completions import ChatBody, ChatFormat
from outpace.server.completions import CompletionBody, CompletionFormat
from outpace.server.errors import ApiError, to_api_error
from outpace.server.generation_request import GenerationRequest
from outpace.server.messages import CountBody, MessagesBody, MessagesFormat
from outpace.server.middleware import Middleware, is_messages_path
from outpace.server.replies import EventStream, JsonReply, WholeReply, error_reply
from outpace.server.request_body import B, SamplingBody, read_json, validate
from outpace.server.response_formats import ResponseFormat
from outpace.server.responses import ResponsesBody, ResponsesFormat
from outpace.server.service import Service

SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation",
    "/v1/completions": "Continue texts",
    "/v1/responses": "Answer as OpenAI's Responses API",
    "/v1/messages": "Answer as Anthropic's Messages API",
    "/v1/messages/count_tokens": "Count the tokens of a conversation",
    "/tokenize": "Split a text into tokens",
    "/detokenize": "Join tokens to a text",
    "/v1/models": "List the models",
    "/v1/models/{name:path}": "Describe a model",
    "/tokenizer_info": "Describe the tokenizer",
    "/health": "Report whether the engine works",
    "/ready": "Report whether requests are accepted",
    "/version": "Return the version",
    "/metrics": "Return metrics for Prometheus",
    "/": "A chat page",
}
PAGE = files("outpace.server") / "page.html"
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> Middleware:
    """Build the web application of a service; its lifespan starts and stops the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        yield
        service.end()

    app = FastAPI(title="outpace", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    routes = Routes(service)
    schemas: dict[str, Any] = {}  # to which the schemas of bodies refer
    for path, kind, handler in routes.posts():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        content = {"application/json": {"schema": schema}}
        more: dict[str, Any] = {"openapi_extra": {"requestBody": {"required": True, "content": content}}}
        _add_route(app, path, handler, "POST", **more)
    for path, handler in routes.gets():
        _add_route(app, path, handler, "GET")
    app.add_exception_handler(HTTPException, _on_http_error)
    app.openapi()["components"] = {"schemas": schemas}  # the document is cached
    queued = {path for path, kind, _ in routes.posts() if issubclass(kind, SamplingBody)}
    return Middleware(app, service.options, frozenset(queued), service)


def _add_route(app: FastAPI, path: str, handler: Handler, method: str, **more: Any) -> None:
    """Add a handler. Its errors become responses in the format of the path's API; bugs are logged."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            found = to_api_error(error)
            if found.status == 500:
                logs.fault(error, id=_record(request)["id"])
            return error_reply(found, _record(request), is_messages_path(request.url.path))

    app.add_api_route(path, run, methods=[method], summary=SUMMARIES[path], response_model=None, **more)


def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "another method")
    messages = {
        404: f"there is no path {request.url.path[:200]!r}",
        405: f"{request.method} is not allowed for this path, it accepts {allowed}",
    }
    found = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), code="not_found")
    reply = error_reply(found, _record(request), is_messages_path(request.url.path))
    reply.headers.update(error.headers or {})
    return reply


def _record(request: Request) -> dict[str, Any]:
    """Return the log record of a request."""
    record: dict[str, Any] = request.scope["state"]["record"]
    return record


class Routes:
    """The handlers of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def posts(self) -> list[tuple[str, Any, Handler]]:
        """Return paths with a body, its type, and the handler."""
        generating: list[tuple[str, Any, Any, Any]] = [
            ("/v1/chat/completions", ChatBody, chat_completions.to_request, ChatFormat),
            ("/v1/completions", CompletionBody, completions.to_request, CompletionFormat),
            ("/v1/responses", ResponsesBody, responses.to_request, ResponsesFormat),
            ("/v1/messages", MessagesBody, messages.to_request, MessagesFormat),
        ]
        calling: list[tuple[str, Any, Any]] = [
            ("/v1/messages/count_tokens", CountBody, messages.count_tokens),
            ("/tokenize", tokens.TokenizeBody, tokens.tokenize),
            ("/detokenize", tokens.DetokenizeBody, tokens.detokenize),
        ]
        return [
            *((path, kind, self._generate(kind, *functions)) for path, kind, *functions in generating),
            *((path, kind, self._call(kind, function)) for path, kind, function in calling),
        ]

    def gets(self) -> list[tuple[str, Handler]]:
        """Return paths without a body, and the handler."""
        return [
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._model),
            ("/tokenizer_info", self._tokenizer_info),
            ("/health", self._health),
            ("/ready", self._ready),
            ("/version", self._version),
            ("/metrics", self._metrics),
            ("/", self._page),
        ]

    def _generate(
        self,
        kind: type[B],
        to_request: Callable[[Any, Service], GenerationRequest],
        format_of: Callable[[Service, Any, GenerationRequest], ResponseFormat],
    ) -> Handler:
        """Return a handler that generates text, streamed or whole."""
        service = self._service

        async def handle(request: Request) -> Response:
            service.check_ready()
            body, headers = await self._body(request, kind)
            assert isinstance(body, SamplingBody)
            key, reservation = _record(request).get("key", ""), request.scope["state"].get("reservation")
            generation, group = await service.start(to_request, body, key, reservation)
            response_format = format_of(service, body, generation)
            return (EventStream if body.stream else WholeReply)(service, group, response_format, headers)

        return handle

    def _call(self, kind: type[B], function: Callable[[Any, Service], dict[str, Any]]) -> Handler:
        """Return a handler that calls a function."""

        async def handle(request: Request) -> Response:
            body, headers = await self._body(request, kind)
            value = await self._service.run_in_thread(function, body, self._service)
            return JsonReply(value, headers=headers)

        return handle

    async def _body(self, request: Request, kind: type[B]) -> tuple[B, Mapping[str, str]]:
        """Read and validate a body; return it with a response header that lists ignored fields."""
        service = self._service
        given = await read_json(request, service.limits)
        if service.options.log_prompts:
            logs.write("body", id=_record(request)["id"], body=given)
        body, unknown = validate(kind, given, service.options.ignore_unknown)
        name = getattr(body, "model", None)
        if name is not None and name not in service.names:
            message = f"there is no model {name!r:.100}, this server has {', '.join(service.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        ignored = ",".join(name for name in unknown if name.isascii() and name.isprintable())[:500]
        return body, {"x-ignored-fields": ignored} if ignored else {}

    async def _models(self, request: Request) -> Response:
        return JsonReply({"object": "list", "data": [self._model_entry(name) for name in self._service.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.names:
            raise ApiError(404, f"there is no model {name!r:.100}", param="model", code="model_not_found")
        return JsonReply(self._model_entry(name))

    def _model_entry(self, name: str) -> dict[str, Any]:
        service = self._service
        entry = {"id": name, "object": "model", "created": service.created, "owned_by": "outpace"}
        return {**entry, "root": service.llm.target.name, "parent": None, "max_model_len": service.max_model_len}

    async def _tokenizer_info(self, request: Request) -> Response:
        return JsonReply(tokens.tokenizer_info(self._service))

    async def _health(self, request: Request) -> Response:
        if self._service.is_stuck:
            logs.stacks()
            age = self._service.thread.step_age
            raise ApiError(503, f"the engine has been stuck for {age:.0f} seconds", code="stuck")
        return JsonReply({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self._service.check_ready()
        return JsonReply({"status": "ready"})

    async def _version(self, request: Request) -> Response:
        return JsonReply({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _page(self, request: Request) -> Response:
        """Return the chat page, with a policy that allows nothing but its own style and script."""
        text = PAGE.read_text(encoding="utf-8")
        policy = {
            "default-src": "'self'",
            "script-src": _block_hash(text, "script"),
            "style-src": _block_hash(text, "style"),
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        value = "; ".join(f"{name} {allowed}" for name, allowed in policy.items())
        return HTMLResponse(text, headers={"content-security-policy": value, "cache-control": "no-cache"})


def _block_hash(text: str, tag: str) -> str:
    """Return the hash by which a policy allows the page's one block with this tag."""
    (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
