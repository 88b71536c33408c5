"""Multi-step drafting: take several draft steps in one call where a model can do so on its device, and hand out their
proposals one step at a time.

The host chooses nodes to expand as usual. If they were expanded in advance, their proposals are used at once; otherwise
a normal forward runs, and the advance steps have only cost time. So the trees equal those of single steps, whatever the
device chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace_kernels import SlotMap

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.multi_step import MAX_STEPS, ExpandedNode, MultiStepRequest, OpenNode, max_open_nodes
from outpace.core.noise import key_words, row_key
from outpace.core.tree import PREFIX, TokenTree
from outpace.core.types import Observation, Request, TopK
from outpace.drafters._calibration import PickModels
from outpace.drafters._tree_expander import SPARE, ExpansionJob
from outpace.models.base import Model
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel
from outpace.rules.match import Match

_FADE = 0.9  # decay per round
_FIRST = 4.0  # prior of the steps per round
_MOST_CAPTURED = 32  # requests times steps of the largest graph that is captured in advance


@dataclass
class MultiStepCache:
    """Advance steps of one request that were not used yet.

    `expanded`: the nodes that the steps expanded. `known`: index in `expanded` by tree node id. `children`: index by
    the parent's index (or `_below`) and the token. `taken`: number of steps used in this round. `loose`: indices of
    nodes that are not in the tree, while the session renumbers its nodes.
    """

    expanded: list[ExpandedNode] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    taken: int = 0
    loose: list[int] = field(default_factory=list)

    def claim(self, seen: Observation, slots: SlotMap) -> bool:
        """Follow the accepted path and assign session slots to accepted nodes that were expanded in advance. Return
        whether the next root and everything above it is expanded; if not, nothing expanded below it can be used."""
        above = PREFIX
        for node_id, token in zip([*seen.node_ids, seen.tree.ids[0]], [-1, *seen.tokens], strict=False):
            found = self.known.get(node_id, self.children.get((above, token), PREFIX))
            if found != PREFIX:
                self.known[node_id] = found
            if node_id == seen.tree.ids[0]:
                is_expanded = found != PREFIX or node_id in slots
                return is_expanded and all(node in slots for node in seen.node_ids)
            if found != PREFIX and node_id not in slots:
                slots[node_id] = self.expanded[found].slot
            above = _below(slots[node_id]) if found == PREFIX and node_id in slots else found
        return False

    def keep(self, seen: Observation, slots: SlotMap) -> list[int]:
        """Forget everything that is not below the next root; return the slots of kept nodes that are not in the
        tree."""
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

    def settle(self, slots: SlotMap, pending: int) -> None:
        """Update slots after the session has renumbered its nodes: those of `slots` first, then the loose ones."""
        found = {place: slots[node_id] for node_id, place in self.known.items() if node_id in slots}
        found |= dict(zip(self.loose, range(len(slots), pending), strict=False))
        if len(found) < len(self.expanded) or pending != len(slots) + len(self.loose):
            self.clear()  # the session was restarted
        self.expanded = [one._replace(slot=found[place]) for place, one in enumerate(self.expanded)]
        self.loose = []

    def clear(self) -> None:
        self.expanded, self.known, self.children, self.loose = [], {}, {}, []

    def find(self, tree: TokenTree, node: int) -> ExpandedNode | None:
        """Return the expansion of this tree node, None if it was not expanded in advance."""
        found = self.known.get(tree.ids[node])
        if found is None and node:
            above = self.known.get(tree.ids[tree.parents[node]], PREFIX)
            found = self.children.get((above, tree.tokens[node]))
            if found is not None:
                self.known[tree.ids[node]] = found
        return None if found is None else self.expanded[found]


class MultiStepExpander:
    """Takes draft steps in advance, and hands out their proposals one step at a time."""

    def __init__(self, model: Model, pick_models: PickModels, options: Any, steps: int | None) -> None:
        """`options` are `ModelOptions`. `steps` is the number of draft steps in one call; with None it is that of a
        usual round, if several in one call save time. Raises UserError for several, if the model takes only one."""
        if model.several_steps is None and steps not in (None, 1):
            raise UserError(
                f"steps is {steps}, and {type(model).__name__} takes one at a time: several need a draft with"
                " graphs, on a GPU or by graphs eager"
            )
        self._model, self._pick_models, self._options = model, pick_models, options
        self._chosen = 1 if steps is None and not model.several_steps else steps
        self.takes_several = self._chosen != 1
        self._usual = _FIRST
        self.num_steps = 1  # draft steps of the present growth: see `DraftState`

    def capture(self, batches: Sequence[int]) -> None:
        """Capture the steps that these numbers of requests are likely to take at once."""
        if self.takes_several:
            usual = [1 << power for power in range(1, MAX_STEPS.bit_length())]
            counts = usual if self._chosen is None else [self._chosen]
            sizes = [(batch, count) for batch in batches for count in counts if batch * count <= _MOST_CAPTURED]
            self._model.capture_steps(sizes, self._options.width, self._options.width + SPARE)

    def known(self, jobs: Sequence[ExpansionJob]) -> list[list[TopK]] | None:
        """Return the proposals below the jobs' frontiers if all of them were expanded in advance, None if a forward is
        needed."""
        for job in jobs:
            job.state.multi_step.taken += 1
        found = [[job.state.multi_step.find(job.tree, node) for node in job.frontier] for job in jobs]
        if not all(map(all, found)):
            return None
        if self.num_steps == 1:  # this growth took no steps in advance
            self.num_steps = 0
        for job, mine in zip(jobs, found, strict=True):
            for node, one in zip(job.frontier, mine, strict=True):
                if one is not None:
                    job.state.slots[job.tree.ids[node]] = one.slot
        return [[_possible(one) for one in mine if one is not None] for mine in found]

    def steps(self, jobs: Sequence[ExpansionJob], held: SparseLogits) -> list[list[TopK]] | None:
        """Return the proposals below the jobs' frontiers, whose logits are `held`, after taking further steps in
        advance; None if no step is to be taken in advance."""
        count = min(self._count(job) for job in jobs)
        if count < 2 or not all(_is_plain(job.state.request) for job in jobs):
            return None
        width = self._options.width
        most = max_open_nodes(width, count)
        opened = [_opened(job, most) for job in jobs]
        requests = [
            self._request(job, [node for _, node in some], count) for job, some in zip(jobs, opened, strict=True)
        ]
        taken = self._model.draft_steps(requests, held, count, width, width + SPARE)
        if taken is None:
            return None
        self.num_steps = count
        for job, some, expanded in zip(jobs, opened, taken, strict=True):
            job.state.multi_step = _index_steps(job, some, expanded)
        return [[_possible(one) for one in some[: len(job.frontier)]] for job, some in zip(jobs, taken, strict=True)]

    def follow(self, state: Any, seen: Observation) -> list[int]:
        """End a round and keep what was expanded below the next root. Return the slots of nodes that are not in the
        tree, which the session must keep after the tree's own."""
        cache = state.multi_step
        if cache.taken:
            self._usual = _FADE * self._usual + (1.0 - _FADE) * cache.taken
        cache.taken = 0
        if not cache.expanded or not cache.claim(seen, state.slots):
            cache.clear()
            return []
        loose: list[int] = cache.keep(seen, state.slots)
        if len(state.slots) + len(loose) > self._options.tree_nodes:  # more than a session has space for
            cache.clear()
            return []
        return loose

    def _count(self, job: ExpansionJob) -> int:
        """Return the number of steps worth taking together for this request, a power of two."""
        state = job.state
        most = MAX_STEPS if self._chosen is None else self._chosen
        is_steered = state.directives.outcomes or state.directives.in_layers
        if is_steered or state.session.pending + most * self._options.width > self._options.tree_nodes:
            return 1
        if self._chosen is not None:
            return most
        left = min(round(self._usual) - state.multi_step.taken + 1, job.tree.max_depth)
        return 1 << (max(min(left, most), 1).bit_length() - 1)

    def _request(self, job: ExpansionJob, opened: list[OpenNode], count: int) -> MultiStepRequest:
        state, tree, frontier = job
        width = self._options.width
        depths = [node.depth for node in opened] + [tree.depth(node) for node in frontier]
        floor = self._options.floor if state.directives.floor is None else state.directives.floor
        request = state.request
        return MultiStepRequest(
            state.session,
            [tree.scores[node] for node in frontier],
            [state.slots[tree.ids[node]] for node in frontier],
            opened,
            min(state.directives.width or width, width),
            len(tree),
            self._options.tree_nodes,
            state.directives.share,
            math.log(floor) if floor else -math.inf,
            state.deepest(tree),
            self._pick_models.of(request).trust,
            1.0 if request.sampling.is_greedy else request.sampling.temperature,
            _keys(request, len(state.tokens), max(depths) + count),
        )


def _is_plain(request: Request) -> bool:
    """Whether proposals are ranked by log q, with or without the position's noise, and by nothing else."""
    rules = (Greedy, Gumbel, Match)
    is_bare = request.adjustments is None and request.constraint is None
    return is_bare and type(request.rule) in rules and not request.sampling.filters


def _keys(request: Request, start: int, depths: int) -> list[tuple[int, int]]:
    """Return the keys of the noise for proposals below nodes of each depth; empty for rules without noise."""
    if type(request.rule) is not Gumbel:
        return []
    return [key_words(row_key(request.seed, request.choice, start + depth)) for depth in range(depths)]


def _opened(job: ExpansionJob, most: int) -> list[tuple[int, OpenNode]]:
    """Return the best open nodes besides the frontier, with their ids, in tree order, without those below an open
    node."""
    state, tree, _ = job
    opened = []
    for node in state.slots.peek(most):
        parent = tree.ids[tree.parents[node]] if node else PREFIX
        if not node or parent in state.slots:
            above = state.slots[parent] if node else PREFIX
            opened.append((tree.ids[node], OpenNode(tree.scores[node], tree.tokens[node], tree.depth(node), above)))
    return opened


def _index_steps(
    job: ExpansionJob, opened: Sequence[tuple[int, OpenNode]], expanded: list[ExpandedNode]
) -> MultiStepCache:
    """Index the expanded nodes by the tree nodes that they are, or are below. `opened`: the open nodes with their
    ids."""
    state, tree, frontier = job
    cache = MultiStepCache(expanded, taken=state.multi_step.taken)
    first = {one.slot: number for number, one in enumerate(expanded[: len(frontier)])}
    for number, one in enumerate(expanded):
        if number < len(frontier):
            cache.known[tree.ids[frontier[number]]] = number
        elif one.opened is not None:
            node_id, node = opened[one.opened]
            cache.known[node_id] = number
            if node.above != PREFIX:  # the target may reach it by another id
                cache.children[first.get(node.above, _below(node.above)), one.token] = number
        else:
            cache.children[one.parent, one.token] = number
    return cache


def _below(slot: int) -> int:
    """Return the key of a parent that was pending before the steps, distinct from all indices and PREFIX."""
    return PREFIX - 1 - slot


def _possible(one: ExpandedNode) -> TopK:
    """Drop tokens that are filtered out; they come last."""
    possible = sum(value > -math.inf for value in one.values)
    return one.tokens[:possible], one.values[:possible]
