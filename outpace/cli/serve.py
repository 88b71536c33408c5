"""`outpace serve`: the OpenAI and Anthropic APIs over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from outpace.cli import display
from outpace.cli.flags import common_fields, flag, flags, flags_of
from outpace.cli.options import GENERATION_CONFIG, ModelFlags
from outpace.core.errors import require
from outpace.core.options import help_of, same
from outpace.engine.options import EngineOptions
from outpace.models.files.find import pair_name
from outpace.server.options import ServerLimits

if TYPE_CHECKING:
    from outpace.server.options import ServerOptions
    from outpace.server.service import Service

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


@dataclass(frozen=True)
class ListenFlags:
    """The address of the server, and the requests that it accepts."""

    panel: ClassVar[str] = "Server"
    host: str = flag("127.0.0.1", "Address to listen on; one that other machines can reach needs API keys.")
    port: int = flag(8000, "Port to listen on; 0: any free port.")
    draft_port: int | None = flag(
        None,
        "Port for clients that draft for themselves (outpace generate --target grpc://HOST:PORT); 0: any free port.",
    )
    served_name: list[str] | None = flag(None, "Name of the model in requests; may be repeated.")
    api_key_file: Path | None = flag(None, "File with API keys, one a line, in addition to those in OUTPACE_API_KEY.")
    insecure: bool = flag(False, "Serve other machines without API keys.")
    allow_host: list[str] | None = flag(None, "Host header to accept without keys; may be repeated.")
    allow_method: list[str] | None = flag(None, "Method, drafter or rule that a request may choose; may be repeated.")
    generation_config: str = flag("auto", GENERATION_CONFIG)
    strict: bool = flag(False, "Refuse unknown fields and tools instead of ignoring them and listing them in a header.")
    tool_prompt: bool = flag(False, "Describe tools in the system message if the chat template ignores them.")
    tool_parser: str = flag("auto", "Form of tool calls: auto, hermes, json, llama3, mistral, tools or xml.")
    metrics_prefix: str = flag("outpace", "Prefix of the metrics: outpace, vllm or both.")
    log_prompts: bool = flag(False, "Write the bodies of requests into the log.")
    ssl_certfile: Path | None = flag(None, "TLS certificate.")
    ssl_keyfile: Path | None = flag(None, "Key of the TLS certificate.")
    ssl_ca_certs: Path | None = flag(
        None, "File of CA certificates; each client needs a certificate that one of these CAs signed."
    )


@dataclass(frozen=True)
class LimitFlags:
    """Limits of requests."""

    panel: ClassVar[str] = "Limits"
    batch: int = same(EngineOptions, "batch")
    limits: ServerLimits = flags_of(ServerLimits, *help_of(ServerLimits))


@flags
def serve(ctx: typer.Context, model: ModelFlags, listen: ListenFlags, limit: LimitFlags) -> None:
    """Answer the OpenAI and Anthropic APIs over HTTP.

    Without options it serves the shipped model on http://127.0.0.1:8000. After SIGTERM or Ctrl-C it finishes running
    answers, for at most --drain seconds; a second signal ends it at once.
    """
    require("outpace serve", "server", *NEEDED)
    from outpace.server import run

    options = _options(listen, limit)
    with run.listen(options) as listener, model.open({**ctx.obj, "batch": limit.batch, "rules": options.rules}) as llm:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http{'s' if options.certificate else ''}://{host}:{listener.getsockname()[1]}"
        run.serve(llm, options, listener, lambda service: _greet(service, address))


def _options(listen: ListenFlags, limit: LimitFlags) -> ServerOptions:
    from outpace.server.options import ServerOptions, read_api_keys

    return ServerOptions(
        names=tuple(listen.served_name or ()),
        keys=read_api_keys(listen.api_key_file),
        hosts=tuple(name.lower() for name in listen.allow_host or ()),
        methods=tuple(listen.allow_method or ()),
        certificate=listen.ssl_certfile,
        certificate_key=listen.ssl_keyfile,
        client_authorities=listen.ssl_ca_certs,
        limits=limit.limits,
        **common_fields(listen, ServerOptions),
    )


def _greet(service: Service, address: str) -> None:
    llm, options = service.llm, service.options
    key = " -H 'Authorization: Bearer KEY'" if options.keys else ""
    pair = pair_name(llm.target.name, llm.draft.name if llm.draft else None)
    display.say(f"{pair} by {llm.method} on {address}; chat page: {address}/")
    display.say_recommended(service.chat_model.recommended)
    if service.draft_port is not None:
        where = f"grpc{'s' if options.certificate else ''}://{options.host}:{service.draft_port}"
        display.say(f"  outpace generate --target {where} --draft DIR PROMPT  # drafts on the client's machine")
    display.say(
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        """ -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}'"""
    )
    display.say(f"  OPENAI_BASE_URL={address}/v1 configures other programs; Ctrl-C ends the server")
