"""What drafters share that run a model over trees: which nodes are expanded next, and one forward for all of them.

A request's session holds what is committed and, pending, the nodes that were expanded. How the children are chosen is
the drafter's own affair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from outpace.core.carried import Growing
from outpace.core.drafting import UNRESTRICTED, DraftDirectives
from outpace.core.logits import SparseLogits, token_scores
from outpace.core.tree import PREFIX, Role, TokenTree
from outpace.core.types import DraftState, Observation, Request, Row
from outpace.models.base import Model, Part, Session, chain
from outpace.rules.base import proposes_best_scores


def outcome_frontier(tree: TokenTree, expanded: Container[int], length: int, count: int) -> list[int]:
    """The nodes that a forward expands, `count` at most: the tips of unfinished chains of `length` tokens, below the
    root and below the likeliest outcomes of that chain's verification. `expanded` are ids; what another drafter planted
    above a tip is expanded with it."""
    chain = _chain(tree, 0, length)
    on_chain = set(chain)
    others = [
        child
        for node in chain
        for child in tree.children(node)
        if child not in on_chain and tree.roles[child] is not Role.PROBE
    ]
    others.sort(key=lambda node: (-tree.scores[node], node))
    tips = [chain[-1]]  # its last token is expanded too: what the target writes after it is an outcome
    for outcome in others[:count]:
        branch = _chain(tree, outcome, length)
        if len(branch) <= length:
            tips.append(branch[-1])
    chosen: dict[int, None] = {}
    for tip in tips:
        above = [node for node in tree.ancestry(tip) if tree.ids[node] not in expanded]
        chosen |= dict.fromkeys(above[::-1]) if tree.ids[tip] not in expanded else {}
    return sorted(list(chosen)[:count])


def _chain(tree: TokenTree, node: int, length: int) -> list[int]:
    """The node, and `length` below it at most, each the likeliest child."""
    chain = [node]
    while len(chain) <= length:
        children = [child for child in tree.children(chain[-1]) if tree.roles[child] is not Role.PROBE]
        if not children:
            break
        chain.append(max(children, key=lambda child: (tree.scores[child], -child)))
    return chain


CHUNK = 256  # prompt tokens a forward
_FULL = 3
_STATE = itemgetter(0)  # of a job
_HAS_COMPANY = attrgetter("has_other_requests")


@dataclass
class ExpansionState(DraftState):
    """`slots`: which pending node of the session holds a tree node (by id); `open`: the nodes to be expanded among the
    first `seen` of the tree, a heap of (-W, node); `start`: where in the text the session's tokens begin.
    Between calls either committed tokens are missing from the session and nothing is pending, or none is missing (but
    the root, which is a node) and the pending nodes are exactly those of `slots`.
    """

    session: Any = None
    slots: dict[int, int] = field(default_factory=dict)
    open: list[tuple[float, int]] = field(default_factory=list)
    seen: int = 0
    start: int = 0
    orders: DraftDirectives = UNRESTRICTED
    proposes_best_scores: bool = field(init=False)  # what is proposed, as a model may tell it

    def __post_init__(self) -> None:
        self.proposes_best_scores = proposes_best_scores(self.request)

    @property
    def missing(self) -> int:
        """Committed tokens before the root that the session lacks."""
        return len(self.tokens) - 1 - self.start - self.session.length

    @property
    def room(self) -> int:
        """How deep below the root nodes may be expanded; below 0 where a model with a shorter context has stopped."""
        return self.session.capacity - len(self.tokens) + self.start


class ExpansionJob(NamedTuple):
    """One request's share of a forward."""

    state: Any  # a GrowState
    tree: TokenTree
    frontier: list[int]


def most_bytes(model: Model, tokens: Sequence[float]) -> int:
    """The most that sessions take in which no more than so many tokens each are held."""
    return model.stored_bytes([int(most * Session.growth) + Session.block for most in tokens])


class TreeExpander:
    """Expands the best nodes of every tree: `width` a forward, none where `tree_nodes` stand, none below `floor`.
    With a `window` a session begins with the text's last `window` tokens, and anew before it holds more than `_FULL`
    times that.
    """

    def __init__(
        self,
        model: Model,
        width: int,
        tree_nodes: int,
        floor: float = 0.0,
        window: int = 0,
        on_base: bool = False,
        proposed: int = 0,
    ) -> None:
        """`floor`: the chance below which the target is not expected to reach a node; `window` 0: the whole text.
        `on_base`: in pending slots of the target's own session, for a drafter that needs it, by a model of the same
        sessions. `proposed`: so many tokens are proposed below a node."""
        self.model, self.window, self._on_base, self._proposed = model, window, on_base, proposed
        self._width, self._tree_nodes = width, tree_nodes
        self._floor = _log(floor)
        self.growing = Growing(width, proposed, tree_nodes, self._floor)  # the same for who grows in its place

    def open(self, request: Request) -> Any:
        """A session of the model for this request; None where the target's is lent for each round."""
        if self._on_base:
            return None
        capacity = min(len(request.prompt) + request.max_tokens + 1, self.model.max_positions)
        return self.model.open(capacity, self._tree_nodes + self._width + CHUNK)

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """The most that sessions for texts of so many tokens each take."""
        if self._on_base:
            return 0
        return most_bytes(self.model, [self._most(length) for length in lengths])

    def pause(self, state: ExpansionState) -> None:
        """Gives back what the session holds: it begins anew when the next nodes are expanded."""
        state.slots, state.open, state.seen = {}, [], 0
        if self._on_base:
            state.session = None
        else:
            state.session.truncate(0)
            state.session.trim()

    def jobs(self, states: Sequence[ExpansionState], trees: Sequence[TokenTree]) -> list[ExpansionJob]:
        """What one forward would expand; trees with nothing to expand have no part in it, nor those of texts of which
        much is to be read while others wait: one chunk of these is read now."""
        for state in states if self._on_base else ():
            state.session = state.base
        reading: Collection[int] = self._read_beside(states) if any(map(_HAS_COMPANY, states)) else ()
        jobs = []
        for number, (state, tree) in enumerate(zip(states, trees, strict=True)):
            if number not in reading and (some := self._frontier(state, tree)):
                jobs.append(ExpansionJob(state, tree, some))
        return jobs

    def score(self, jobs: Sequence[ExpansionJob]) -> SparseLogits:
        """One forward over the jobs' frontiers: scores of their nodes, job after job. Committed tokens that are missing
        travel with them; the frontier's nodes stay pending."""
        self._catch_up([*map(_STATE, jobs)])
        parts = [self._part(*job) for job in jobs]
        held = self.model.score_held(parts)
        for (state, _, frontier), part in zip(jobs, parts, strict=True):
            if missing := len(part.tokens) - len(frontier):
                state.session.keep(range(missing), range(missing, len(part.tokens)))
        return held

    def likelihood(self, state: ExpansionState, tokens: Sequence[int]) -> list[float] | None:
        """log q of tokens that follow the text, at temperature 1, by one forward; None where they have no room. Nothing
        of them stays."""
        session = state.session
        if self._on_base or len(state.tokens) - state.start + len(tokens) > session.capacity:
            return None
        self._catch_up([state])
        missing, pending = state.missing, session.pending
        if len(tokens) > session.free - missing or session.length + missing + pending + len(tokens) > self._most():
            return None
        text = [*state.tokens[state.start + session.length :], *tokens[:-1]]
        parents = [PREFIX, *range(pending, pending + len(text) - 1)]
        part = Part(session, self.known(text), parents, range(missing, len(text)))
        log_q = self.model.score_held([part]).wide().double().log_softmax(-1)  # [tokens, vocab]
        session.keep(range(missing), () if missing else range(pending))
        return token_scores(log_q, tokens)

    def configure(self, state: ExpansionState, orders: DraftDirectives) -> None:
        """From now on it drafts as it is told; which nodes are open is found anew where that depends on it."""
        before, state.orders = state.orders, orders
        if orders.floor != before.floor or orders.outcomes or before.outcomes:
            state.open, state.seen = [], 0

    def follow(self, state: ExpansionState, seen: Observation, more: Sequence[int] = ()) -> None:
        """Commits what the target walked; of the rest only what lives on in its next tree stays, and nothing in the
        target's session: that is the target's. `more`: pending nodes below the next root that are no tree's yet; they
        stay behind the others, or go where the session begins anew."""
        state.tokens += seen.tokens
        state.open, state.seen = [], 0
        if self._on_base:
            state.slots = {}
            return
        slots, path = state.slots, []
        for node in seen.path:
            if node not in slots:
                break
            path.append(slots[node])
        state.slots = {}
        if self._is_full(state, len(path)):
            state.session.truncate(0)
            return
        live: list[int] = []
        for node in seen.tree.ids:
            if node in slots:
                state.slots[node] = len(live)
                live.append(slots[node])
        state.session.keep(path, [*live, *more])

    def _frontier(self, state: ExpansionState, tree: TokenTree, is_anew: bool = False) -> list[int]:
        """The unexpanded nodes worth a place in the next forward, parents first; a parent never scores below its
        child, so a node comes after its parent or together with it."""
        count = len(tree)
        if count >= self._tree_nodes:
            return []
        room = state.room
        width = min(state.orders.width or self._width, self._width)
        if state.orders.outcomes:
            tips = outcome_frontier(tree, state.slots, state.orders.outcomes, width)
            return [node for node in tips if tree.depth(node) <= room]
        floor = self._floor if state.orders.floor is None else _log(state.orders.floor)
        floor = -math.inf if state.request.rule.traits.q_at_leaves else floor  # such a rule wants q after every token
        ids, scores, roles = tree.ids, tree.scores, tree.roles
        for node in range(state.seen, count):
            is_worthy = scores[node] >= floor and ids[node] not in state.slots and roles[node] is not Role.PROBE
            if is_worthy and (count <= room or tree.depth(node) <= room):
                heappush(state.open, (-scores[node], node))
        state.seen = count
        most, best = min(width, len(state.open)), []
        if self._on_base:
            most = min(most, state.session.free)
        for _ in range(most):
            best.append(heappop(state.open)[1])
        if not is_anew and not _stand_together(best, tree, state.slots):  # another drafter has raised scores meanwhile
            state.open, state.seen = [], 0
            return self._frontier(state, tree, is_anew=True)
        if tree.most is not None:
            bound = tree.bound()
            best = [node for node in best if scores[node] >= bound]
        return sorted(best)

    def _read_beside(self, states: Sequence[ExpansionState]) -> set[int]:
        """Reads one chunk of texts that lack more than that and have company; their places."""
        behind = set[int]()
        for place, state in enumerate(states):
            if state.has_other_requests and not self._on_base:
                self.begin(state)
                if state.missing > CHUNK:
                    behind.add(place)
        if behind:
            self._read_chunk([states[place] for place in sorted(behind)])
        return behind

    def _catch_up(self, states: Sequence[ExpansionState]) -> None:
        """Feeds committed tokens that the session lacks, but for the last chunk, which travels with the frontier."""
        behind = []
        for state in states:
            if not state.session.pending:  # else it lacks nothing
                self.begin(state)
                if state.missing > CHUNK:
                    behind.append(state)
        while behind:
            self._read_chunk(behind)
            behind = [state for state in behind if state.missing > CHUNK]

    def _read_chunk(self, states: Sequence[ExpansionState]) -> None:
        """Feeds the next chunk of committed tokens that these sessions lack."""
        starts = [state.start + state.session.length for state in states]
        texts = [self.known(state.tokens[at : at + CHUNK]) for state, at in zip(states, starts, strict=True)]
        self.model.score_held([chain(state.session, text) for state, text in zip(states, texts, strict=True)])
        for state in states:
            state.session.keep(range(CHUNK))

    def begin(self, state: ExpansionState) -> None:
        """A session that holds nothing, or whose text has gone on too far, begins with the text's window."""
        if self._is_full(state, state.missing):
            state.session.truncate(0)
        if self.window and not state.session.length and not state.session.pending:
            state.start = max(0, len(state.tokens) - 1 - self.window)

    def _is_full(self, state: ExpansionState, more: int) -> bool:
        """Whether so many tokens more are too many for a session with a window."""
        return self.window > 0 and state.session.length + more > _FULL * self.window

    def _most(self, length: float = math.inf) -> float:
        """Slots that a text of so many tokens needs at most: a tree's nodes come behind what is read of it."""
        return min(length, _FULL * self.window or math.inf) + self._tree_nodes

    def _part(self, state: ExpansionState, tree: TokenTree, frontier: Sequence[int]) -> Part:
        """The tokens still missing, then the frontier. Where tokens are missing, nothing is pending yet."""
        session, slots = state.session, state.slots
        tokens = state.tokens[state.start + session.length : -1]
        missing = len(tokens)
        parents = list(range(PREFIX, missing - 1))
        for slot, node in enumerate(frontier, session.pending):  # as `_settle` will number them
            above = slots[tree.ids[tree.parents[node]]] if node else PREFIX
            parents.append(above + missing)
            slots[tree.ids[node]] = slot
            tokens.append(tree.tokens[node])
        best = self._proposed if state.proposes_best_scores else 0
        return Part(session, self.known(tokens), parents, range(missing, len(tokens)), best=best)

    def known(self, tokens: list[int]) -> list[int]:
        """A target padded further than the draft may write ids that the draft has no embedding for."""
        last = self.model.vocab_size - 1
        return tokens if max(tokens) <= last else [min(token, last) for token in tokens]


def _stand_together(nodes: Sequence[int], tree: TokenTree, known: Mapping[int, int]) -> bool:
    """Whether each node's parent is among them, or among those whose ids are known."""
    for node in nodes:
        if node and (parent := tree.parents[node]) not in nodes and tree.ids[parent] not in known:
            return False
    return True


def _log(chance: float) -> float:
    return math.log(chance) if chance else -math.inf


def rows_of(jobs: Sequence[ExpansionJob]) -> list[Row]:
    """Whose the scores of the jobs' nodes are."""
    rows = []
    for state, tree, frontier in jobs:
        for node in frontier:
            rows.append(Row(state.request, state.tokens, _below_root(tree, node)))
    return rows


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])
