"""The server's options, its limits, and its API keys."""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from outpace.card.link import TlsFiles
from outpace.core import registry
from outpace.core.errors import UserError, check_whole, require, unknown
from outpace.core.options import CheckedOptions, number, whole
from outpace.models.files.reading import read_named_text
from outpace.models.files.recommended_sampling import check_source
from outpace.tools.definitions import AUTO, FORMATS

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
API_KEY_VARIABLE = "OUTPACE_API_KEY"


@dataclass(frozen=True)
class ServerLimits(CheckedOptions):
    """Bounds of one request and of all together. Fields without a help text are no flags."""

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
class ServerOptions:
    """Where the server listens, whom it serves, and what a request may choose.

    `names`: names of the model in requests. `methods`: methods, drafters and rules that a request may choose besides
    the server's own. `keys`: SHA-256 hashes of API keys; empty: no key is needed. `hosts`: accepted Host headers;
    empty: those of this machine, or any if there are keys. `strict`: refuse unknown fields and tools instead of
    reporting them in a header. `draft_port`: port for clients that draft for themselves; None: no such port.
    `generation_config`: auto if the model's files say how to sample where a request does not, else none or vllm.
    `tool_prompt`: describe tools in the system message if the chat template ignores them. `tool_parser`: the form in
    which the model writes calls, `auto` for that of its chat template and all others. `client_authorities`: file of CA
    certificates; each client needs a certificate that one of these CAs signed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    keys: frozenset[bytes] = frozenset()
    hosts: tuple[str, ...] = ()
    insecure: bool = False
    methods: tuple[str, ...] = ()
    draft_port: int | None = None
    generation_config: str = "auto"
    strict: bool = False
    tool_prompt: bool = False
    tool_parser: str = AUTO
    log_prompts: bool = False
    metrics_prefix: str = "outpace"  # outpace, vllm or both
    certificate: Path | None = None
    certificate_key: Path | None = None
    client_authorities: Path | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        check_whole("port", self.port, 0, 65535)
        if self.draft_port is not None:
            check_whole("draft_port", self.draft_port, 0, 65535)
            require("draft_port", "remote", "grpc")
        if self.host not in LOCAL_HOSTS and not self.keys and not self.insecure:
            raise UserError(
                f"host {self.host} can be reached from other machines: set API keys by --api-key-file or"
                f" {API_KEY_VARIABLE}, or allow requests without a key by --insecure"
            )
        if self.metrics_prefix not in ("outpace", "vllm", "both"):
            raise UserError(f"metrics prefix is {self.metrics_prefix!r}, it must be outpace, vllm or both")
        check_source(self.generation_config)
        if self.tool_parser not in (AUTO, *FORMATS):
            raise unknown("tool parser", self.tool_parser, (AUTO, *FORMATS))
        if (self.certificate is None) != (self.certificate_key is None):
            raise UserError("TLS needs a certificate and its key, give both or neither")
        if self.certificate is not None and self.certificate_key is not None:
            _check_certificate(self.certificate, self.certificate_key)
        if self.client_authorities is not None:
            if self.certificate is None:
                raise UserError("--ssl-ca-certs needs --ssl-certfile: without TLS no client sends a certificate")
            _check_authorities(self.client_authorities)
        known = {name for kind in registry.KINDS for name in registry.names(kind)}
        for part in (part for name in self.methods for part in name.split("+")):
            if part not in known:
                raise unknown("method, drafter or rule", part, known)

    def read_tls(self) -> TlsFiles | None:
        """Return the contents of the TLS files; None without TLS."""
        if self.certificate is None or self.certificate_key is None:
            return None
        authorities = None if self.client_authorities is None else self.client_authorities.read_bytes()
        return TlsFiles(self.certificate.read_bytes(), self.certificate_key.read_bytes(), authorities)

    @property
    def rules(self) -> list[str]:
        """The names of `methods` that are rules."""
        return [name for name in self.methods if name in registry.names("rules")]

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Accepted Host headers; empty: any."""
        if self.hosts:
            return self.hosts
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


def read_api_keys(file: Path | None) -> frozenset[bytes]:
    """Return hashes of the keys in a file, one a line, and in OUTPACE_API_KEY, separated by commas."""
    keys = [key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",")]
    if file is not None:
        lines = read_named_text("--api-key-file", file).splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UserError(f"API key file {file} has no key, write one a line")
        keys += found
    return frozenset(hashlib.sha256(key.encode()).digest() for key in keys if key)
