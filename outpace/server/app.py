"""The application: which address is answered by what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outpace import __version__
from outpace.server import chat_body, completion_body, logs, messages_body, page, responses_body, tokens
from outpace.server.chat import ChatShape
from outpace.server.chat_body import ChatBody
from outpace.server.completion_body import CompletionBody
from outpace.server.completions import CompletionShape
from outpace.server.errors import ApiError, of
from outpace.server.fields import B, Sampled, read
from outpace.server.gate import Gate, is_messages
from outpace.server.jobs import Job
from outpace.server.messages import MessagesShape
from outpace.server.messages_body import CountBody, MessagesBody
from outpace.server.reading import read_json
from outpace.server.replies import EventStream, JsonReply, Whole, error_reply
from outpace.server.responses import ResponsesShape
from outpace.server.responses_body import ResponsesBody
from outpace.server.service import Service
from outpace.server.shapes import Shape

SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation",
    "/v1/completions": "Continue texts",
    "/v1/responses": "Answer, in the shape of OpenAI's Responses",
    "/v1/messages": "Answer, in the shape of Anthropic's Messages",
    "/v1/messages/count_tokens": "Count the tokens of a conversation",
    "/tokenize": "Split a text into tokens",
    "/detokenize": "Join tokens to a text",
    "/v1/models": "List the models",
    "/v1/models/{name:path}": "Describe a model",
    "/tokenizer_info": "Describe the tokenizer",
    "/health": "Tell whether the engine works",
    "/ready": "Tell whether requests are taken",
    "/version": "Tell the version",
    "/metrics": "Give metrics for Prometheus",
    "/": "A page to chat on",
}

Handler = Callable[[Request], Awaitable[Response]]


def build(service: Service) -> Gate:
    """The application of one service, which it begins and ends."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        yield
        service.end()

    app = FastAPI(title="outpace", version=__version__, docs_url=None, redoc_url=None, lifespan=life)
    routes, summary_of = Routes(service), SUMMARIES.__getitem__
    parts: dict[str, Any] = {}  # schemas to which those of bodies refer
    for path, kind, handler in routes.posts():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= schema.pop("$defs", {})
        content = {"application/json": {"schema": schema}}
        extra = {"requestBody": {"required": True, "content": content}}
        given: dict[str, Any] = {"openapi_extra": extra, "response_model": None}
        app.add_api_route(path, _guarded(handler), methods=["POST"], summary=summary_of(path), **given)
    for path, handler in routes.gets():
        app.add_api_route(path, _guarded(handler), methods=["GET"], summary=summary_of(path), response_model=None)
    app.add_exception_handler(HTTPException, _refused)
    app.openapi()["components"] = {"schemas": parts}  # which is made once
    answering = {path for path, kind, _ in routes.posts() if issubclass(kind, Sampled)}
    return Gate(app, service.options, frozenset(answering), service)


def _guarded(handler: Handler) -> Handler:
    """Errors as answers in the API's own shape; bugs are logged and told as such."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            known = of(error)
            if known.status == 500:
                logs.fault(error, id=_record(request)["id"])
            return error_reply(known, _record(request), is_messages(request.url.path))

    return run


def _refused(request: Request, error: Exception) -> Response:
    """No such address, or not by this method."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "another method")
    said = {
        404: f"there is no {request.url.path[:200]!r} here",
        405: f"{request.method} is not for this address, it takes {allowed}",
    }
    known = ApiError(error.status_code, said.get(error.status_code, str(error.detail)), code="not_found")
    reply = error_reply(known, _record(request), is_messages(request.url.path))
    reply.headers.update(error.headers or {})
    return reply


def _record(request: Request) -> dict[str, Any]:
    record: dict[str, Any] = request.scope["state"]["record"]
    return record


class Routes:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def posts(self) -> list[tuple[str, Any, Handler]]:
        """Addresses that take a body, with its kind."""
        return [
            ("/v1/chat/completions", ChatBody, self._answerer(ChatBody, chat_body.job, ChatShape)),
            ("/v1/completions", CompletionBody, self._answerer(CompletionBody, completion_body.job, CompletionShape)),
            ("/v1/responses", ResponsesBody, self._answerer(ResponsesBody, responses_body.job, ResponsesShape)),
            ("/v1/messages", MessagesBody, self._answerer(MessagesBody, messages_body.job, MessagesShape)),
            ("/v1/messages/count_tokens", CountBody, self._teller(CountBody, messages_body.count)),
            ("/tokenize", tokens.TokenizeBody, self._teller(tokens.TokenizeBody, tokens.tokenize)),
            ("/detokenize", tokens.DetokenizeBody, self._teller(tokens.DetokenizeBody, tokens.detokenize)),
        ]

    def gets(self) -> list[tuple[str, Handler]]:
        """Addresses that take none."""
        return [
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._model),
            ("/tokenizer_info", self._tokenizer),
            ("/health", self._health),
            ("/ready", self._ready),
            ("/version", self._version),
            ("/metrics", self._metrics),
            ("/", self._page),
        ]

    def _answerer(
        self, kind: type[B], job_of: Callable[..., Job], shape_of: Callable[[Service, Any, Job], Shape]
    ) -> Handler:
        """Reads a body, has it answered, streamed or whole."""
        service = self._service

        async def handle(request: Request) -> Response:
            service.check_ready()
            body, headers = await self._body(request, kind)
            assert isinstance(body, Sampled)
            key, place = _record(request).get("key", ""), request.scope["state"].get("place")
            job, group = await service.start(job_of, body, key, place)
            shape = shape_of(service, body, job)
            return (EventStream if body.stream else Whole)(service, group, shape, headers)

        return handle

    def _teller(self, kind: type[B], tell: Callable[[Any, Service], dict[str, Any]]) -> Handler:
        """Reads a body and answers at once."""

        async def handle(request: Request) -> Response:
            body, headers = await self._body(request, kind)
            return JsonReply(await self._service.apart(tell, body, self._service), headers=headers)

        return handle

    async def _body(self, request: Request, kind: type[B]) -> tuple[B, Mapping[str, str]]:
        """The body, checked, and the headers that say what was ignored of it."""
        service = self._service
        given = await read_json(request, service.limits, service.clock)
        if service.options.log_prompts:
            logs.write("body", id=_record(request)["id"], body=given)
        body, unknown = read(kind, given, service.options.ignore_unknown)
        name = getattr(body, "model", None)
        if name is not None and name not in service.names:
            said = f"there is no model {name!r:.100}, this server has {', '.join(service.names)}"
            raise ApiError(404, said, param="model", code="model_not_found")
        named = ",".join(name for name in unknown if name.isascii() and name.isprintable())[:500]
        return body, {"x-ignored-fields": named} if named else {}

    async def _models(self, request: Request) -> Response:
        return JsonReply({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.names:
            raise ApiError(404, f"there is no model {name!r:.100}", param="model", code="model_not_found")
        return JsonReply(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        card = {"id": name, "object": "model", "created": service.created, "owned_by": "outpace"}
        return {**card, "root": service.llm.target.name, "parent": None, "max_model_len": service.max_model_len}

    async def _tokenizer(self, request: Request) -> Response:
        return JsonReply(tokens.information(self._service))

    async def _health(self, request: Request) -> Response:
        """Whether steps end."""
        if self._service.is_stuck:
            logs.stacks()
            raise ApiError(503, f"the engine is stuck for {self._service.thread.step_age:.0f} seconds", code="stuck")
        return JsonReply({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether requests are taken."""
        self._service.check_ready()
        return JsonReply({"status": "ready"})

    async def _version(self, request: Request) -> Response:
        return JsonReply({"version": __version__})

    async def _page(self, request: Request) -> Response:
        return page.reply()

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
