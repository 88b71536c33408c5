"""gRPC streams between two machines: addresses, both ends of a stream, and queues of messages to send."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from outpace.core.drafting import SCHEMES
from outpace.core.errors import UserError, require

if TYPE_CHECKING:
    from typing_extensions import Self

    from outpace.card.wire import Identity

T = TypeVar("T")
SERVICE = "outpace.v1.Drafting"
_LATE = "nothing was sent or read in time"
NO_HELLO = "the first message of a stream must be a hello"
HELLO_SECONDS = 10.0  # timeout of the hello, and of a client's request after it
SILENT_SECONDS = 60.0  # timeout between messages of a target, and for a client to read the end of its answer
MAX_STREAMS = 64
MAX_MESSAGE = 4 << 20  # bytes
JOINED_BYTES = 1 << 20  # a message that exceeds this size gets no further item
_TRUSTED = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
_CLIENT_FILES = ("OUTPACE_SSL_CERTFILE", "OUTPACE_SSL_KEYFILE")
_CLOSE_SECONDS = 2.0
_LOOK_SECONDS = 0.5  # interval between checks for streams past their deadlines
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 20_000),  # a lost machine is noticed within 40 seconds
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),  # with it, a port in use would not be an error
)


class LinkError(RuntimeError):
    """The link to another machine ended or is silent."""


class Address(NamedTuple):
    """Where another machine listens: grpc://HOST:PORT, or grpcs://HOST:PORT with TLS. An API key may precede the host,
    as in grpc://KEY@HOST:PORT; by default it is read from OUTPACE_API_KEY."""

    host: str
    port: int
    is_secure: bool
    key: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __repr__(self) -> str:
        return str(self)  # without the key


def read_address(text: str) -> Address:
    """Parse an `Address`; UserError for any other text, or an unknown host."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        if parts.scheme not in SCHEMES or not host or not port or parts.path.strip("/") or parts.query:
            raise ValueError
    except ValueError:
        raise UserError(f"the address is {text!r}, it must be grpc://HOST:PORT, or grpcs://HOST:PORT for TLS") from None
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise UserError(f"the host {host} is not known ({error.strerror or error})") from None
    key = unquote(parts.username) if parts.username else os.environ.get("OUTPACE_API_KEY")
    return Address(host, port, parts.scheme == "grpcs", key)


def check_reachable(address: Address, what: str, patience: float = 5.0) -> None:
    """Raise UserError if nothing accepts connections at an address; `what` should listen there."""
    try:
        socket.create_connection(address[:2], timeout=patience).close()
    except OSError as error:
        raise UserError(f"there is no {what} at {address} ({error.strerror or error})") from None


def read_listen_address(text: str) -> tuple[str, int]:
    """Read the HOST:PORT to listen on; UserError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen is {text!r}, it must be HOST:PORT, as in 0.0.0.0:8100")
    return host.strip("[]"), int(port)


def grpc() -> Any:
    """Import gRPC; UserError if the extra is missing."""
    require("a link to another machine", "remote", "grpc")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log repeats the text of a status
    import grpc as module

    return module


def open_channel(address: Address) -> Any:
    """Return a channel, which connects on its first call. With TLS, environment variables name files: trusted
    certificates, and a certificate with its key for listeners that require one. UserError for an unreadable file."""
    module = grpc()
    options = (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # each channel connects anew
    if not address.is_secure:
        return module.insecure_channel(str(address), options)
    trusted, certificate, key = (_read_file(name) for name in (_TRUSTED, *_CLIENT_FILES))
    if (certificate is None) != (key is None):
        raise UserError(f"set both {_CLIENT_FILES[0]} and {_CLIENT_FILES[1]}, or neither")
    return module.secure_channel(str(address), module.ssl_channel_credentials(trusted, key, certificate), options)


def _read_file(variable: str) -> bytes | None:
    """Return the content of the file that an environment variable names; None if it is not set."""
    if not (name := os.environ.get(variable)):
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"{variable} is {name}, which cannot be read ({error.strerror})") from None


class Outbox(Generic[T]):
    """A queue of items to send. A thread of gRPC iterates over it; queued items are merged into one message, or into
    several if it exceeds JOINED_BYTES. A listener ends the stream at `deadline` (`time.monotonic`)."""

    def __init__(self, message_type: type[Any], add: Callable[[Any, T], None]) -> None:
        """`add` adds an item to a message; items that are messages of this type are merged."""
        self._type, self._add, self._items = message_type, add, SimpleQueue[T | None]()
        self._is_closed = False
        self.error: Exception | None = None  # why it was closed
        self.deadline = math.inf

    def put(self, item: T) -> None:
        """Queue an item; returns at once."""
        self._items.put(item)

    def close(self, error: Exception | None = None) -> None:
        """End the stream after the items that are already queued. `error`: the reason, if it is a failure."""
        if not self._is_closed:
            self.error, self._is_closed = error, True
        self._items.put(None)

    def __iter__(self) -> Iterator[Any]:
        is_open = True
        while is_open:
            message, item = self._type(), self._items.get()
            is_empty = item is None
            while item is not None:
                message.MergeFrom(item) if isinstance(item, self._type) else self._add(message, item)
                if message.ByteSize() > JOINED_BYTES:
                    break
                try:
                    item = self._items.get_nowait()
                except Empty:
                    break
            is_open = item is not None
            if not is_empty:
                yield message


class DialedStream(AbstractContextManager["DialedStream"]):
    """A stream that this side opens. Its own thread reads messages; `outbox` holds those to send."""

    def __init__(
        self,
        address: Address,
        call: str,
        hello: Any,
        parse: Callable[[bytes], Any],
        outbox: Outbox[Any],
        key: str | None,
    ) -> None:
        """`hello`: the first message. `parse` reads the other side's messages. `key`: an API key."""
        self.address, self.outbox = address, outbox
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._channel = open_channel(address)
        start = self._channel.stream_stream(f"/{SERVICE}/{call}", serialize, parse)
        outbox.put(hello)
        metadata = [("authorization", f"Bearer {key}")] if key else []
        self._call = start(iter(outbox), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="outpace-link-reader", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.outbox.close()
        self._call.cancel()
        self._channel.close()
        self._reader.join()

    def receive(self, seconds: float) -> Any:
        """Return the next message, or the exception that ended the stream; None if neither comes within `seconds`."""
        try:
            return self._inbox.get(timeout=seconds)
        except Empty:
            return None

    @abstractmethod
    def error_of(self, code: str, details: str) -> Exception:
        """Return the exception for a stream that ended with this gRPC status, OK included."""

    def _read(self) -> None:
        try:
            for message in self._call:
                self._inbox.put(message)
            self._inbox.put(self.error_of("OK", ""))
        except grpc().RpcError as error:
            details = error.details() or ""
            found = self.error_of(error.code().name, details)
            if self.address.is_secure and re.match("failed to connect.*Socket closed", details):
                found = type(found)(f"{found}; it may need a certificate: set {' and '.join(_CLIENT_FILES)}")
            self._inbox.put(found)
        except Exception as error:
            self._inbox.put(error)


class TlsFiles(NamedTuple):
    """The contents of a listener's PEM files: its certificate and key, and, if clients need certificates, those of the
    authorities that sign them."""

    certificate: bytes
    key: bytes
    authorities: bytes | None = None


class RefusedError(Exception):
    """Ends a stream with a gRPC status."""

    def __init__(self, code: str, text: str) -> None:
        """`code`: the status's name. `text`: a sentence for the other side's user."""
        super().__init__(text)
        self.code = code


def match_key(given: str, keys: Collection[bytes]) -> str | None:
    """Return a short id of an API key; None if its SHA-256 hash is not among `keys`. All are compared in constant
    time."""
    digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
    matches = [hmac.compare_digest(digest, key) for key in keys]
    return digest.hex()[:12] if any(matches) else None


def authenticator(keys: Collection[bytes]) -> Callable[[str], str]:
    """Return a function that checks the API key of a stream and returns its id; without `keys` none is needed."""

    def authenticate(given: str) -> str:
        found = match_key(given, keys) if keys else ""
        if found is None:
            why = "the API key is wrong" if given else "an API key is needed, in OUTPACE_API_KEY"
            raise RefusedError("UNAUTHENTICATED", why)
        return found

    return authenticate


class Listener(AbstractContextManager["Listener"]):
    """A gRPC server with one streaming call. Each stream has a thread that sends and one that reads; one thread for all
    ends streams past their deadlines."""

    def __init__(
        self,
        call: str,
        own: Identity,
        parse: Callable[[bytes], Any],
        begin: Callable[[str], tuple[Outbox[Any], Callable[[Any], None], Callable[[], None]]],
        authenticate: Callable[[str], str],
    ) -> None:
        """`own`: this side's model, which a stream's hello must match. `begin` takes the id of a stream's API key and
        returns its outbox, the function that takes its messages after the hello, and the function to call at its end.
        `authenticate` returns the id of an API key. The functions may raise RefusedError."""
        self._own = own
        module = grpc()
        self._grpc, self._begin, self._authenticate = module, begin, authenticate
        self._pool = ThreadPoolExecutor(MAX_STREAMS, "outpace-link")
        self._server = module.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        handler = module.stream_stream_rpc_method_handler(self._serve, parse, serialize)
        self._server.add_generic_rpc_handlers((module.method_handlers_generic_handler(SERVICE, {call: handler}),))
        self._hellos: dict[Any, float] = {}  # deadlines, by the context of a stream
        self._outboxes: dict[Any, Outbox[Any]] = {}  # by context, after the hello
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="outpace-link-watcher", daemon=True)

    def bind(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Bind to an address; return the port. UserError if that fails."""
        where = str(Address(host, port, False))
        try:
            if tls is None:
                found: int = self._server.add_insecure_port(where)
            else:
                pair, authorities = [(tls.key, tls.certificate)], tls.authorities
                credentials = self._grpc.ssl_server_credentials(pair, authorities, authorities is not None)
                found = self._server.add_secure_port(where, credentials)
        except RuntimeError:
            found = 0
        if not found:
            raise UserError(f"cannot listen on {host} port {port}: it is in use, or no address of this machine")
        return found

    def start(self) -> None:
        """Accept streams."""
        self._server.start()
        self._watcher.start()

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._server.stop(0).wait(_CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, incoming: Iterator[Any], context: Any) -> Iterator[Any]:
        end: Callable[[], None] = _nothing
        try:
            key = self._authenticate(_bearer(context.invocation_metadata()))
            self._check_hello(incoming, context)
            outbox, take, end = self._begin(key)
            self._outboxes[context] = outbox
            context.add_callback(outbox.close)
            reader = threading.Thread(target=_read, args=(incoming, take, outbox), name="outpace-link-reader")
            reader.daemon = True
            reader.start()
            yield from outbox
            if outbox.error is not None:
                raise outbox.error
        except RefusedError as error:
            context.abort(getattr(self._grpc.StatusCode, error.code), str(error))
        finally:
            self._outboxes.pop(context, None)
            end()

    def _check_hello(self, incoming: Iterator[Any], context: Any) -> None:
        """Read the first message of a stream; RefusedError if it is late, no hello, or from a different model."""
        self._hellos[context] = time.monotonic() + HELLO_SECONDS
        try:
            first = next(incoming)
        except Exception:
            raise RefusedError("DEADLINE_EXCEEDED", "no hello was received, a stream must begin with one") from None
        finally:
            del self._hellos[context]
        if not first.HasField("hello"):
            raise RefusedError("INVALID_ARGUMENT", NO_HELLO)
        if mismatch := self._own.mismatch(first.hello):
            raise RefusedError("FAILED_PRECONDITION", mismatch)

    def _watch(self) -> None:
        """End streams past their deadlines with a status, or without one if it cannot be sent."""
        while not self._stopping.wait(_LOOK_SECONDS):
            now = time.monotonic()
            for context, deadline in list(self._hellos.items()):
                if now > deadline:
                    context.cancel()
            for context, outbox in list(self._outboxes.items()):
                if now > outbox.deadline:
                    outbox.close(RefusedError("DEADLINE_EXCEEDED", _LATE))
                if now > outbox.deadline + HELLO_SECONDS:
                    context.cancel()


def _read(incoming: Iterator[Any], take: Callable[[Any], None], outbox: Outbox[Any]) -> None:
    """Take the messages of a stream until it ends; an exception from `take` ends it."""
    from outpace.card.wire import ProtocolError

    try:
        while True:
            try:
                message = next(incoming)
            except Exception:  # the stream ended; if the other side is gone, gRPC raises a bare Exception
                break
            take(message)
        outbox.close()
    except ProtocolError as error:
        outbox.close(RefusedError("INVALID_ARGUMENT", str(error)))
    except Exception as error:
        outbox.close(error)


def serialize(message: Any) -> bytes:
    """Return the bytes of a message."""
    data: bytes = message.SerializeToString()
    return data


def _bearer(metadata: Any) -> str:
    """Return the API key in the metadata of a call."""
    value = next((value for name, value in metadata if name == "authorization"), "")
    scheme, _, key = value.partition(" ")
    return str(key.strip()) if scheme.lower() == "bearer" else ""


def _nothing() -> None:
    """Do nothing."""
