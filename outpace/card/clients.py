"""The server's side of clients that draft for their own requests."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from outpace.card.cache import CandidateCache, CandidateLevel
from outpace.card.loop import Close, Message
from outpace.card.restarting import DrafterTimes
from outpace.card.worker import DraftWorker
from outpace.core.types import Request

LONGEST_WAIT = 0.1  # seconds, because all requests wait


class DraftingClient(DrafterTimes, ABC):
    """A client with one request, for which it drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: CandidateCache | None = None  # once the engine has opened the request
        self.has_left = False
        self._longest_wait = LONGEST_WAIT  # halved by each wait in vain

    @abstractmethod
    def post(self, message: Message) -> None:
        """Queue a message to the client; returns at once."""

    def insert(self, levels: Sequence[CandidateLevel], seconds: float) -> None:
        """Insert levels from the client; drop those that arrive before the engine has opened the request.

        `seconds`: duration of its draft step.
        """
        self._num_received += 1
        for level in levels:
            if self.cache is not None:
                self.cache.insert(level)
        if levels:
            self.step_seconds += 0.1 * (seconds - self.step_seconds)

    def wait(self, levels: int, depth: int) -> None:
        """Wait for the client's levels, for a time that becomes shorter if none come."""
        if self.cache is None or self.has_left:
            return
        has_grown = self._wait_for(self.cache, levels, depth, self._longest_wait)
        if has_grown is not None:
            self._longest_wait = LONGEST_WAIT if has_grown else self._longest_wait / 2

    def leave(self) -> None:
        """End all waits, because the client is gone."""
        self.has_left = True
        if self.cache is not None:
            self.cache.give_up()


class ClientWorker(DraftWorker):
    """Passes the messages of each request to the client that drafts it."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._clients: dict[int, DraftingClient] = {}  # by `Request.client`
        self._by_key: dict[int, DraftingClient] = {}  # by the engine's key of the request

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
        """Return the client whose levels go to a cache."""
        return next((client for client in self._by_key.values() if client.cache is cache), None)

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        if (client := self.client_of(cache)) is not None:
            client.wait(levels, depth)

    def round_trip_of(self, cache: CandidateCache) -> float:
        client = self.client_of(cache)
        return 0.0 if client is None else client.round_trip_seconds

    def _begin(self) -> None:
        pass  # the clients begin

    def stop(self) -> None:
        pass  # the streams end with the server

    def _post(self, message: Message) -> None:
        client = self._by_key.get(message.key)
        if isinstance(message, Close):
            self._by_key.pop(message.key, None)
        if client is not None:
            client.post(message)
