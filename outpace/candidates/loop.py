"""The drafter's side of CARD: takes corrections between layers, grows all running requests' trees, publishes deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from outpace.candidates.cache import Candidate, CandidateCache, Correction, Layer
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request


class Open(NamedTuple):
    """A request starts."""

    key: int
    request: Request
    cache: CandidateCache


class Correct(NamedTuple):
    """The target moved a request's root."""

    key: int
    correction: Correction


class Close(NamedTuple):
    """A request is over."""

    key: int


Message = Open | Correct | Close


@dataclass
class Track:
    """One request as the drafter knows it; its tree may lag behind the target's, never the other way round."""

    state: Any
    cache: CandidateCache
    tree: TokenTree
    epoch: int = 0
    published: int = 1
    idle: bool = False  # the drafter had nothing to add; a correction wakes it


class DraftLoop:
    """One turn: read the mail, grow once, hand out what is new. Whoever owns the loop alone calls it."""

    def __init__(self, drafter: Drafter, most_requests: int = 16) -> None:
        """`most_requests` share a forward; with more of them running, they take turns."""
        self._drafter = drafter
        self._most = most_requests
        self._tracks: dict[int, Track] = {}
        self.mail: SimpleQueue[Message] = SimpleQueue()

    def grow(self) -> list[tuple[CandidateCache, Layer]]:
        """Reads the mail and grows the trees that can grow; the new layers, not published yet. Empty: nothing to do."""
        self._read_mail()
        tracks = self._next()
        if not tracks:
            return []
        added = self._drafter.grow([track.state for track in tracks], [track.tree for track in tracks])
        layers = []
        for track, count in zip(tracks, added, strict=True):
            if count:
                layers.append((track.cache, self._delta(track)))
            else:
                track.idle = True
                track.cache.counts["full tree"] += 1
                track.cache.give_up()
        return layers

    def caches(self) -> list[CandidateCache]:
        """The caches of all open requests."""
        return [track.cache for track in self._tracks.values()]

    @property
    def has_work(self) -> bool:
        return not self.mail.empty() or any(not track.idle for track in self._tracks.values())

    def _next(self) -> list[Track]:
        """The requests of the next forward; those served move to the end of the row."""
        keys = [key for key, track in self._tracks.items() if not track.idle][: self._most]
        for key in keys:
            self._tracks[key] = self._tracks.pop(key)
        return [self._tracks[key] for key in keys]

    def _delta(self, track: Track) -> Layer:
        tree, start = track.tree, track.published
        track.published = len(tree)
        nodes = []
        for node in range(start, len(tree)):
            parent = tree.parents[node]
            chance = tree.scores[node] - tree.scores[parent]
            nodes.append(Candidate(tree.ids[node], tree.ids[parent], tree.tokens[node], chance, tree.roles[node]))
        return Layer(track.epoch, nodes)

    def _read_mail(self) -> None:
        while True:
            try:
                message = self.mail.get_nowait()
            except Empty:
                return
            if isinstance(message, Open):
                state = self._drafter.open(message.request)
                self._tracks[message.key] = Track(state, message.cache, TokenTree(message.request.prompt[-1]))
            elif isinstance(message, Close):
                self._drafter.close(self._tracks.pop(message.key).state)
            else:
                self._follow(self._tracks[message.key], message.correction)

    def _follow(self, track: Track, correction: Correction) -> None:
        """Re-roots: after a hit the subtree lives on; after a miss there is a new root and nothing else."""
        old = track.tree
        if correction.is_hit:
            track.tree = old.copy(old.subtree(old.ids.index(correction.root_id)))
        else:
            track.tree = TokenTree(correction.tokens[-1], correction.root_id, old.next_id)
        self._drafter.observe(track.state, Observation(correction.path, correction.tokens, track.tree))
        track.epoch = correction.epoch
        track.published = len(track.tree)
        track.idle = False


def publish(layers: Sequence[tuple[CandidateCache, Layer]]) -> None:
    """Inserts each layer into its request's cache."""
    for cache, layer in layers:
        cache.insert(layer)
