"""`outpace serve`: the OpenAI and Anthropic APIs over HTTP."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import ModelFlags
from outpace.core.errors import UserError, install_command

if TYPE_CHECKING:
    from outpace.server.options import ServerOptions

SERVER = "Server"
BOUNDS = "Limits"
NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


@dataclass(frozen=True)
class ListenFlags:
    """The address of the server, and the requests that it accepts."""

    host: Annotated[str, flag("Address to listen on; one that other machines can reach needs API keys.", SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, flag("Port to listen on; 0: any free port.", SERVER)] = 8000
    served_name: Annotated[list[str] | None, flag("Name of the model in requests; may be repeated.", SERVER)] = None
    api_key_file: Annotated[
        Path | None, flag("File with API keys, one a line, in addition to those in OUTPACE_API_KEY.", SERVER)
    ] = None
    insecure: Annotated[bool, flag("Serve other machines without API keys.", SERVER, "--insecure")] = False
    allow_host: Annotated[list[str] | None, flag("Host header to accept without keys; may be repeated.", SERVER)] = None
    allow_method: Annotated[
        list[str] | None, flag("Method, drafter or rule that a request may choose; may be repeated.", SERVER)
    ] = None
    ignore_unknown: Annotated[
        bool, flag("List unknown fields in a header instead of refusing them.", SERVER, "--ignore-unknown")
    ] = False
    tool_prompt: Annotated[
        bool, flag("Describe tools in the system message if the chat template ignores them.", SERVER, "--tool-prompt")
    ] = False
    metrics_prefix: Annotated[str, flag("Prefix of the metrics: outpace, vllm or both.", SERVER)] = "outpace"
    log_prompts: Annotated[bool, flag("Write the bodies of requests into the log.", SERVER, "--log-prompts")] = False
    ssl_certfile: Annotated[Path | None, flag("TLS certificate.", SERVER)] = None
    ssl_keyfile: Annotated[Path | None, flag("Key of the TLS certificate.", SERVER)] = None


@dataclass(frozen=True)
class LimitFlags:
    """Limits of requests."""

    batch: Annotated[int, flag("Answers written at the same time.", BOUNDS)] = 16
    max_queue: Annotated[int, flag("Answers that may wait; further ones are refused with 429.", BOUNDS)] = 128
    max_queued_tokens: Annotated[int, flag("Prompt tokens that may wait in total.", BOUNDS)] = 1 << 20
    max_requests_per_key: Annotated[int, flag("Concurrent requests of one API key; 0: no limit.", BOUNDS)] = 0
    max_connections: Annotated[int, flag("Concurrent connections.", BOUNDS)] = 512
    max_body: Annotated[int, flag("Largest body of a request, in bytes.", BOUNDS)] = 4 << 20
    queue_timeout: Annotated[float, flag("Seconds that a request may wait in the queue.", BOUNDS)] = 60.0
    request_timeout: Annotated[float, flag("Seconds that an answer may take.", BOUNDS)] = 600.0
    write_timeout: Annotated[float, flag("Seconds without reading until a client is dropped.", BOUNDS)] = 30.0
    drain: Annotated[float, flag("Maximum seconds for finishing running answers after SIGTERM or Ctrl-C.", BOUNDS)] = (
        30.0
    )


@flags
def serve(ctx: typer.Context, model: ModelFlags, listen: ListenFlags, limit: LimitFlags) -> None:
    """Answer the OpenAI and Anthropic APIs over HTTP.

    Without options it serves the shipped model on http://127.0.0.1:8000. After SIGTERM or Ctrl-C it finishes running
    answers, for at most --drain seconds; a second signal ends it at once.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the server needs {', '.join(missing)}: {install_command('server')}")
    from outpace.server import run

    options = _options(listen, limit)
    with run.listen(options) as listener, model.open({**ctx.obj, "batch": limit.batch}) as llm:
        address = _address(options, listener.getsockname()[1])
        run.serve(llm, options, listener, lambda: _greet(llm.target.name, llm.method, options, address))


def _options(listen: ListenFlags, limit: LimitFlags) -> ServerOptions:
    from outpace.server.options import ServerLimits, ServerOptions, read_api_keys

    own = {field.name for field in fields(ServerLimits)}
    limits = {field.name: getattr(limit, field.name) for field in fields(limit) if field.name in own}
    limits |= {"per_key": limit.max_requests_per_key, "connections": limit.max_connections}
    return ServerOptions(
        host=listen.host,
        port=listen.port,
        names=tuple(listen.served_name or ()),
        keys=read_api_keys(listen.api_key_file),
        hosts=tuple(name.lower() for name in listen.allow_host or ()),
        insecure=listen.insecure,
        methods=tuple(listen.allow_method or ()),
        ignore_unknown=listen.ignore_unknown,
        tool_prompt=listen.tool_prompt,
        metrics_prefix=listen.metrics_prefix,
        log_prompts=listen.log_prompts,
        certificate=listen.ssl_certfile,
        certificate_key=listen.ssl_keyfile,
        limits=ServerLimits(body_bytes=limit.max_body, **limits),
    )


def _address(options: ServerOptions, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http{'s' if options.certificate else ''}://{host}:{port}"


def _greet(name: str, method: str, options: ServerOptions, address: str) -> None:
    key = " -H 'Authorization: Bearer KEY'" if options.keys else ""
    display.say(f"{name} by {method} on {address}; chat page: {address}/")
    display.say(
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        """ -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'"""
    )
    display.say(f"  OPENAI_BASE_URL={address}/v1 configures other programs; Ctrl-C ends the server")
