"""Clients of a server that draft their requests themselves, on their own machines."""

from __future__ import annotations

import itertools
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from outpace.card.cache import CandidateCache, CandidateLayer
from outpace.card.loop import Close, Message
from outpace.card.restarting import PATIENCE, TRIP_SECONDS
from outpace.card.worker import DraftWorker
from outpace.core.types import Request

LONGEST_WAIT = 0.1  # seconds, because all requests wait
_NUM_TRIPS = 9  # round trips that are remembered


class DraftingClient(ABC):
    """One request, which a client drafts: the target's side of its stream."""

    def __init__(self) -> None:
        self.cache: CandidateCache | None = None  # once the engine has opened the request
        self.step_seconds = 0.01
        self._trips = deque[float](maxlen=_NUM_TRIPS)
        self._num_received, self._silent_since = 0, -1
        self._longest_wait = LONGEST_WAIT  # halved by each wait in vain
        self.has_gone = False

    @property
    def round_trip_seconds(self) -> float:
        return statistics.median(self._trips) if self._trips else 0.0

    def note_trip(self, seconds: float) -> None:
        """Record the duration of a round trip."""
        self._trips.append(seconds)

    @abstractmethod
    def post(self, message: Message) -> None:
        """Send the client a message when the link is free; returns at once."""

    def insert(self, layers: Sequence[CandidateLayer], seconds: float) -> None:
        """Insert layers from the client; drop those that come before the engine has opened the request."""
        self._num_received += 1
        for layer in layers:
            if self.cache is not None:
                self.cache.insert(layer)
        if layers:
            self.step_seconds += 0.1 * (seconds - self.step_seconds)

    def wait(self, layers: int, depth: int) -> None:
        """Wait for a draft, but not again after a wait that timed out without any message."""
        received, cache = self._num_received, self.cache
        if cache is None or self.has_gone or received == self._silent_since:
            return
        trip = TRIP_SECONDS + PATIENCE * self.round_trip_seconds
        seconds = PATIENCE * self.step_seconds * (max(layers, depth) + 1) + trip
        cache.wait(layers, min(seconds, self._longest_wait), depth)
        has_grown = cache.has_grown(layers, depth)
        self._longest_wait = LONGEST_WAIT if has_grown else self._longest_wait / 2
        if self._num_received == received and not has_grown:
            self._silent_since = received

    def leave(self) -> None:
        """End all waiting: the client is gone."""
        self.has_gone = True
        if self.cache is not None:
            self.cache.give_up()


class ClientWorker(DraftWorker):
    """Sends each request to the client that drafts it."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._clients: dict[int, DraftingClient] = {}  # by `Request.client`
        self._by_key: dict[int, DraftingClient] = {}

    def join(self, client: DraftingClient) -> int:
        """Add a client; return its number, for `Request.client`."""
        number = next(self._numbers)
        self._clients[number] = client
        return number

    def leave(self, number: int) -> None:
        """Remove a client."""
        self._clients.pop(number).leave()

    def open(self, key: int, request: Request, cache: CandidateCache) -> None:
        if (client := self._clients.get(-1 if request.client is None else request.client)) is not None:
            client.cache, self._by_key[key] = cache, client
        super().open(key, request, cache)

    def client_of(self, cache: CandidateCache) -> DraftingClient | None:
        """Return the client of a request."""
        return next((client for client in self._by_key.values() if client.cache is cache), None)

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        if (client := self.client_of(cache)) is not None:
            client.wait(layers, depth)

    def round_trip_of(self, cache: CandidateCache) -> float:
        client = self.client_of(cache)
        return 0.0 if client is None else client.round_trip_seconds

    def stop(self) -> None:
        pass  # the streams end with the server

    def _post(self, message: Message) -> None:
        client = self._by_key.get(message.key)
        if isinstance(message, Close):
            self._by_key.pop(message.key, None)
        if client is not None:
            client.post(message)
