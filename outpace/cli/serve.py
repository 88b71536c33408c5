"""`outpace serve`: the OpenAI and Anthropic APIs over HTTP."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import display
from outpace.cli.options import ModelFlags, flags
from outpace.core.errors import UserError, install_command

if TYPE_CHECKING:
    from outpace.server.options import ServerOptions

SERVER = "Server"
BOUNDS = "Limits"
NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def _flag(text: str, panel: str = SERVER, **options: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **options)


@dataclass(frozen=True)
class Listening:
    """Where the server listens, and to whom."""

    host: Annotated[str, _flag("Address to listen on; one that other machines reach needs API keys.")] = "127.0.0.1"
    port: Annotated[int, _flag("Port to listen on; 0: any that is free.")] = 8000
    served_name: Annotated[list[str] | None, _flag("Name of the model in requests; may be repeated.")] = None
    api_key_file: Annotated[Path | None, _flag("File with API keys, one a line, beside those in OUTPACE_API_KEY.")] = (
        None
    )
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without API keys.", rich_help_panel=SERVER)
    ] = False
    allow_host: Annotated[list[str] | None, _flag("Host header to accept without keys; may be repeated.")] = None
    allow_method: Annotated[
        list[str] | None, _flag("Method, drafter or rule that a request may choose; may be repeated.")
    ] = None
    ignore_unknown: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown", help="List unknown fields in a header, do not refuse them.", rich_help_panel=SERVER
        ),
    ] = False
    tool_prompt: Annotated[
        bool,
        typer.Option(
            "--tool-prompt",
            help="Describe tools in the system message where the chat template ignores them.",
            rich_help_panel=SERVER,
        ),
    ] = False
    metrics_prefix: Annotated[str, _flag("Prefix of the metrics: outpace, vllm or both.")] = "outpace"
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write the bodies of requests into the log.", rich_help_panel=SERVER)
    ] = False
    ssl_certfile: Annotated[Path | None, _flag("TLS certificate.")] = None
    ssl_keyfile: Annotated[Path | None, _flag("Key of the TLS certificate.")] = None


@dataclass(frozen=True)
class Bounds:
    """What requests may take."""

    batch: Annotated[int, _flag("Answers written at the same time.", BOUNDS)] = 16
    max_queue: Annotated[int, _flag("Answers that may wait; further ones are refused with 429.", BOUNDS)] = 128
    max_queued_tokens: Annotated[int, _flag("Prompt tokens that may wait in all.", BOUNDS)] = 1 << 20
    max_requests_per_key: Annotated[int, _flag("Requests of one API key at once; 0: no limit.", BOUNDS)] = 0
    max_connections: Annotated[int, _flag("Connections at once.", BOUNDS)] = 512
    max_body: Annotated[int, _flag("Largest body of a request, in bytes.", BOUNDS)] = 4 << 20
    queue_timeout: Annotated[float, _flag("Seconds that a request may wait in the queue.", BOUNDS)] = 60.0
    request_timeout: Annotated[float, _flag("Seconds that an answer may take.", BOUNDS)] = 600.0
    write_timeout: Annotated[float, _flag("Seconds without reading until a client is dropped.", BOUNDS)] = 30.0
    drain: Annotated[
        float, _flag("The most seconds for finishing running answers after SIGTERM or Ctrl-C.", BOUNDS)
    ] = 30.0


@flags
def serve(ctx: typer.Context, loading: ModelFlags, listening: Listening, bounds: Bounds) -> None:
    """Answer the OpenAI and Anthropic APIs over HTTP.

    Without options it serves the shipped model on http://127.0.0.1:8000. After SIGTERM or Ctrl-C it finishes running
    answers, for at most --drain seconds; a second signal ends it at once.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the server needs {', '.join(missing)}: {install_command('server')}")
    from outpace.server import run

    options = _options(listening, bounds)
    with run.listen(options) as listener, loading.open({**ctx.obj, "batch": bounds.batch}) as llm:
        address = _address(options, listener.getsockname()[1])
        run.serve(llm, options, listener, lambda: _greet(llm.target.name, llm.method, options, address))


def _options(listening: Listening, bounds: Bounds) -> ServerOptions:
    from outpace.server import options
    from outpace.server.options import Limits, ServerOptions

    own = {field.name for field in fields(Limits)}
    limits = {field.name: getattr(bounds, field.name) for field in fields(bounds) if field.name in own}
    limits |= {"per_key": bounds.max_requests_per_key, "connections": bounds.max_connections}
    return ServerOptions(
        host=listening.host,
        port=listening.port,
        names=tuple(listening.served_name or ()),
        keys=options.read_api_keys(listening.api_key_file),
        hosts=tuple(name.lower() for name in listening.allow_host or ()),
        insecure=listening.insecure,
        methods=tuple(listening.allow_method or ()),
        ignore_unknown=listening.ignore_unknown,
        tool_prompt=listening.tool_prompt,
        metrics_prefix=listening.metrics_prefix,
        log_prompts=listening.log_prompts,
        certificate=listening.ssl_certfile,
        certificate_key=listening.ssl_keyfile,
        limits=Limits(body_bytes=bounds.max_body, **limits),
    )


def _address(options: ServerOptions, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http{'s' if options.certificate else ''}://{host}:{port}"


def _greet(name: str, method: str, options: ServerOptions, address: str) -> None:
    key = " -H 'Authorization: Bearer KEY'" if options.keys else ""
    display.say(f"{name} by {method} on {address}; the page to chat is {address}/")
    display.say(
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        """ -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'"""
    )
    display.say(f"  OPENAI_BASE_URL={address}/v1 is what other programs need to know; Ctrl-C ends")
