"""Links between machines for the tests: a relay that delays, holds and cuts what passes, and a draft server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from light import Lookup
from processes import TABLE

from outpace.card.link import Address
from outpace.card.remote import RemoteWorker
from outpace.card.wire import Identity
from outpace.cluster.draft_server import DraftServer

OWN = Identity("toy tokenizer", 16, "toy")


def at(port: int, is_secure: bool = False) -> Address:
    return Address("127.0.0.1", port, is_secure)


def tls_files(folder: Path) -> dict[str, Path]:
    """Write the files of a certificate authority and of a certificate for 127.0.0.1 that it signed."""
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: folder / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(str(files["authority"]))
    files["certificate"].write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    return files


def trust(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], shows_certificate: bool = False) -> None:
    """Let links of this process trust the authority of `tls_files`, and show its certificate."""
    names = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": "authority"}
    if shows_certificate:
        names |= {"OUTPACE_SSL_CERTFILE": "certificate", "OUTPACE_SSL_KEYFILE": "key"}
    for variable, name in names.items():
        monkeypatch.setenv(variable, str(files[name]))


class Relay:
    """Passes bytes to a port after `delay` seconds, in both directions. While it `is_held`, nothing passes."""

    def __init__(self, port: int, delay: float = 0.0) -> None:
        self.goal, self.delay, self.is_held, self.num_bytes = port, delay, False, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Break all connections. The sockets are closed at the end: threads that still read one must not read another
        that got its number."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.is_held = False
        self.cut()
        for one in self._sockets:
            one.close()

    @staticmethod
    def _start(function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours = self._listener.accept()[0]
                try:
                    theirs = socket.create_connection(("127.0.0.1", self.goal))
                except OSError:
                    ours.close()
                    continue
                for one in (ours, theirs):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [ours, theirs]
                for one, other in ((ours, theirs), (theirs, ours)):
                    queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    self._start(self._read, one, queue)
                    self._start(self._write, other, queue)

    def _read(self, one: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"first"
        while data:
            try:
                data = one.recv(1 << 16)
            except OSError:
                data = b""
            self.num_bytes += len(data)
            queue.put((time.monotonic() + self.delay, data))

    def _write(self, other: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                due, data = queue.get()
                while self.is_held or time.monotonic() < due:
                    time.sleep(0.001 if self.is_held else max(due - time.monotonic(), 0.0))
                if not data:
                    other.shutdown(socket.SHUT_RDWR)
                    return
                other.sendall(data)


@contextmanager
def drafting(drafter: Any = None, own: Identity = OWN, delay: float = 0.0, **options: Any) -> Iterator[Any]:
    """Serve a drafter behind a relay; yields the server and the relay."""
    with DraftServer(drafter or Lookup(TABLE), own, **options) as server:
        relay = Relay(server.listen("127.0.0.1", 0), delay)
        try:
            yield server, relay
        finally:
            relay.close()


def worker_of(relay: Relay, **options: Any) -> RemoteWorker:
    """A worker that dials through a relay."""
    return RemoteWorker(at(relay.port), OWN, **{"pauses": (0.02,), **options}).start()
