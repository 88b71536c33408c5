"""`outpace draft-worker`: draft for targets on other machines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import typer

from outpace.cli import display, process
from outpace.cli.flags import flag, flags, flags_of
from outpace.cli.options import use_threads
from outpace.core.errors import require
from outpace.models.options import LoadOptions
from outpace.server.options import ServerOptions

LISTEN_FLAGS = ("api_key_file", "insecure", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class DraftFlags:
    """The draft model, and how it drafts."""

    panel: ClassVar[str] = "Model"
    draft: str | None = flag(None, "Draft model: hub id, folder or .gguf file; the default is the shipped draft.")
    options: LoadOptions = flags_of(LoadOptions, "device", "dtype", "runtime", "kv_dtype", "trust_remote_code")
    threads: int | None = flag(None, "CPU threads; the default is one for each core.")
    drafter: str = flag("model", "Drafters, joined by +, as in model+ngram; outpace methods lists them.")


@dataclass(frozen=True)
class DraftListenFlags:
    """Where the worker listens, and for whom."""

    panel: ClassVar[str] = "Server"
    listen: str = flag(
        "127.0.0.1:8100",
        "HOST:PORT to listen on; one that other machines can reach needs API keys. Port 0: any free port.",
    )
    options: ServerOptions = flags_of(ServerOptions, *LISTEN_FLAGS)


@flags
def draft_worker(ctx: typer.Context, model: DraftFlags, listen: DraftListenFlags) -> None:
    """Draft for targets on other machines, which name this one by --worker grpc://HOST:PORT.

    It runs until SIGTERM or Ctrl-C. Targets then decode plainly.

    The options of drafters (see outpace methods NAME) are flags too, as in --width 8.
    """
    require("a draft worker", "remote", "grpc")
    from outpace.card.link import authenticator, read_listen_address
    from outpace.cluster.draft_server import open_draft_server

    host, port = read_listen_address(listen.listen)
    options = replace(listen.options, host=host, port=port)
    use_threads(model.threads)
    with display.loading_bar(False) as progress:
        server = open_draft_server(
            model.draft, model.options, model.drafter, ctx.obj, authenticator(options.keys), progress
        )
    with suppress(KeyboardInterrupt), process.sigterm_as_interrupt(status=0), server:  # both signals are its usual end
        port = server.listen(host, port, options.read_tls())
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        display.say(f"{server.own.name} drafts on {where}; Ctrl-C ends it")
        while not server.has_ended.wait(POLL_SECONDS):
            pass
        if server.failure is not None:
            raise server.failure
