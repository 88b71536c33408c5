"""A draft model grows a beam tree: the most likely unexpanded nodes of all requests go through one forward.

CARD's drafter, arXiv:2508.04462; of width 1 it is the chain of Leviathan et al., arXiv:2211.17192.

K frontier nodes a forward; their best children by path score are kept as C, the other scored children as B.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.tree import PREFIX, Role, Siblings, TokenTree, path_to
from outpace.core.types import DraftState, Observation, Request, Row
from outpace.drafters._chance import ChoiceModel
from outpace.drafters._drawn import draw_child
from outpace.models.base import Model, Part, chain, score_held
from outpace.rules.base import best_rows, rank_rows

_CHUNK = 256  # prompt tokens a forward
_CHOICES = {"greedy": True, "sampled": False}
_SPARE = 4  # proposals scored beyond the fan-out, so that their share of the chance is known


@dataclass(frozen=True)
class Options:
    """`width` nodes of a request a forward, as many children each; no more are grown where `tree_nodes` nodes stand;
    nodes that the target is expected to reach less often than `floor` are not expanded."""

    width: int = 4
    tree_nodes: int = 256
    floor: float = 0.005

    def __post_init__(self) -> None:
        check_whole("width", self.width, 1, 512)
        check_whole("tree_nodes", self.tree_nodes, 2, 16384)
        check_range("floor", self.floor, 0.0, 1.0)


@dataclass
class ModelState(DraftState):
    """`slots`: which pending node of the session holds a tree node (by id); `offers`: what was proposed below it.

    Between calls either committed tokens are missing from the session and nothing is pending, or none is missing (but
    the root, which is a node) and the pending nodes are exactly those of `slots`.
    """

    session: Any = None
    slots: dict[int, int] = field(default_factory=dict)
    offers: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)


class _Job(NamedTuple):
    """One request's share of a forward."""

    state: ModelState
    tree: TokenTree
    frontier: list[int]


class ModelDrafter:
    """Keeps a session of the draft model for each request, in step with what the target commits."""

    def __init__(self, model: Model, options: Options) -> None:
        self._model, self._options = model, options
        self._choices = {True: ChoiceModel(), False: ChoiceModel()}  # by: is the request greedy

    def open(self, request: Request) -> ModelState:
        capacity = min(len(request.prompt) + request.max_tokens + 1, self._model.max_positions)
        room = self._options.tree_nodes + self._options.width + _CHUNK
        return ModelState(request, list(request.prompt), self._model.open(capacity, room))

    def grow(self, states: Sequence[ModelState], trees: Sequence[TokenTree]) -> list[int]:
        """One forward of the draft model over the frontiers of all trees; nodes added to each.

        Another forward for a tree to which nothing was added because another drafter's branch stood there already.
        """
        added = [0] * len(trees)
        waiting = list(range(len(trees)))
        while waiting:
            jobs = [_Job(states[n], trees[n], self._frontier(states[n], trees[n])) for n in waiting]
            counts = self._expand([job for job in jobs if job.frontier])
            grown = [number for number, job in zip(waiting, jobs, strict=True) if job.frontier]
            for number, count in zip(grown, counts, strict=True):
                added[number] += count
            waiting = [number for number in grown if not added[number]]
        return added

    def _expand(self, jobs: Sequence[_Job]) -> list[int]:
        """One forward over the jobs' frontiers; nodes added to each tree."""
        if not jobs:
            return []
        self._catch_up([job.state for job in jobs])
        parts = [self._part(*job) for job in jobs]
        rows = [
            Row(job.state.request, job.state.tokens, _below_root(job.tree, node))
            for job in jobs
            for node in job.frontier
        ]
        held = score_held(self._model, parts)
        for job in jobs:
            self._settle(*job)
        added, row = [], 0
        for job in jobs:
            mine = slice(row, row + len(job.frontier))
            row = mine.stop
            if job.state.request.rule.siblings is Siblings.DRAWN:
                ranked = rank_rows(held.wide(mine), rows[mine])
                added.append(draw_child(job.tree, job.frontier[0], ranked[0], job.state.request))
            else:
                offers = best_rows(held.part(mine), rows[mine], self._options.width + _SPARE)
                added.append(self._add(*job, offers))
        return added

    def observe(self, state: ModelState, seen: Observation) -> None:
        if state.request.rule.siblings is Siblings.PICKED:
            self._learn(state, seen)
        path = []
        for node in seen.path:
            if node not in state.slots:
                break
            path.append(state.slots[node])
        live = [node for node in seen.tree.ids if node in state.slots]
        state.session.keep(path, [state.slots[node] for node in live])
        state.slots = {node: slot for slot, node in enumerate(live)}
        state.offers = {node: state.offers[node] for node in live if node in state.offers}
        state.tokens.extend(seen.tokens)

    def close(self, state: ModelState) -> None:
        state.session = None

    def remember(self) -> dict[str, Any]:
        """What a profile keeps: how the draft's chances came true, for greedy and for sampled requests."""
        return {name: self._choices[is_greedy].remember() for name, is_greedy in _CHOICES.items()}

    def recall(self, kept: Mapping[str, Any]) -> None:
        """Begins from a profile."""
        for name, is_greedy in _CHOICES.items():
            self._choices[is_greedy].recall(kept[name])

    def _frontier(self, state: ModelState, tree: TokenTree) -> list[int]:
        """The unexpanded nodes worth a place in the next forward, parents first; a parent never scores below its
        child, so a node comes after its parent or together with it."""
        if len(tree) >= self._options.tree_nodes:
            return []
        floor = math.log(self._options.floor) if self._options.floor else -math.inf
        room = state.session.capacity - len(state.tokens)  # a draft with a shorter context stops there
        open_nodes = [
            node
            for node in range(len(tree))
            if tree.ids[node] not in state.slots
            and tree.scores[node] >= floor
            and tree.roles[node] is not Role.PROBE
            and (len(tree) <= room or tree.depth(node) <= room)
        ]
        best = heapq.nsmallest(self._options.width, open_nodes, key=lambda node: (-tree.scores[node], node))
        return sorted(best)

    def _catch_up(self, states: Sequence[ModelState]) -> None:
        """Feeds committed tokens that the session lacks, but for the last chunk, which travels with the frontier."""
        while True:
            behind = [state for state in states if len(state.tokens) - 1 - state.session.length > _CHUNK]
            if not behind:
                return
            starts = [state.session.length for state in behind]
            self._model.score(
                [
                    chain(s.session, self._known(s.tokens[at : at + _CHUNK]))
                    for s, at in zip(behind, starts, strict=True)
                ]
            )
            for state in behind:
                state.session.keep(range(_CHUNK))

    def _part(self, state: ModelState, tree: TokenTree, frontier: Sequence[int]) -> Part:
        """The tokens still missing, then the frontier. Where tokens are missing, nothing is pending yet."""
        session = state.session
        missing = state.tokens[session.length : -1]
        first = session.pending + len(missing)
        parents = list(range(PREFIX, len(missing) - 1))
        places: dict[int, int] = {}
        for number, node in enumerate(frontier):
            parent = tree.parents[node]
            above = len(missing) - 1 if parent == PREFIX else places.get(parent, state.slots.get(tree.ids[parent]))
            assert above is not None
            parents.append(above)
            places[node] = first + number
        for node, place in places.items():
            state.slots[tree.ids[node]] = place
        wanted = range(len(missing), len(missing) + len(frontier))
        tokens = self._known([*missing, *(tree.tokens[node] for node in frontier)])
        return Part(session, tokens, parents, wanted)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """A target padded further than the draft may write ids that the draft has no embedding for."""
        return [min(token, self._model.vocab_size - 1) for token in tokens]

    def _settle(self, state: ModelState, tree: TokenTree, frontier: Sequence[int]) -> None:
        """Commits the tokens that were missing; the frontier's nodes stay pending."""
        session = state.session
        missing = len(state.tokens) - 1 - session.length
        if missing:
            session.keep(range(missing), range(missing, session.pending))
            for node in frontier:
                state.slots[tree.ids[node]] -= missing

    def _add(
        self,
        state: ModelState,
        tree: TokenTree,
        frontier: Sequence[int],
        offers: Sequence[tuple[list[int], list[float]]],
    ) -> int:
        """Hangs the best children below the frontier: the best K of all are C, the others B."""
        width = self._options.width
        choice = self._choices[state.request.sampling.is_greedy]
        children: list[tuple[float, int, int]] = []  # (path score, node, token)
        for node, (tokens, values) in zip(frontier, offers, strict=True):
            state.offers[tree.ids[node]] = (tokens, values)
            chances = choice.log_chances(values)
            children += [(tree.scores[node] + c, node, t) for c, t in zip(chances[:width], tokens[:width], strict=True)]
        children.sort(key=lambda child: -child[0])
        before = len(tree)
        for place, (score, node, token) in enumerate(children[: self._options.tree_nodes - before]):
            tree.add(node, token, score, Role.PRIMARY if place < width else Role.SECONDARY)
        return len(tree) - before

    def _learn(self, state: ModelState, seen: Observation) -> None:
        """What was proposed below every walked node, and what the target wrote there."""
        choice = self._choices[state.request.sampling.is_greedy]
        for node, written in zip(seen.path, seen.tokens, strict=False):
            if node in state.offers:
                tokens, values = state.offers[node]
                choice.learn(values, tokens.index(written) if written in tokens else None)


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    return tuple(tree.tokens[other] for other in path_to(tree, node)[1:])


def build(options: Options, *, draft: Model | None = None, **_: object) -> ModelDrafter:
    """The drafter for this draft model; UserError without one."""
    if draft is None:
        raise UserError("drafter model needs a draft model, name one with --draft (or draft=...)")
    return ModelDrafter(draft, options)
