"""The drafter's side of CARD: applies corrections between forwards, grows the trees of all requests, returns new
levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from traceback import clear_frames
from typing import Any, NamedTuple

from outpace.card.cache import CandidateLevel, Correction
from outpace.core.drafting import NO_NEEDS, DraftDirectives
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


_MEMORY = 0.99  # weight of past draft steps, for each new one
_MAX_STEP = 4.0  # a longer step counts as this many times its expected duration
_SPREAD = 0.02  # least variance of the widths, over their squared mean, that shows the cost of a node
Message = Open | Correct | SetDirectives | Pause | Resume | Close


@dataclass
class DraftedRequest:
    """One request on the drafter's side. Its root may be older than the target's, never the reverse. `root_id`: the
    target's id of the root. `length`: number of the answer's tokens that the drafter knows. `published`: number of
    nodes that were returned in levels. `levels`: number of levels grown since the last directives."""

    state: Any
    tree: TokenTree
    root_id: int = 0
    length: int = 0
    published: int = 1
    idle: bool = False  # nothing to add, or all directives done; a message wakes it
    levels: int = 0
    reads_text: bool = True  # the next step reads text before it drafts

    def limit_depth(self) -> None:
        """Let the tree grow as deep as the answer may still become; the target writes its last token itself."""
        self.tree.max_depth = self.state.request.max_tokens - self.length - 1

    @property
    def is_done(self) -> bool:
        """Whether all nodes were published, and the directives say to stop growing."""
        levels, depth = self.state.directives[:2]
        is_grown = (levels is not None and self.levels >= levels) or 0 < depth <= self.tree.deepest
        return is_grown and self.published == len(self.tree)


class StepTimes:
    """Fits a line to the seconds of draft steps by the nodes that they expand; older steps count less.

    `line`: fixed seconds of a step, and seconds per expanded node; 0 while nothing is known. `trial_width`: if recent
    steps had nearly equal widths, another width to try, so that the cost of a node can be fitted; else 0.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, rows, seconds, rows^2, rows * seconds
        self.line, self.trial_width = (0.0, 0.0), 0

    def learn(self, rows: int, seconds: float) -> None:
        """Record a step; one that was interrupted counts as a few times the expected duration at most."""
        if self._sums[0]:
            fixed, per_row = self.line
            seconds = min(seconds, _MAX_STEP * (fixed + per_row * rows))
        now = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_MEMORY * old + new for old, new in zip(self._sums, now, strict=True)]
        count, nodes, total, squares, products = self._sums
        spread = count * squares - nodes * nodes
        slope = (count * products - nodes * total) / spread if spread > 1e-6 * (count + squares) else 0.0
        slope = min(max(slope, 0.0), total / nodes)
        self.line = (total - slope * nodes) / count, slope
        narrow = round(nodes / count / 4) or 1 if nodes > 1.5 * count else 4
        self.trial_width = narrow if spread < _SPREAD * nodes * nodes else 0


def check_concurrent(drafter: Drafter) -> None:
    """Raise UserError for a drafter that cannot run in parallel with the target."""
    if drafter.capabilities.needs != NO_NEEDS:
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
        self.drafter = drafter  # other threads may read its `capabilities`
        self._most = most_requests
        self._width = max([source.width for source in drafter.capabilities.sources if source.runs_model], default=1)
        self._times, self._rows = StepTimes(), 0
        self._requests: dict[int, DraftedRequest] = {}
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()  # None only ends a wait

    def grow(self) -> list[tuple[int, CandidateLevel]]:
        """Read the messages and grow the trees that can grow. Return the new levels by request; none at all if there is
        nothing to do. A level without nodes says that the tree grows no more before the next correction."""
        self._read_inbox()
        chosen = self._next()
        if not chosen:
            return []
        requests = [drafted for _, drafted in chosen]
        rows = [self._choose_width(drafted) for drafted in requests]
        reads_text = [drafted for drafted in requests if drafted.reads_text]
        self._rows = (
            sum(rows) if not reads_text and self._width > 1 else 0
        )  # 0: not recorded, because reading text takes part of the time
        self._grow(requests)
        return [(key, self._publish(drafted)) for key, drafted in chosen]

    def _grow(self, growing: Sequence[DraftedRequest]) -> None:
        """Grow trees once, and again those in which the draft only confirmed what another drafter had added."""
        while growing:
            confirmed = [drafted.tree.num_confirmed for drafted in growing]
            self.drafter.grow([drafted.state for drafted in growing], [drafted.tree for drafted in growing])
            growing = [
                drafted
                for drafted, before in zip(growing, confirmed, strict=True)
                if len(drafted.tree) == drafted.published and drafted.tree.num_confirmed > before
            ]

    def learn_time(self, seconds: float) -> None:
        """Record how long the last `grow` took."""
        if self._rows:
            self._times.learn(self._rows, seconds)

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

    def _choose_width(self, drafted: DraftedRequest) -> int:
        """Set the most nodes that the next step expands for a request, by their measured cost; return it."""
        directives, tree = drafted.state.directives, drafted.tree
        max_width = min(directives.width or self._width, self._width)
        if directives.outcomes or directives.in_levels:
            tree.width = max_width
        else:
            tree.width = min(max_width, self._times.trial_width) or tree.best_width(max_width, *self._times.line)
        return tree.width

    def _next(self) -> list[tuple[int, DraftedRequest]]:
        """Choose the requests of the next forward, round robin."""
        chosen = [(key, drafted) for key, drafted in self._requests.items() if not drafted.idle][: self._most]
        for key, _ in chosen:
            self._requests[key] = self._requests.pop(key)
        return chosen

    def _publish(self, drafted: DraftedRequest) -> CandidateLevel:
        """Return the nodes of a tree that were not published yet."""
        tree, start = drafted.tree, drafted.published
        drafted.published, drafted.reads_text = len(tree), False
        drafted.levels += len(tree) > start
        drafted.idle = len(tree) == start or drafted.is_done
        own_id = tree.ids[0]
        return CandidateLevel(drafted.root_id, tree.delta(start), own_id if own_id != drafted.root_id else None)

    def _read_inbox(self) -> None:
        while not self.inbox.empty():  # only this thread takes messages out
            self._take(self.inbox.get_nowait())

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Open):
            state = self.drafter.open(message.request)
            tree = TokenTree(message.request.prompt[-1], next_id=message.next_id)
            self._requests[message.key] = DraftedRequest(state, tree)
            self._requests[message.key].limit_depth()
        elif isinstance(message, Close):
            drafted = self._requests.pop(message.key, None)
            if drafted is not None:
                self.drafter.close(drafted.state)
        elif isinstance(message, SetDirectives):
            drafted = self._requests[message.key]
            drafted.state.directives, drafted.levels = message.directives, 0
            drafted.idle = drafted.is_done
        elif isinstance(message, Pause):
            drafted = self._requests[message.key]
            drafted.idle = drafted.reads_text = True
            self.drafter.pause(drafted.state)
        elif isinstance(message, Resume):
            drafted = self._requests[message.key]
            drafted.idle = drafted.is_done
        elif message is not None:
            self._follow(self._requests[message.key], message.correction)

    def _follow(self, drafted: DraftedRequest, correction: Correction) -> None:
        """Walk the new tokens in the request's own tree and keep what lies below them; if they are not there, only the
        new root exists. If the target gave the root a new id, it lacks the nodes below, although they may have been
        published: their level is under way or lost, so they are published again."""
        tokens = correction.tokens[max(len(correction.tokens) + drafted.length - correction.length, 0) :]
        if not tokens:  # the same correction came twice
            return
        old, path = drafted.tree, [0]
        for token in tokens:
            node = old.child(path[-1], token)
            if node is None:  # the id of a node that the target knows may be that of another node here
                root_id = correction.root_id if correction.root_id < 0 else old.next_id
                drafted.tree = TokenTree(tokens[-1], root_id, max(old.next_id, root_id + 1))
                break
            path.append(node)
        else:
            drafted.tree = old.below(path.pop())
        drafted.root_id, drafted.length = correction.root_id, correction.length
        drafted.limit_depth()
        ids = [old.ids[node] for node in path]
        self.drafter.observe(drafted.state, Observation(ids, tokens, drafted.tree))
        drafted.published = len(drafted.tree) if drafted.tree.ids[0] == correction.root_id else 1
        drafted.idle = drafted.is_done
