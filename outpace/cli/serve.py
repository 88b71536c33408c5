"""`outpace serve`: the OpenAI and Anthropic APIs over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from outpace.cli import display
from outpace.cli.flags import flags
from outpace.cli.options import ModelFlags
from outpace.core.errors import require
from outpace.core.options import same
from outpace.engine.options import EngineOptions
from outpace.models.files.find import pair_name
from outpace.server.options import ServerOptions

if TYPE_CHECKING:
    from outpace.server.service import Service

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


@flags
def serve(
    ctx: typer.Context, model: ModelFlags, options: ServerOptions, batch: int = same(EngineOptions, "batch")
) -> None:
    """Answer the OpenAI and Anthropic APIs over HTTP.

    Without options it serves the shipped model on http://127.0.0.1:8000. After SIGTERM or Ctrl-C it finishes running
    answers, for at most --drain seconds; a second signal ends it at once.
    """
    require("outpace serve", "server", *NEEDED)
    from outpace.server import run

    with run.listen(options) as listener, model.open({**ctx.obj, "batch": batch, "rules": options.rules}) as llm:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http{'s' if options.ssl_certfile else ''}://{host}:{listener.getsockname()[1]}"
        run.serve(llm, options, listener, lambda service: _greet(service, address))


def _greet(service: Service, address: str) -> None:
    llm, options = service.llm, service.options
    key = " -H 'Authorization: Bearer KEY'" if options.keys else ""
    pair = pair_name(llm.target.name, llm.draft.name if llm.draft else None)
    display.say(f"{pair} by {llm.method} on {address}; chat page: {address}/")
    display.say_recommended(service.chat_model.recommended)
    if service.draft_port is not None:
        where = f"grpc{'s' if options.ssl_certfile else ''}://{options.host}:{service.draft_port}"
        display.say(f"  outpace generate --target {where} --draft DIR PROMPT  # drafts on the client's machine")
    display.say(
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        """ -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}'"""
    )
    display.say(f"  OPENAI_BASE_URL={address}/v1 configures other programs; Ctrl-C ends the server")
