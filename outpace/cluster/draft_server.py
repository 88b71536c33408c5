"""The draft worker: a drafter that serves targets on other machines, over the call `Draft` of `card/protocol.proto`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from outpace.card.cache import CandidateLevel
from outpace.card.link import SILENT_SECONDS, Listener, Outbox, TlsFiles
from outpace.card.loop import Close, Open
from outpace.card.protocol_pb2 import Event, FromDrafter, FromTarget, Pong
from outpace.card.wire import LONGEST_TEXT, MAX_PADDING, Identity, SentRequest, check, identity_of, parser, read_request
from outpace.cluster.draft_model import build_card_drafter, load_own_draft
from outpace.cluster.draft_thread import DraftThread, NewLevel, add_level
from outpace.core.types import Drafter
from outpace.models.load import Progress, silent
from outpace.models.options import LoadOptions

MAX_REQUESTS = 64  # drafted at once; targets decode further ones plainly


class DraftServer(AbstractContextManager["DraftServer"]):
    """Drafts for all targets that dial it, with one drafter.

    `failure`: the exception that ended the drafter. `has_ended` is set then.
    """

    def __init__(self, drafter: Drafter, own: Identity, authenticate: Callable[[str], str] = lambda key: "") -> None:
        """`own`: the draft model. `authenticate` returns the id of an API key; RefusedError for a wrong one."""
        self.own, self.has_ended = own, threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[TargetStream, int]] = {}  # by the drafter's key: stream, and the target's key
        self._listener = Listener("Draft", own, parser(FromTarget), self._begin, authenticate)
        self._thread = DraftThread(drafter, self._send, self.has_ended.set)

    def listen(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Listen on an address; return the port. UserError if that fails."""
        port = self._listener.bind(host, port, tls)
        self._listener.start()
        return port

    def __exit__(self, *error: object) -> None:
        self._listener.__exit__()
        self._thread.stop()

    @property
    def failure(self) -> BaseException | None:
        return self._thread.failure

    @property
    def num_requests(self) -> int:
        """Number of requests that are drafted now."""
        return len(self._streams)

    def _begin(self, key: str) -> tuple[Outbox[Any], Callable[[Any], None], Callable[[], None]]:
        stream = TargetStream(self)
        stream.outbox.put(FromDrafter(hello=self.own.hello))
        return stream.outbox, stream.take, stream.end

    def open(self, stream: TargetStream, their_key: int, sent: SentRequest, next_id: int) -> int | None:
        """Start a request and return the drafter's key; None if there are too many."""
        with self._lock:
            if len(self._streams) >= MAX_REQUESTS:
                return None
            key = next(self._numbers)
            self._streams[key] = stream, their_key
        self._thread.post(Open(key, sent.request, next_id))
        return key

    def post(self, message: Any) -> None:
        """Send the drafter a message about an open request."""
        self._thread.post(message)

    def close_request(self, key: int) -> None:
        """End a request."""
        with self._lock:
            del self._streams[key]
        self._thread.post(Close(key))

    def _send(self, key: int, level: CandidateLevel, seconds: float) -> None:
        stream, their_key = self._streams.get(key, (None, 0))
        if stream is not None:
            stream.send(their_key, level, seconds)


def open_draft_server(
    draft: str | None,
    options: LoadOptions,
    drafter: str,
    values: Mapping[str, Any],
    authenticate: Callable[[str], str],
    progress: Progress = silent,
) -> DraftServer:
    """Load a draft model (None: the shipped one) and return a server for it. `values`: options of the drafter."""
    loaded = load_own_draft(draft, options, progress)
    identity = identity_of(loaded)
    loaded.model.vocab_size = identity.num_tokens  # the target may lack rows that pad the draft
    return DraftServer(build_card_drafter(drafter, loaded, values), identity, authenticate)


class TargetStream:
    """One target's stream, with its requests by the target's keys. The drafter's key of a request is None if it is not
    drafted, because there were too many."""

    def __init__(self, server: DraftServer) -> None:
        self._server = server
        self._own = server.own._replace(max_positions=LONGEST_TEXT)  # texts beyond the draft's context are not drafted
        self._requests: dict[int, tuple[int | None, SentRequest]] = {}
        self._lock = threading.Lock()  # the stream may end while a message is taken
        self._has_ended = False
        self.outbox: Outbox[NewLevel | FromDrafter] = Outbox(FromDrafter, add_level)
        self.outbox.deadline = time.monotonic() + SILENT_SECONDS

    def send(self, key: int, level: CandidateLevel, seconds: float) -> None:
        """Queue a level to the target."""
        known = self._requests.get(key)
        if known is not None:
            known[1].note(level)
            self.outbox.put(NewLevel(key, level, seconds))

    def take(self, message: FromTarget) -> None:
        """Take a message after the hello; ProtocolError for an invalid one."""
        check(not message.HasField("hello"), "a second hello was sent")
        self.outbox.deadline = time.monotonic() + SILENT_SECONDS
        with self._lock:
            for event in message.events:
                if not self._has_ended:
                    self._take_event(event)
        if message.HasField("ping"):
            count = message.ping.answer_bytes
            check(count <= MAX_PADDING, f"a ping asks for {count} bytes, at most {MAX_PADDING} are allowed")
            self.outbox.put(FromDrafter(pong=Pong(number=message.ping.number, padding=bytes(count))))

    def _take_event(self, event: Event) -> None:
        if event.WhichOneof("content") == "open":
            check(event.key not in self._requests, f"request {event.key} was opened twice")
            check(
                len(self._requests) < 16 * MAX_REQUESTS,
                f"request {event.key} was opened, and {16 * MAX_REQUESTS} are open already",
            )
            request = read_request(event.open.request, self._own)
            sent = SentRequest(request, event.open.next_id)
            self._requests[event.key] = None, sent  # levels may come before `open` returns
            self._requests[event.key] = self._server.open(self, event.key, sent, event.open.next_id), sent
            return
        check(event.key in self._requests, f"request {event.key} is not open")
        key, sent = self._requests[event.key]
        message = sent.read(key or 0, event, self._own)
        if isinstance(message, Close):
            del self._requests[event.key]
        if key is not None:
            self._server.close_request(key) if isinstance(message, Close) else self._server.post(message)

    def end(self) -> None:
        """End all requests of the stream."""
        with self._lock:
            self._has_ended = True
            for key, _ in self._requests.values():
                if key is not None:
                    self._server.close_request(key)
            self._requests.clear()
