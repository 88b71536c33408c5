"""`outpace draft-worker`: draft for targets on other machines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from outpace.cli import display, process
from outpace.cli.flags import flag, flags, flags_of
from outpace.cli.options import use_threads
from outpace.core.errors import require
from outpace.models.options import LoadOptions

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
    api_key_file: Path | None = flag(None, "File with API keys, one a line, in addition to those in OUTPACE_API_KEY.")
    insecure: bool = flag(False, "Draft for other machines without API keys.")
    ssl_certfile: Path | None = flag(None, "TLS certificate.")
    ssl_keyfile: Path | None = flag(None, "Key of the TLS certificate.")
    ssl_ca_certs: Path | None = flag(
        None, "File of CA certificates; each target needs a certificate that one of these CAs signed."
    )


@flags
def draft_worker(ctx: typer.Context, model: DraftFlags, listen: DraftListenFlags) -> None:
    """Draft for targets on other machines, which name this one by --worker grpc://HOST:PORT.

    It runs until SIGTERM or Ctrl-C. Targets then decode plainly.

    The options of drafters (see outpace methods NAME) are flags too, as in --width 8.
    """
    require("a draft worker", "remote", "grpc")
    from outpace.card.link import authenticator, read_listen_address
    from outpace.cluster.draft_server import open_draft_server
    from outpace.server.options import ServerOptions, read_api_keys

    host, port = read_listen_address(listen.listen)
    keys = read_api_keys(listen.api_key_file)
    options = ServerOptions(  # checks these
        host=host,
        port=port,
        keys=keys,
        insecure=listen.insecure,
        certificate=listen.ssl_certfile,
        certificate_key=listen.ssl_keyfile,
        client_authorities=listen.ssl_ca_certs,
    )
    use_threads(model.threads)
    with display.loading_bar(False) as progress:
        server = open_draft_server(model.draft, model.options, model.drafter, ctx.obj, authenticator(keys), progress)
    with suppress(KeyboardInterrupt), process.sigterm_as_interrupt(status=0), server:  # both signals are its usual end
        port = server.listen(host, port, options.read_tls())
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        display.say(f"{server.own.name} drafts on {where}; Ctrl-C ends it")
        while not server.has_ended.wait(POLL_SECONDS):
            pass
        if server.failure is not None:
            raise server.failure
