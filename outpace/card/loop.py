"""The drafter's side of CARD: applies corrections between forwards, grows the trees of all requests, returns new
layers."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue
from traceback import clear_frames
from typing import Any, NamedTuple

from outpace.card.cache import CandidateLayer, Correction
from outpace.core.drafting import NO_NEEDS, UNRESTRICTED, DraftDirectives
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request


class Open(NamedTuple):
    """Start a request. `next_id`: id of its first node, above those of an earlier drafter of the request."""

    key: int
    request: Request
    next_id: int = 1


class Correct(NamedTuple):
    """The target moved a request's root."""

    key: int
    correction: Correction


class SetDirectives(NamedTuple):
    """Draft a request by these directives from now on."""

    key: int
    directives: DraftDirectives


class Pause(NamedTuple):
    """Free a request's memory and do not draft it until `Resume`."""

    key: int


class Resume(NamedTuple):
    """Continue a paused request."""

    key: int


class Close(NamedTuple):
    """End a request."""

    key: int


Message = Open | Correct | SetDirectives | Pause | Resume | Close


@dataclass
class DraftedRequest:
    """One request on the drafter's side. Its root may be older than the target's, never the reverse. `published`:
    number of nodes that were returned in layers. `layers`: grown since the last directives."""

    state: Any
    tree: TokenTree
    published: int = 1
    idle: bool = False  # nothing to add, or all directives done; a message wakes it
    directives: DraftDirectives = UNRESTRICTED
    layers: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the directives say to stop growing."""
        layers, depth, *_ = self.directives
        return (layers is not None and self.layers >= layers) or 0 < depth <= self.tree.deepest


def check_concurrent(drafter: Drafter) -> None:
    """Raise UserError for a drafter that cannot run in parallel with the target."""
    if drafter.needs != NO_NEEDS:
        raise UserError(
            f"drafter {drafter.name} needs to see the target's passes, which a worker does not: use method auto or"
            " speculative"
        )


class DraftLoop:
    """The drafter's loop: read messages, grow once, return what is new. It is called by the one thread that owns it;
    other threads only `post`."""

    def __init__(self, drafter: Drafter, most_requests: int = 16) -> None:
        """`most_requests` share a forward; more take turns. UserError for a drafter that needs to see the target's
        passes."""
        check_concurrent(drafter)
        self.drafter = drafter  # other threads may call its `num_captures` and `stored_bytes`
        self._most = most_requests
        self._requests: dict[int, DraftedRequest] = {}
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()  # None only ends a wait

    def grow(self) -> list[tuple[int, CandidateLayer]]:
        """Read the messages and grow the trees that can grow. Return the new layers by request; none at all if there is
        nothing to do. A layer without nodes says that the tree grows no more before the next correction."""
        self._read_inbox()
        keys = self._next()
        if not keys:
            return []
        requests = [self._requests[key] for key in keys]
        added = self.drafter.grow([drafted.state for drafted in requests], [drafted.tree for drafted in requests])
        for drafted, count in zip(requests, added, strict=True):
            drafted.layers += count > 0
            drafted.idle = not count or drafted.is_done
        return [(key, self._delta(self._requests[key])) for key in keys]

    def post(self, message: Message) -> None:
        """Put a message into the inbox; any thread but the drafter's may call this."""
        self.inbox.put(message)

    @property
    def has_work(self) -> bool:
        """Whether there is a message or a tree that can grow."""
        return not self.inbox.empty() or any(not drafted.idle for drafted in self._requests.values())

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the next message and read it."""
        try:
            message = self.inbox.get(timeout=seconds)
        except Empty:
            return
        self._take(message)

    def drop(self, failure: BaseException) -> None:
        """Release everything after the drafter failed: requests, unread messages, and what the kept exception refers
        to."""
        self.inbox = SimpleQueue()
        self._requests.clear()
        clear_frames(failure.__traceback__)

    def _next(self) -> list[int]:
        """Choose the requests of the next forward, round robin."""
        keys = [key for key, drafted in self._requests.items() if not drafted.idle][: self._most]
        for key in keys:
            self._requests[key] = self._requests.pop(key)
        return keys

    def _delta(self, drafted: DraftedRequest) -> CandidateLayer:
        """Return the nodes of a tree that were not published yet."""
        tree, start = drafted.tree, drafted.published
        drafted.published = len(tree)
        return CandidateLayer(tree.ids[0], tree.delta(start))

    def _read_inbox(self) -> None:
        while not self.inbox.empty():  # only this thread takes messages out
            self._take(self.inbox.get_nowait())

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Open):
            state = self.drafter.open(message.request)
            self._requests[message.key] = DraftedRequest(
                state, TokenTree(message.request.prompt[-1], next_id=message.next_id)
            )
        elif isinstance(message, Close):
            drafted = self._requests.pop(message.key, None)
            if drafted is not None:
                self.drafter.close(drafted.state)
        elif isinstance(message, SetDirectives):
            drafted = self._requests[message.key]
            drafted.directives, drafted.layers = message.directives, 0
            self.drafter.set_directives(drafted.state, message.directives)
            drafted.idle = drafted.is_done
        elif isinstance(message, Pause):
            drafted = self._requests[message.key]
            drafted.idle = True
            self.drafter.pause(drafted.state)
        elif isinstance(message, Resume):
            drafted = self._requests[message.key]
            drafted.idle = drafted.is_done
        elif message is not None:
            self._follow(self._requests[message.key], message.correction)

    def _follow(self, drafted: DraftedRequest, correction: Correction) -> None:
        """Re-root a tree: after a hit the subtree lives on; after a miss only the new root exists."""
        old = drafted.tree
        if correction.is_hit:
            root = old.find(correction.root_id)
            assert root is not None  # the cache knows only nodes that came from this tree
            drafted.tree = old.copy(old.subtree(root))
        else:
            drafted.tree = TokenTree(correction.tokens[-1], correction.root_id, old.next_id)
        self.drafter.observe(drafted.state, Observation(correction.path, correction.tokens, drafted.tree))
        drafted.published = len(drafted.tree)
        drafted.idle = drafted.is_done
