"""The server's options, its limits, and its API keys."""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from outpace.card.link import TlsFiles
from outpace.core import registry
from outpace.core.errors import UserError, require, unknown
from outpace.core.options import CheckedOptions, number, one_of, option, parsed, switch, whole
from outpace.models.files.reading import read_named_text
from outpace.models.files.recommended_sampling import check_source
from outpace.models.options import GENERATION_CONFIG
from outpace.tools.definitions import AUTO, FORMATS

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
API_KEY_VARIABLE = "OUTPACE_API_KEY"


@dataclass(frozen=True)
class ServerLimits(CheckedOptions):
    """Bounds of one request and of all together. Fields without a help text are no flags."""

    panel: ClassVar[str] = "Limits"  # of `--help`
    max_queue: int = whole(128, 1, help="Answers that may wait; further ones are refused with 429.")
    max_queued_tokens: int = whole(1 << 20, 1, help="Prompt tokens that may wait in total.")
    max_requests_per_key: int = whole(0, 0, help="Concurrent requests of one API key; 0: no limit.")
    max_connections: int = whole(512, 1, help="Concurrent connections.")
    max_body: int = whole(4 << 20, 1, help="Largest body of a request, in bytes.")
    queue_timeout: float = number(60.0, 0.001, help="Seconds that a request may wait in the queue.")
    request_timeout: float = number(600.0, 0.001, help="Seconds that an answer may take.")
    write_timeout: float = number(30.0, 0.001, help="Seconds without reading until a client is dropped.")
    drain: float = number(30.0, 0.0, help="Maximum seconds for finishing running answers after SIGTERM or Ctrl-C.")
    body_seconds: float = number(30.0, 0.001)  # to receive the headers, and then the body
    json_depth: int = whole(64, 1)
    stuck: float = number(60.0, 0.001)  # seconds without a finished engine step while work is pending
    ping: float = number(10.0, 0.001)  # seconds without data in a stream before a ping is sent


@dataclass(frozen=True)
class ServerOptions(CheckedOptions):
    """Where the server listens, whom it serves, and what a request may choose. Fields without a help text are no flags.

    `keys`: SHA-256 hashes of API keys, those of `api_key_file` included; empty: no key is needed.
    """

    panel: ClassVar[str] = "Server"
    host: str = option("127.0.0.1", "Address to listen on; one that other machines can reach needs API keys.")
    port: int = whole(8000, 0, 65535, help="Port to listen on; 0: any free port.")
    draft_port: int | None = whole(
        None,
        *(0, 65535),
        help="Port for clients that draft for themselves (outpace generate --target grpc://HOST:PORT); 0: any free"
        " port.",
    )
    served_name: list[str] | None = option(None, "Name of the model in requests; may be repeated.")
    api_key_file: Path | None = option(
        None, f"File with API keys, one a line, in addition to those in {API_KEY_VARIABLE}."
    )
    insecure: bool = switch(False, "Serve other machines without API keys.")
    allow_host: list[str] | None = option(None, "Host header to accept without keys; may be repeated.")
    allow_method: list[str] | None = option(None, "Method, drafter or rule that a request may choose; may be repeated.")
    generation_config: str = parsed("auto", check_source, GENERATION_CONFIG)
    strict: bool = switch(
        False, "Refuse unknown fields and tools instead of ignoring them and listing them in a header."
    )
    tool_prompt: bool = switch(False, "Describe tools in the system message if the chat template ignores them.")
    tool_parser: str = one_of(
        AUTO, (AUTO, *FORMATS), "Form of tool calls: auto, hermes, json, llama3, mistral, tools or xml."
    )
    metrics_prefix: str = one_of("outpace", ("outpace", "vllm", "both"), "Prefix of the metrics: outpace, vllm, both.")
    log_prompts: bool = switch(False, "Write the bodies of requests into the log.")
    ssl_certfile: Path | None = option(None, "TLS certificate.")
    ssl_keyfile: Path | None = option(None, "Key of the TLS certificate.")
    ssl_ca_certs: Path | None = option(
        None, "File of CA certificates; each client needs a certificate that one of these CAs signed."
    )
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keys", self.keys | _read_api_keys(self.api_key_file))
        if self.draft_port is not None:
            require("draft_port", "remote", "grpc")
        if self.host not in LOCAL_HOSTS and not self.keys and not self.insecure:
            raise UserError(
                f"host {self.host} can be reached from other machines: set API keys by --api-key-file or"
                f" {API_KEY_VARIABLE}, or allow requests without a key by --insecure"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UserError("TLS needs a certificate and its key, give both or neither")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)
        if self.ssl_ca_certs is not None:
            if self.ssl_certfile is None:
                raise UserError("--ssl-ca-certs needs --ssl-certfile: without TLS no client sends a certificate")
            _check_authorities(self.ssl_ca_certs)
        known = {name for kind in registry.KINDS for name in registry.names(kind)}
        for part in (part for name in self.allow_method or () for part in name.split("+")):
            if part not in known:
                raise unknown("method, drafter or rule", part, known)

    def read_tls(self) -> TlsFiles | None:
        """Return the contents of the TLS files; None without TLS."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        authorities = None if self.ssl_ca_certs is None else self.ssl_ca_certs.read_bytes()
        return TlsFiles(self.ssl_certfile.read_bytes(), self.ssl_keyfile.read_bytes(), authorities)

    @property
    def rules(self) -> list[str]:
        """The names of `allow_method` that are rules."""
        return [name for name in self.allow_method or () if name in registry.names("rules")]

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Accepted Host headers; empty: any."""
        if self.allow_host:
            return tuple(name.lower() for name in self.allow_host)
        return () if self.keys or self.insecure else (*LOCAL_HOSTS, "[::1]")


def _check_certificate(certificate: Path, key: Path) -> None:
    """Raise UserError unless these files are a certificate and its key."""
    for file in (certificate, key):
        try:
            file.open("rb").close()
        except OSError as error:
            raise UserError(f"TLS file {file} cannot be read ({error.strerror})") from error
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        why = f" ({error.reason})" if error.reason else ""
        raise UserError(f"{certificate} and {key} are not a certificate and its key in PEM format{why}") from error


def _check_authorities(file: Path) -> None:
    """Raise UserError unless this is a PEM file of certificates."""
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise UserError(f"{file} has no certificates in PEM format ({error.reason})") from error
    except OSError as error:
        raise UserError(f"TLS file {file} cannot be read ({error.strerror})") from error


def _read_api_keys(file: Path | None) -> frozenset[bytes]:
    """Return hashes of the keys in a file, one a line, and in OUTPACE_API_KEY, separated by commas."""
    keys = [key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",")]
    if file is not None:
        lines = read_named_text("--api-key-file", file).splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UserError(f"API key file {file} has no key, write one a line")
        keys += found
    return frozenset(hashlib.sha256(key.encode()).digest() for key in keys if key)
