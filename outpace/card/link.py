"""Streams between two machines by gRPC: addresses, channels, servers, and what waits to be sent."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from outpace.core.errors import UserError, require

T = TypeVar("T")
SCHEMES = ("grpc", "grpcs")
SERVICE = "outpace.v1.Drafting"
HELLO_SECONDS = 10.0  # for the first message of a stream
MAX_STREAMS = 64
MAX_MESSAGE = 4 << 20  # bytes
_CLOSE_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 20_000),  # a machine that vanished is noticed after 40 seconds at the latest
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),  # with it, a port in use would not be an error
)


class Address(NamedTuple):
    """Where another machine listens: grpc://HOST:PORT, or grpcs://HOST:PORT with TLS."""

    host: str
    port: int
    is_secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def is_address(text: Any) -> bool:
    """Whether a text names another machine rather than a model or a worker of this one."""
    return isinstance(text, str) and text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def read_address(text: str) -> Address:
    """Read grpc://HOST:PORT or grpcs://HOST:PORT; UserError for anything else, and for a host that is not known."""
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
    return Address(host, port, parts.scheme == "grpcs")


def read_listen_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, to listen on."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen is {text!r}, it must be HOST:PORT, as in 0.0.0.0:8100")
    return host.strip("[]"), int(port)


def grpc() -> Any:
    """Import gRPC; UserError if the extra is missing."""
    require("a link to another machine", "remote", "grpc")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log repeats what a status says
    import grpc as module

    return module


def open_channel(address: Address) -> Any:
    """Return a channel, which connects when it is used. With TLS, GRPC_DEFAULT_SSL_ROOTS_FILE_PATH may name a file with
    certificates to trust."""
    module = grpc()
    options = (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # each channel connects anew
    if not address.is_secure:
        return module.insecure_channel(str(address), options)
    return module.secure_channel(str(address), module.ssl_channel_credentials(), options)


class Outbox(Generic[T]):
    """What waits to be sent. Iterating it, as a thread of gRPC does, joins what has piled up meanwhile."""

    def __init__(self, join: Callable[[list[T]], Any]) -> None:
        """`join` makes one message of all that waits."""
        self._join, self._items = join, SimpleQueue[T | None]()
        self._is_closed = False
        self.error: Exception | None = None  # why it was closed

    def put(self, item: T) -> None:
        """Send an item when the link is free; returns at once."""
        self._items.put(item)

    def close(self, error: Exception | None = None) -> None:
        """Send nothing more than what waits already."""
        if not self._is_closed:
            self.error, self._is_closed = error, True
        self._items.put(None)

    def __iter__(self) -> Iterator[Any]:
        is_open = True
        while is_open:
            waiting, item = list[T](), self._items.get()
            while item is not None:
                waiting.append(item)
                try:
                    item = self._items.get_nowait()
                except Empty:
                    break
            is_open = item is not None
            if waiting:
                yield self._join(waiting)


class RefusedError(Exception):
    """A stream that this side ends with a status: the name of its code, and a sentence."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def match_key(given: str, keys: Collection[bytes]) -> str | None:
    """Return a short id of an API key, None if its SHA-256 hash is not among `keys`. All of them are compared, in
    constant time."""
    digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
    matches = [hmac.compare_digest(digest, key) for key in keys]
    return digest.hex()[:12] if any(matches) else None


def authenticator(keys: Collection[bytes]) -> Callable[[str], str]:
    """Return the function that checks the API keys of streams; without `keys` none is needed."""

    def authenticate(given: str) -> str:
        found = match_key(given, keys) if keys else ""
        if found is None:
            why = "the API key is wrong" if given else "an API key is needed, in OUTPACE_API_KEY"
            raise RefusedError("UNAUTHENTICATED", why)
        return found

    return authenticate


class Listener(AbstractContextManager["Listener"]):
    """A gRPC server with one streaming call. Each stream has a thread that sends and one that reads."""

    def __init__(
        self,
        call: str,
        parse: Callable[[bytes], Any],
        begin: Callable[[Any, str], tuple[Outbox[Any], Callable[[Any], None], Callable[[], None]]],
        authenticate: Callable[[str], str],
    ) -> None:
        """`begin` takes the first message of a stream and the id of its key, and returns the stream's outbox, the
        function that takes the further messages, and the one that is called at its end. `authenticate` returns the id
        of an API key. All of these may raise RefusedError."""
        module = grpc()
        self._grpc, self._begin, self._authenticate = module, begin, authenticate
        self._pool = ThreadPoolExecutor(MAX_STREAMS, "outpace-link")
        self._server = module.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        handler = module.stream_stream_rpc_method_handler(self._serve, parse, _serialize)
        self._server.add_generic_rpc_handlers((module.method_handlers_generic_handler(SERVICE, {call: handler}),))

    def bind(self, host: str, port: int, certificate: bytes | None = None, key: bytes | None = None) -> int:
        """Bind to an address, with TLS if there is a certificate; return the port. UserError if that fails."""
        where = str(Address(host, port, False))
        try:
            if certificate is None:
                found: int = self._server.add_insecure_port(where)
            else:
                credentials = self._grpc.ssl_server_credentials([(key, certificate)])
                found = self._server.add_secure_port(where, credentials)
        except RuntimeError:
            found = 0
        if not found:
            raise UserError(f"cannot listen on {host} port {port}: it is in use, or no address of this machine")
        return found

    def start(self) -> None:
        """Accept streams."""
        self._server.start()

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait(_CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, incoming: Iterator[Any], context: Any) -> Iterator[Any]:
        end: Callable[[], None] = _nothing
        try:
            key = self._authenticate(_bearer(context.invocation_metadata()))
            outbox, take, end = self._begin(self._first(incoming, context), key)
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
            end()

    def _first(self, incoming: Iterator[Any], context: Any) -> Any:
        """Return the first message of a stream; RefusedError if it does not come in time."""
        timer = threading.Timer(HELLO_SECONDS, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            return next(incoming)
        except Exception:
            raise RefusedError("DEADLINE_EXCEEDED", "a stream begins with a hello, none came") from None
        finally:
            timer.cancel()


def _read(incoming: Iterator[Any], take: Callable[[Any], None], outbox: Outbox[Any]) -> None:
    """Take the messages of a stream until it ends; an exception ends it."""
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


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _bearer(metadata: Any) -> str:
    """Return the API key in the metadata of a call."""
    value = next((value for name, value in metadata if name == "authorization"), "")
    scheme, _, key = value.partition(" ")
    return str(key.strip()) if scheme.lower() == "bearer" else ""


def _nothing() -> None:
    """Do nothing."""
