"""Draft steps that were taken before they are asked for: several in one go, where a model can do that on its device.

A step's proposals are used where the host, choosing as ever, comes to expand the same nodes; where it does not, it
makes a forward of its own, and steps taken in vain have cost their time. So the trees are those of single steps,
whatever the device chose.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, NamedTuple

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.multi_step import (
    MAX_STEPS,
    MAX_UPDATE_TOKENS,
    ExpandedNode,
    MultiStepRequest,
    OpenNode,
    RootUpdate,
    RootUpdateChannel,
    max_open_nodes,
)
from outpace.core.noise import key_words, row_key
from outpace.core.tree import PREFIX, TokenTree
from outpace.core.types import Observation, Request, TopK
from outpace.drafters._calibration import PickModels
from outpace.drafters._tree_expander import ExpansionJob
from outpace.models.base import Model
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel
from outpace.rules.match import Match


class RootMove(NamedTuple):
    """Where the target went: the nodes by id, what it wrote behind each, the root from then on."""

    path: Sequence[int]
    tokens: Sequence[int]
    root_id: int


class InFlightSteps:
    """What another thread may know of a tree while a graph grows it: its nodes that are pending, as they were when the
    steps began. `mail`: by which the steps are told."""

    def __init__(self, job: ExpansionJob, heard: deque[RootMove]) -> None:
        """`heard`: what was said and not yet observed, to which others add."""
        state, tree, _ = job
        self._heard, self._lock = heard, threading.Lock()
        self._known = {
            node_id: (state.slots[node_id], score)
            for node_id, score in zip(tree.ids, tree.scores, strict=True)
            if node_id in state.slots
        }
        self._root = tree.ids[0]
        self._above = self._known.get(self._root)
        self._written: list[int] = []  # below that node
        self.mail = RootUpdateChannel()

    def listen(self) -> None:
        """Any thread, when something was said: follows what leads on from the present root."""
        with self._lock:
            for walk in self._heard.copy():
                self._follow(*walk)

    def _follow(self, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        """As `Drafter.on_root_moved` has it. What begins at another root than the present one was followed before, or came too
        early."""
        if path[0] != self._root or self._above is None:
            return
        self._root = root_id
        walked = [*path, root_id]  # tokens[n] stands between walked[n] and walked[n + 1]
        last = max((place for place, node_id in enumerate(walked) if node_id in self._known), default=None)
        if last is None:
            self._written += tokens
        else:
            self._above, self._written = self._known[walked[last]], [*tokens[last:]]
        if len(self._written) <= MAX_UPDATE_TOKENS:
            self.mail.send(RootUpdate(*self._above, tuple(self._written)))


SPARE = 4  # proposals scored beyond the fan-out, so that their share of the chance is known
_FADE = 0.9  # of the past's weight, a round
_FIRST = 4.0  # steps that a round is held to take, before any was seen


@dataclass
class MultiStepCache:
    """Steps that were taken for one request and not asked for yet: what they expanded, and which of it the nodes of the
    tree are, by id. `taken`: steps that the present round has asked for."""

    expanded: list[ExpandedNode] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # by the parent's number, or `_below`, and token
    taken: int = 0
    loose: list[int] = field(default_factory=list)  # what no node has asked for, while a session numbers anew
    under_way: InFlightSteps | None = None  # steps that are being taken
    heard: deque[RootMove] = field(default_factory=deque)  # where the target went, as far as that is not yet observed

    def claim(self, seen: Observation, slots: dict[int, int]) -> bool:
        """Follows the target's walk: gives walked nodes that were expanded ahead their slots. Whether the next root,
        and all above it, is expanded; else nothing that was expanded below it is of use."""
        above = PREFIX
        for node_id, token in zip([*seen.path, seen.tree.ids[0]], [-1, *seen.tokens], strict=False):
            found = self.known.get(node_id, self.children.get((above, token), PREFIX))
            if found != PREFIX:
                self.known[node_id] = found
            if node_id == seen.tree.ids[0]:
                is_expanded = found != PREFIX or node_id in slots
                return is_expanded and all(node in slots for node in seen.path)
            if found != PREFIX:
                slots.setdefault(node_id, self.expanded[found].slot)
            above = _below(slots[node_id]) if found == PREFIX and node_id in slots else found
        return False

    def keep(self, seen: Observation, slots: dict[int, int]) -> list[int]:
        """Forgets all that is not below the next root; slots of what no node of the tree has asked for, which stays."""
        ids = {number: node_id for node_id, number in self.known.items()}
        living, places = set(seen.tree.ids), dict[int, int]()
        kept: list[ExpandedNode] = []
        for number, one in enumerate(self.expanded):
            if ids.get(number) in living or one.parent in places:
                places[number] = len(kept)
                kept.append(one._replace(parent=places.get(one.parent, PREFIX)))
        self.known = {ids[number]: place for number, place in places.items() if number in ids}
        self.children = {(one.parent, one.token): place for place, one in enumerate(kept) if one.parent != PREFIX}
        self.expanded = kept
        asked = {place for node_id, place in self.known.items() if node_id in slots and node_id in living}
        self.loose = [place for place in range(len(kept)) if place not in asked]
        return [kept[place].slot for place in self.loose]

    def settle(self, slots: dict[int, int], pending: int) -> None:
        """The session has numbered anew what it keeps: the nodes of `slots`, and what is loose behind them."""
        found = {place: slots[node_id] for node_id, place in self.known.items() if node_id in slots}
        found |= dict(zip(self.loose, range(len(slots), pending), strict=False))
        if len(found) < len(self.expanded) or pending != len(slots) + len(self.loose):
            self.clear()  # it began anew
        self.expanded = [one._replace(slot=found[place]) for place, one in enumerate(self.expanded)]
        self.loose = []

    def clear(self) -> None:
        """Nothing was expanded."""
        self.expanded, self.known, self.children, self.loose = [], {}, {}, []

    def find(self, tree: TokenTree, node: int) -> ExpandedNode | None:
        """What was expanded for this node."""
        found = self.known.get(tree.ids[node])
        if found is None and node:
            above = self.known.get(tree.ids[tree.parents[node]], PREFIX)
            found = self.children.get((above, tree.tokens[node]))
            if found is not None:
                self.known[tree.ids[node]] = found
        return None if found is None else self.expanded[found]


class MultiStepExpander:
    """Takes steps ahead, and hands out their proposals one step at a time."""

    def __init__(self, model: Model, choices: PickModels, options: Any) -> None:
        """`options`: those of the drafter `model`. UserError for steps that its model cannot take at once."""
        if model.several_steps is None and options.steps not in (None, 1):
            raise UserError(
                f"steps is {options.steps}, and {type(model).__name__} takes one at a time: several need a draft with"
                " graphs, on a GPU or by graphs eager"
            )
        self._model, self._choices, self._options = model, choices, options
        self._chosen = 1 if options.steps is None and not model.several_steps else options.steps
        self.takes_several = self._chosen != 1  # any step may be taken ahead: else nobody needs to ask
        self._usual = _FIRST
        self._owed = self._share = 0.0  # see `amortized`
        self._is_new = False
        self._is_used = False
        self.is_beside = False  # so that steps under way may be told where the target went

    def known(self, jobs: Sequence[ExpansionJob]) -> list[list[TopK]] | None:
        """The proposals below the jobs' frontiers, where all of them were expanded ahead; None: a forward is needed."""
        for job in jobs:
            job.state.ahead.taken += 1
        found = [[job.state.ahead.find(job.tree, node) for node in job.frontier] for job in jobs]
        if not all(map(all, found)):
            return None
        self._is_used = True
        for job, mine in zip(jobs, found, strict=True):
            job.state.slots |= {
                job.tree.ids[node]: one.slot for node, one in zip(job.frontier, mine, strict=True) if one is not None
            }
        return [[_offer(one) for one in mine if one is not None] for mine in found]

    def steps(self, jobs: Sequence[ExpansionJob], held: SparseLogits) -> list[list[TopK]] | None:
        """The proposals below the jobs' frontiers, whose scores `held` are, and steps beyond; None where no step is to
        be taken ahead."""
        count = min(self._count(job) for job in jobs)
        if count < 2 or not all(_is_plain(job.state.request) for job in jobs):
            return None
        width = self._options.width
        most = max_open_nodes(width, count, self.is_beside)
        opened = [_opened(job, most) for job in jobs]
        asked = [self._asked(job, [node for _, node in some], count) for job, some in zip(jobs, opened, strict=True)]
        if self.is_beside:
            for job, one in zip(jobs, asked, strict=True):
                job.state.ahead.under_way = steps = InFlightSteps(job, job.state.ahead.heard)
                one.mail = steps.mail
                steps.listen()
        taken = self._model.draft_steps(asked, held, count, width, width + SPARE)
        for job in jobs:
            job.state.ahead.under_way = None
        if taken is None:
            return None
        self._is_new, self._owed = True, float(count)
        for job, some, expanded in zip(jobs, opened, taken, strict=True):
            job.state.ahead = _burst(job, some, expanded)
        return [[_offer(one) for one in some[: len(job.frontier)]] for job, some in zip(jobs, taken, strict=True)]

    def on_root_moved(self, state: Any, walk: RootMove) -> None:
        """Another thread says where the target went: it may be that steps are under way, or will be before that is
        observed."""
        if self.is_beside and self.takes_several:
            burst = state.ahead
            burst.heard.append(walk)
            if burst.under_way is not None:
                burst.under_way.listen()

    def follow(self, state: Any, seen: Observation) -> list[int]:
        """A round is over: of what was expanded ahead that stays which lies below the next root. Slots of what no node
        has asked for yet: behind those of the tree's they are to be kept."""
        burst = state.ahead
        if burst.taken:
            self._usual = _FADE * self._usual + (1.0 - _FADE) * burst.taken
        burst.taken = 0
        while burst.heard and burst.heard.popleft().root_id != seen.tree.ids[0]:
            pass  # what was said before this was observed before it
        if not burst.expanded or not burst.claim(seen, state.slots):
            burst.clear()
            return []
        loose: list[int] = burst.keep(seen, state.slots)
        if len(state.slots) + len(loose) > self._options.tree_nodes:  # more than is set aside for a request
            burst.clear()
            return []
        return loose

    def amortized(self, seconds: float) -> float:
        """Of steps that were taken together each is held to have taken an equal share."""
        if self._is_new:
            self._share = seconds / self._owed
            seconds = self._share
        elif self._is_used:
            seconds += self._share
        self._is_new = self._is_used = False
        return seconds

    def _count(self, job: ExpansionJob) -> int:
        """Steps that are worth taking together for this request: a power of two."""
        state = job.state
        most = MAX_STEPS if self._chosen is None else self._chosen
        if state.orders.outcomes or state.session.pending + most * self._options.width > self._options.tree_nodes:
            return 1
        if self._chosen is not None:
            return most
        left = round(self._usual) - state.ahead.taken + 1
        return 1 << (max(min(left, most), 1).bit_length() - 1)

    def _asked(self, job: ExpansionJob, opened: list[OpenNode], count: int) -> MultiStepRequest:
        state, tree, frontier = job
        width = self._options.width
        depths = [node.depth for node in opened] + [tree.depth(node) for node in frontier]
        depths += state.session.pending_depths if self.is_beside else []
        floor = self._options.floor if state.orders.floor is None else state.orders.floor
        request = state.request
        return MultiStepRequest(
            state.session,
            [tree.scores[node] for node in frontier],
            [state.slots[tree.ids[node]] for node in frontier],
            opened,
            min(state.orders.width or width, width),
            len(tree),
            self._options.tree_nodes,
            state.orders.share,
            math.log(floor) if floor else -math.inf,
            state.session.capacity - len(state.tokens) + state.start,
            self._choices.of(request).trust,
            1.0 if request.sampling.is_greedy else request.sampling.temperature,
            _keys(request, len(state.tokens), max(depths) + count),
        )


def _is_plain(request: Request) -> bool:
    """Whether what is proposed is the best of log q, or of log q with the noise of the position, and nothing else."""
    rules = (Greedy, Gumbel, Match)
    is_bare = request.adjustments is None and request.constraint is None
    return is_bare and type(request.rule) in rules and not request.sampling.filters


def _keys(request: Request, start: int, depths: int) -> list[tuple[int, int]]:
    """Of the noise of what is proposed below nodes of so many depths, where the rule has it."""
    if type(request.rule) is not Gumbel:
        return []
    return [key_words(row_key(request.seed, request.choice, start + depth)) for depth in range(depths)]


def _opened(job: ExpansionJob, most: int) -> list[tuple[int, OpenNode]]:
    """The best nodes that are open beside the frontier, with their ids, in the tree's order; not those below a node
    that is open itself."""
    state, tree, _ = job
    opened = []
    for node in sorted(node for _, node in nsmallest(most, state.open)):
        above = state.slots.get(tree.ids[tree.parents[node]]) if node else PREFIX
        if above is not None:
            found = OpenNode(tree.scores[node], tree.tokens[node], tree.depth(node), above)
            opened.append((tree.ids[node], found))
    return opened


def _burst(job: ExpansionJob, opened: Sequence[tuple[int, OpenNode]], expanded: list[ExpandedNode]) -> MultiStepCache:
    """What was expanded, by the nodes of the tree that it is or stands below; `opened` with their ids."""
    state, tree, frontier = job
    burst = MultiStepCache(expanded, taken=state.ahead.taken, heard=state.ahead.heard)
    first = {one.slot: number for number, one in enumerate(expanded[: len(frontier)])}
    for number, one in enumerate(expanded):
        if number < len(frontier):
            burst.known[tree.ids[frontier[number]]] = number
        elif one.opened is not None:
            node_id, node = opened[one.opened]
            burst.known[node_id] = number
            if node.above != PREFIX:  # the target may come there by another id
                burst.children[first.get(node.above, _below(node.above)), one.token] = number
        elif one.below is not None:
            burst.children[_below(one.below), one.token] = number
        else:
            burst.children[one.parent, one.token] = number
    return burst


def _below(slot: int) -> int:
    """Stands for a parent that was pending before the steps: no number of what they expanded, nor PREFIX."""
    return PREFIX - 1 - slot


def _offer(one: ExpandedNode) -> TopK:
    """Without what is filtered out: it stands last."""
    possible = sum(value > -math.inf for value in one.values)
    return one.tokens[:possible], one.values[:possible]
