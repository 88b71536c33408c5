"""A draft model grows a beam tree: the most likely unexpanded nodes of all requests go through one forward.

CARD's drafter, arXiv:2508.04462; of width 1 it is the chain of Leviathan et al., arXiv:2211.17192.

K frontier nodes a forward; their best children by path score are kept as C, the other scored children as B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.scores import Held
from outpace.core.tree import PREFIX, Role, Siblings, TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Offer, Request, Row, Source
from outpace.drafters._chance import ChoiceModel
from outpace.drafters._drawn import draw_child
from outpace.models.base import Model, Part, chain
from outpace.rules.base import best_rows, rank_rows

_CHUNK = 256  # prompt tokens a forward
_CHOICES = {"greedy": True, "sampled": False}
_SPARE = 4  # proposals scored beyond the fan-out, so that their share of the chance is known
_SCORE = itemgetter(0)


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
    """`slots`: which pending node of the session holds a tree node (by id); `offers`: what was proposed below it;
    `open`: the nodes to be expanded among the first `seen` of the tree, a heap of (-W, node).

    Between calls either committed tokens are missing from the session and nothing is pending, or none is missing (but
    the root, which is a node) and the pending nodes are exactly those of `slots`.
    """

    session: Any = None
    slots: dict[int, int] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)
    open: list[tuple[float, int]] = field(default_factory=list)
    seen: int = 0


class _Job(NamedTuple):
    """One request's share of a forward."""

    state: ModelState
    tree: TokenTree
    frontier: list[int]


class ModelDrafter(Drafter):
    """Keeps a session of the draft model for each request, in step with what the target commits."""

    name = "model"

    def __init__(self, model: Model, options: Options) -> None:
        self._model, self._options = model, options
        self._floor = math.log(options.floor) if options.floor else -math.inf
        self._choices = {True: ChoiceModel(), False: ChoiceModel()}  # by: is the request greedy

    def weight_bytes(self, source: Source) -> int | None:
        """Those of the draft model."""
        return self._model.weight_bytes

    def open(self, request: Request) -> ModelState:
        capacity = min(len(request.prompt) + request.max_tokens + 1, self._model.max_positions)
        room = self._options.tree_nodes + self._options.width + _CHUNK
        return ModelState(request, list(request.prompt), self._model.open(capacity, room))

    def grow(self, states: Sequence[ModelState], trees: Sequence[TokenTree]) -> list[int]:
        """One forward of the draft model over the frontiers of all trees; nodes added to each.

        Another forward for a tree to which nothing was added because another drafter's branch stood there already.
        """
        before = [len(tree) for tree in trees]
        waiting = list(zip(states, trees, strict=True))
        while jobs := [_Job(*one, frontier) for one in waiting if (frontier := self._frontier(*one))]:
            added = self._expand(jobs)
            waiting = [(job.state, job.tree) for job, count in zip(jobs, added, strict=True) if not count]
        return [len(tree) - count for tree, count in zip(trees, before, strict=True)]

    def _expand(self, jobs: Sequence[_Job]) -> list[int]:
        """One forward over the jobs' frontiers; nodes added to each tree."""
        self._catch_up([job.state for job in jobs])
        parts = [self._part(*job) for job in jobs]
        rows = [
            Row(job.state.request, job.state.tokens, _below_root(job.tree, node))
            for job in jobs
            for node in job.frontier
        ]
        held = self._model.score_held(parts)
        offers = self._offers(held, rows)
        added, first = [], 0
        for state, tree, frontier in jobs:
            _settle(state)
            mine = slice(first, first + len(frontier))
            first = mine.stop
            if state.request.rule.siblings is Siblings.DRAWN:
                ranked = rank_rows(held.wide(mine), rows[mine])
                added.append(draw_child(tree, frontier[0], ranked[0], state.request))
            else:
                added.append(self._add(state, tree, frontier, offers[mine]))
        return added

    def _offers(self, held: Held, rows: Sequence[Row]) -> list[Offer]:
        """What is proposed below each row's node; nothing where children are drawn."""
        count = self._options.width + _SPARE
        if all(row.request.rule.siblings is not Siblings.DRAWN for row in rows):
            return best_rows(held, rows, count)
        offers: list[Offer] = [([], []) for _ in rows]
        for n, row in enumerate(rows):
            if row.request.rule.siblings is not Siblings.DRAWN:
                offers[n] = best_rows(held.part(slice(n, n + 1)), [row], count)[0]
        return offers

    def observe(self, state: ModelState, seen: Observation) -> None:
        if state.request.rule.siblings is Siblings.PICKED:
            self._learn(state, seen)
        slots, path = state.slots, []
        for node in seen.path:
            if node not in slots:
                break
            path.append(slots[node])
        live = [node for node in seen.tree.ids if node in slots]
        state.session.keep(path, [slots[node] for node in live])
        state.slots = {node: slot for slot, node in enumerate(live)}
        state.offers = {node: state.offers[node] for node in live if node in state.offers}
        state.tokens += seen.tokens
        state.open, state.seen = [], 0

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
        count = len(tree)
        if count >= self._options.tree_nodes:
            return []
        room = state.session.capacity - len(state.tokens)  # a draft with a shorter context stops there
        ids, scores, roles = tree.ids, tree.scores, tree.roles
        for node in range(state.seen, count):
            is_worthy = scores[node] >= self._floor and ids[node] not in state.slots and roles[node] is not Role.PROBE
            if is_worthy and (count <= room or tree.depth(node) <= room):
                heappush(state.open, (-scores[node], node))
        state.seen = count
        return sorted([heappop(state.open)[1] for _ in range(min(self._options.width, len(state.open)))])

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
        session, slots = state.session, state.slots
        tokens = state.tokens[session.length : -1]
        missing = len(tokens)
        parents = list(range(PREFIX, missing - 1))
        for slot, node in enumerate(frontier, session.pending):  # as `_settle` will number them
            above = slots[tree.ids[tree.parents[node]]] if node else PREFIX
            parents.append(above + missing)
            slots[tree.ids[node]] = slot
            tokens.append(tree.tokens[node])
        return Part(session, self._known(tokens), parents, range(missing, len(tokens)))

    def _known(self, tokens: list[int]) -> list[int]:
        """A target padded further than the draft may write ids that the draft has no embedding for."""
        last = self._model.vocab_size - 1
        return tokens if max(tokens) <= last else [min(token, last) for token in tokens]

    def _add(
        self,
        state: ModelState,
        tree: TokenTree,
        frontier: Sequence[int],
        offers: Sequence[Offer],
    ) -> int:
        """Hangs the best children below the frontier: the best K of all are C, the others B."""
        width = self._options.width
        choice = self._choices[state.request.sampling.is_greedy]
        children: list[tuple[float, int, int]] = []  # (path score, node, token)
        for node, (tokens, values) in zip(frontier, offers, strict=True):
            state.offers[tree.ids[node]] = (tokens, values)
            score = tree.scores[node]
            for token, chance in zip(tokens, choice.log_chances(values, width), strict=False):
                children.append((score + chance, node, token))
        children.sort(key=_SCORE, reverse=True)
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


def _settle(state: ModelState) -> None:
    """Commits the tokens that were missing; the frontier's nodes stay pending."""
    missing = len(state.tokens) - 1 - state.session.length
    if missing:
        state.session.keep(range(missing), range(missing, state.session.pending))


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])


def build(options: Options, *, draft: Model | None = None, **_: object) -> ModelDrafter:
    """The drafter for this draft model; UserError without one."""
    if draft is None:
        raise UserError("drafter model needs a draft model, name one with --draft (or draft=...)")
    return ModelDrafter(draft, options)
