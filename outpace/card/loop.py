"""The drafter's side of CARD: takes corrections between layers, grows all running requests' trees, publishes deltas."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from traceback import clear_frames
from typing import Any, NamedTuple

from outpace.card.cache import Candidate, CandidateLayer, Correction
from outpace.core.drafting import NO_NEEDS, UNRESTRICTED, DraftDirectives
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree, depths
from outpace.core.types import Drafter, Observation, Request


class Open(NamedTuple):
    """A request starts. `next_id`: of its first node, above those of a drafter that had the request before."""

    key: int
    request: Request
    next_id: int = 1


class Correct(NamedTuple):
    """The target moved a request's root."""

    key: int
    correction: Correction


class Configure(NamedTuple):
    """How a request is drafted from now on."""

    key: int
    orders: DraftDirectives


class Pause(NamedTuple):
    """A request waits for memory: nothing is held or drafted for it meanwhile."""

    key: int


class Resume(NamedTuple):
    """It goes on."""

    key: int


class Close(NamedTuple):
    """A request is over."""

    key: int


Message = Open | Correct | Configure | Pause | Resume | Close


@dataclass
class DraftedRequest:
    """One request as the drafter knows it; its tree may lag behind the target's, never the other way round."""

    state: Any
    tree: TokenTree
    published: int = 1
    idle: bool = False  # the drafter had nothing to add, or has done what was ordered; a message wakes it
    orders: DraftDirectives = UNRESTRICTED
    layers: int = 0  # grown since the orders came

    @property
    def is_done(self) -> bool:
        """Whether its orders say that it is not to grow on."""
        layers, depth, *_ = self.orders
        return (layers is not None and self.layers >= layers) or 0 < depth <= max(depths(self.tree.parents))


def check_concurrent(drafter: Drafter) -> None:
    """UserError for a drafter that cannot work beside the target."""
    if drafter.needs != NO_NEEDS:
        raise UserError(
            f"drafter {drafter.name} needs to see the target's passes, a worker beside the target does not: use it in"
            " turn, with method auto or speculative"
        )


class DraftLoop:
    """One turn: read the mail, grow once, hand out what is new. Whoever owns the loop alone calls it."""

    def __init__(self, drafter: Drafter, most_requests: int = 16) -> None:
        """`most_requests` share a forward; with more of them running, they take turns. UserError for a drafter that
        needs more of the target than its verdicts."""
        check_concurrent(drafter)
        self._drafter = drafter
        self._most = most_requests
        self._tracks: dict[int, DraftedRequest] = {}
        self.mail: SimpleQueue[Message | None] = SimpleQueue()  # None says nothing, but ends a wait

    def grow(self) -> list[tuple[int, CandidateLayer]]:
        """Reads the mail and grows the trees that can grow: new layers by request, not published yet.

        A layer without nodes says that this request's tree grows no more before the next correction. No layers at all:
        there is nothing to do.
        """
        self._read_mail()
        keys = self._next()
        if not keys:
            return []
        tracks = [self._tracks[key] for key in keys]
        added = self._drafter.grow([track.state for track in tracks], [track.tree for track in tracks])
        for track, count in zip(tracks, added, strict=True):
            track.layers += count > 0
            track.idle = not count or track.is_done
        return [(key, self._delta(self._tracks[key])) for key in keys]

    def post(self, message: Message) -> None:
        """Any thread but the drafter's: puts a message into the mail. A correction is told to the drafter at once, too,
        which may be able to turn while it grows."""
        track = self._tracks.get(message.key)
        if track is not None and isinstance(message, Correct):
            path, tokens, root_id, _ = message.correction
            with suppress(Exception):  # the mail says the same: a fault comes out there, in the drafter's own thread
                self._drafter.on_root_moved(track.state, path, tokens, root_id)
        self.mail.put(message)

    def begin_concurrent(self) -> None:
        """Another thread will `post`."""
        self._drafter.begin_concurrent()

    @property
    def num_captures(self) -> int:
        """Number of passes captured so far by the drafter's models."""
        return self._drafter.num_captures

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """The most that the drafter holds for requests whose texts have so many tokens each; any thread may ask."""
        return self._drafter.stored_bytes(lengths)

    def limit_threads(self, most: int) -> None:
        """The drafter's models take at most so many CPU threads in this thread."""
        self._drafter.limit_threads(most)

    @property
    def has_work(self) -> bool:
        return not self.mail.empty() or any(not track.idle for track in self._tracks.values())

    def wait(self, seconds: float | None = None) -> None:
        """Reads the next message, when it comes."""
        try:
            message = self.mail.get(timeout=seconds)
        except Empty:
            return
        self._take(message)

    def drop(self, failure: BaseException) -> None:
        """The drafter failed: nothing is held for any request, nor by the failure, which is kept."""
        self._tracks.clear()
        clear_frames(failure.__traceback__)

    def end(self) -> None:
        """Nothing is drafted any more."""
        self._drafter.end()

    def _next(self) -> list[int]:
        """The requests of the next forward; those served move to the end of the row."""
        keys = [key for key, track in self._tracks.items() if not track.idle][: self._most]
        for key in keys:
            self._tracks[key] = self._tracks.pop(key)
        return keys

    def _delta(self, track: DraftedRequest) -> CandidateLayer:
        tree, start = track.tree, track.published
        track.published = len(tree)
        nodes = []
        for node in range(start, len(tree)):
            parent = tree.parents[node]
            chance = tree.scores[node] - tree.scores[parent]
            nodes.append(Candidate(tree.ids[node], tree.ids[parent], tree.tokens[node], chance, tree.roles[node]))
        return CandidateLayer(tree.ids[0], nodes)

    def _read_mail(self) -> None:
        while True:
            try:
                message = self.mail.get_nowait()
            except Empty:
                return
            self._take(message)

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Open):
            state = self._drafter.open(message.request)
            self._tracks[message.key] = DraftedRequest(
                state, TokenTree(message.request.prompt[-1], next_id=message.next_id)
            )
        elif isinstance(message, Close):
            track = self._tracks.pop(message.key, None)
            if track is not None:
                self._drafter.close(track.state)
        elif isinstance(message, Configure):
            self._heed(self._tracks[message.key], message.orders)
        elif isinstance(message, Pause):
            track = self._tracks[message.key]
            track.idle = True
            self._drafter.pause(track.state)
        elif isinstance(message, Resume):
            track = self._tracks[message.key]
            track.idle = track.is_done
        elif message is not None:
            self._follow(self._tracks[message.key], message.correction)

    def _heed(self, track: DraftedRequest, orders: DraftDirectives) -> None:
        track.orders, track.layers = orders, 0
        self._drafter.configure(track.state, orders)
        track.idle = track.is_done

    def _follow(self, track: DraftedRequest, correction: Correction) -> None:
        """Re-roots: after a hit the subtree lives on; after a miss there is a new root and nothing else."""
        old = track.tree
        if correction.is_hit:
            track.tree = old.copy(old.subtree(old.ids.index(correction.root_id)))
        else:
            track.tree = TokenTree(correction.tokens[-1], correction.root_id, old.next_id)
        self._drafter.observe(track.state, Observation(correction.path, correction.tokens, track.tree))
        track.published = len(track.tree)
        track.idle = track.is_done
