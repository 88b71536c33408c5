"""Expand token trees with a model: choose the nodes to expand next, and score them all in one forward.

A request's session holds its committed tokens and, as pending nodes, the tree nodes that were expanded. Each drafter
decides for itself which children the scores become.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, NamedTuple

import numpy as np
from outpace_kernels import SlotMap, TopKRows, choose_frontiers

from outpace.core.logits import SparseLogits, host_array, log_softmax, token_scores
from outpace.core.tree import PREFIX, UNLIMITED, Role, TokenTree
from outpace.core.types import Capabilities, DraftState, Observation, Request, Row, SavedState, TopK
from outpace.models.base import Model, Part, Session, chain, check_decoder_only
from outpace.rules.base import picks_best_scores


def outcome_frontier(tree: TokenTree, expanded: Container[int], length: int, count: int) -> list[int]:
    """Return at most `count` nodes to expand for the likely outcomes of the running verification.

    Speculative speculative decoding, arXiv:2603.03251: while the target verifies a chain of `length` tokens, a chain of
    that length is drafted below each likely outcome. The paper spreads the outcomes by a geometric series, assuming a
    constant acceptance rate; here those with the best path scores are taken. `expanded` holds ids of nodes expanded
    already; ancestors that another drafter added above a chosen node are expanded with it.
    """
    chain = _chain(tree, 0, length)
    on_chain = set(chain)
    others = [
        child
        for node in chain
        for child in tree.children(node)
        if child not in on_chain and tree.roles[child] != Role.PROBE and tree.depth(child) < tree.max_depth
    ]
    others.sort(key=lambda node: (-tree.scores[node], node))
    tips = [chain[-1]]  # including the last token: the bonus token after it is an outcome too
    for outcome in others[:count]:
        branch = _chain(tree, outcome, length)
        if len(branch) <= length:
            tips.append(branch[-1])
    chosen: dict[int, None] = {}
    for tip in [tip for tip in tips if tree.depth(tip) < tree.max_depth]:
        above = [node for node in tree.path(tip) if tree.ids[node] not in expanded]
        chosen |= dict.fromkeys(above) if tree.ids[tip] not in expanded else {}
    return sorted(list(chosen)[:count])


def level_frontier(tree: TokenTree, expanded: Container[int], count: int) -> list[int]:
    """Return the `count` best nodes just below the deepest expanded ones: the level that CARD, as published, expands
    next. They are primary, unless a correction has left no primary node there: then the level is made of secondary
    ones."""
    ids, depths, scores, roles = tree.ids, [*tree.depths], [*tree.scores], [*tree.roles]
    below = 1 + max((depth for depth, node_id in zip(depths, ids, strict=True) if node_id in expanded), default=-1)
    above = tree.parents
    level = [node for node, depth in enumerate(depths) if depth == below and (not node or ids[above[node]] in expanded)]
    level = [node for node in level if roles[node] == Role.PRIMARY] or level
    return sorted(nlargest(count, level, key=lambda node: (scores[node], -node)))


def _chain(tree: TokenTree, node: int, length: int) -> list[int]:
    """Return the node and at most `length` descendants, following the likeliest child."""
    chain = [node]
    while len(chain) <= length:
        children = [child for child in tree.children(chain[-1]) if tree.roles[child] != Role.PROBE]
        if not children:
            break
        chain.append(max(children, key=lambda child: (tree.scores[child], -child)))
    return chain


CHUNK = 256  # prompt tokens per forward
SPARE = 4  # extra proposals that are scored, so that their share of the probability is known
_MAX_WINDOWS = 3  # a session may grow to this many times the window


@dataclass
class ExpansionState(DraftState):
    """A request's state: its session, and which tree nodes were expanded.

    `slots`: the pending node of the session that holds an expanded tree node, by node id; it also keeps the nodes that
    may be expanded next.
    `start`: position in the text where the session begins.

    Between calls, either committed tokens are missing from the session and nothing is pending; or nothing but the root
    is missing, and the pending nodes are exactly those of `slots`.
    """

    session: Any = None
    slots: SlotMap = field(default_factory=SlotMap)
    start: int = 0
    ranked_by_model: bool = field(init=False)  # proposals are the highest scores, so the model can rank them itself
    needs_q: bool = field(init=False)  # the rule needs q after every token

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranked_by_model = picks_best_scores(self.request)
        self.needs_q = self.request.rule.traits.q_at_leaves

    @property
    def unread(self) -> int:
        """Number of committed tokens that the session lacks, at least 0."""
        return 0 if self.session is None else max(self.missing, 0)

    @property
    def missing(self) -> int:
        """Number of committed tokens before the root that the session lacks."""
        return len(self.tokens) - 1 - self.start - self.session.length

    @property
    def depth_left(self) -> int:
        """Number of tokens after the root that the session can hold; negative if the text exceeds the draft model's
        context."""
        return self.session.capacity - len(self.tokens) + self.start

    def deepest(self, tree: TokenTree) -> int:
        """Return the greatest depth at which nodes may be expanded; negative if none may."""
        return min(self.depth_left, tree.max_depth - 1)


class ExpansionJob(NamedTuple):
    """One request's share of a forward."""

    state: Any  # an ExpansionState
    tree: TokenTree
    frontier: list[int]


def max_session_bytes(model: Model, tokens: Sequence[float]) -> int:
    """Return an upper bound of the memory of sessions that hold at most this many tokens each."""
    return model.stored_bytes([int(count * Session.growth) + Session.block for count in tokens])


class TreeExpander:
    """Expands the best nodes of every tree, at most `width` per tree and forward.

    A tree is not expanded beyond `tree_nodes` nodes, nor below nodes with a path probability under `floor`. Which
    nodes are expanded depends on path scores only, not on roles. With a `window`, a session starts at the last `window`
    tokens of the text, and starts again before it exceeds `_MAX_WINDOWS` times that.
    """

    def __init__(
        self,
        model: Model,
        width: int,
        tree_nodes: int,
        floor: float = 0.0,
        window: int = 0,
        uses_target_session: bool = False,
        proposed: int = 0,
    ) -> None:
        """`window` 0: the draft reads the whole text. `uses_target_session`: expand in pending nodes of the target's
        own session, with a model that shares its sessions. `proposed`: number of tokens proposed below each node, if
        the model can rank them itself."""
        if window:
            check_decoder_only(model, "the draft model", "draft_window")
        self.model, self.window, self._uses_target_session, self._proposed = (
            model,
            window,
            uses_target_session,
            proposed,
        )
        self._width, self._tree_nodes, self._chunk = width, tree_nodes, min(model.chunk or CHUNK, CHUNK)
        self._floor = _log(floor)

    def capabilities(self, declared: Capabilities, learnt: SavedState, **others: Any) -> Capabilities:
        """Return the capabilities of a drafter with this expander: those of its class (`declared`) with the values that
        depend on the model, and with `others`."""
        source = declared.sources[0]._replace(
            width=self._width, weight_bytes=self.model.weight_bytes, reads=self.window or None
        )
        return replace(
            declared, sources=(source,), models=(self.model,), memory=self.stored_bytes, learnt=learnt, **others
        )

    def open(self, request: Request) -> Any:
        """Open a session of the model for this request; None if the target's session is borrowed in each round."""
        if self._uses_target_session:
            return None
        num_read = len(request.prompt)
        capacity = min(num_read + request.max_tokens + 1, self.model.max_length(num_read))
        session = self.model.open(capacity, self._tree_nodes + self._width + CHUNK)
        session.source_length = self.model.source_length(num_read)
        return session

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """Return the most that sessions for texts of these lengths take."""
        if self._uses_target_session:
            return 0
        return max_session_bytes(self.model, [self._max_slots(length) for length in lengths])

    def pause(self, state: ExpansionState) -> None:
        """Release the session's memory; it is read again when the next nodes are expanded."""
        state.slots.clear()
        if self._uses_target_session:
            state.session = None
        else:
            state.session.truncate(0)
            state.session.trim()

    def jobs(self, states: Sequence[ExpansionState], trees: Sequence[TokenTree]) -> list[ExpansionJob]:
        """Choose what one forward expands, without the trees that have nothing to expand. A request that has much text
        left to read while others wait gets one chunk read now, and no job."""
        for state in states if self._uses_target_session else ():
            state.session = state.target_session
        reading, most = self._read_long_texts(states), self._tree_nodes
        pairs = zip(states, trees, strict=True)
        open_trees = [pair for number, pair in enumerate(pairs) if number not in reading and len(pair[1]) < most]
        frontiers = zip(open_trees, self._frontiers(open_trees), strict=True)
        return [ExpansionJob(state, tree, nodes) for (state, tree), nodes in frontiers if nodes]

    def score(self, jobs: Sequence[ExpansionJob]) -> SparseLogits:
        """Run one forward over all frontiers and return the logits of their nodes, job after job. Missing committed
        tokens are read in the same forward; the frontier's nodes stay pending."""
        states = [job.state for job in jobs]
        self._catch_up(states)
        parts = [self._part(*job) for job in jobs]
        held = self._score(states, parts)
        for (state, _, frontier), part in zip(jobs, parts, strict=True):
            if missing := len(part.tokens) - len(frontier):
                state.session.keep(range(missing), range(missing, len(part.tokens)))
        return held

    def likelihood(self, state: ExpansionState, tokens: Sequence[int]) -> list[float] | None:
        """Return log q of these tokens as the continuation of the text, at temperature 1, by one forward that leaves
        nothing in the session; None if the session has no free slot, or lacks more text than may be read while others
        wait."""
        session = state.session
        if self._uses_target_session or len(state.tokens) - state.start + len(tokens) > session.capacity:
            return None
        if self._read_long_texts([state]):
            return None
        self._catch_up([state])
        missing, pending = state.missing, session.pending
        if len(tokens) > session.free - missing or session.length + missing + pending + len(tokens) > self._max_slots():
            return None
        text = [*state.tokens[state.start + session.length :], *tokens[:-1]]
        parents = [PREFIX, *range(pending, pending + len(text) - 1)]
        part = Part(session, self.clamp_ids(text), parents, range(missing, len(text)))
        log_q = log_softmax(host_array(self._score([state], [part]).to_dense()).astype(np.float64))  # [tokens, vocab]
        session.keep(range(missing), () if missing else range(pending))
        return token_scores(log_q, tokens)

    def follow(self, state: ExpansionState, seen: Observation) -> None:
        """Commit the tokens that the target accepted, and keep what lives on in its new tree; drop everything pending
        in a borrowed session."""
        state.tokens += seen.tokens
        if self._uses_target_session:
            state.slots.clear()
            return
        path, live = state.slots.follow(seen.node_ids, seen.tree)
        if self._is_full(state, len(path)):
            state.slots.clear()
            state.session.truncate(0)
            return
        state.session.keep(path, live)

    def _frontiers(self, open_trees: Sequence[tuple[ExpansionState, TokenTree]]) -> list[list[int]]:
        """Choose the unexpanded nodes of each tree for the next forward, parents first. A parent's score is at least
        its child's, so a node is chosen after or together with its parent."""
        counts, floors, special = [], [], []
        for number, (state, tree) in enumerate(open_trees):
            directives = state.directives
            width = min(tree.width or directives.width or self._width, self._width)
            floor = self._floor if directives.floor is None else _log(directives.floor)
            counts.append(min(width, state.session.free) if self._uses_target_session else width)
            floors.append(-math.inf if state.needs_q else floor)
            if directives.outcomes or directives.in_levels:
                special.append(number)
        slots, trees = [state.slots for state, _ in open_trees], [tree for _, tree in open_trees]
        max_depths = [state.deepest(tree) for state, tree in open_trees]
        found: list[list[int]] = choose_frontiers(slots, trees, counts, floors, max_depths)
        for number in special:
            (state, tree), count = open_trees[number], counts[number]
            state.slots.reset()
            if state.directives.outcomes:
                nodes = outcome_frontier(tree, state.slots, state.directives.outcomes, count)
            else:
                nodes = level_frontier(tree, state.slots, count)
            found[number] = [node for node in nodes if tree.depth(node) <= max_depths[number]]
        return found

    def _read_long_texts(self, states: Sequence[ExpansionState]) -> set[int]:
        """While others wait, read a part of each text that lacks more than may be read in this growth, those that will
        be read soonest first; return the places of these requests. Texts beyond the model's context are not read."""
        behind = [state for state in states if state.max_read < UNLIMITED and not state.session.pending]
        if self._uses_target_session or not behind:
            return set()
        for state in behind:
            self.begin(state)
        missing = [state.missing for state in behind]
        if max(missing) <= self._chunk and sum(missing) <= min([state.max_read for state in behind]):
            return set()
        lagging, read = dict[int, int](), 0  # tokens to read by place, and of all texts
        for place in sorted(range(len(states)), key=lambda place: states[place].missing):
            state = states[place]
            num_readable = max(min(state.max_read - read, self._chunk), 0)
            if state.depth_left >= 0:
                if state.missing > num_readable:
                    lagging[place] = num_readable
                read += min(state.missing, num_readable)
        self._read([(states[place], count) for place, count in lagging.items() if count])
        return set(lagging)

    def _catch_up(self, states: Sequence[ExpansionState]) -> None:
        """Read the committed tokens that sessions lack, except the last chunk, which is read with the frontier."""
        lagging = []
        for state in states:
            if not state.session.pending:  # otherwise nothing is missing
                self.begin(state)
                if state.missing > self._chunk:
                    lagging.append(state)
        while lagging:
            self._read([(state, self._chunk) for state in lagging])
            lagging = [state for state in lagging if state.missing > self._chunk]

    def _read(self, counts: Sequence[tuple[ExpansionState, int]]) -> None:
        """Read committed tokens that the model has not read yet: for each state, the next `count` of them."""
        parts = []
        for state, count in counts:
            first = state.start + state.session.length
            parts.append(chain(state.session, self.clamp_ids(state.tokens[first : first + count])))
        if parts:
            self._score([state for state, _ in counts], parts)
        for state, count in counts:
            state.session.keep(range(count))

    def _score(self, states: Sequence[ExpansionState], parts: Sequence[Part]) -> SparseLogits:
        """Run one forward over a part of each state's session."""
        return self.model.score_sparse(parts)

    def begin(self, state: ExpansionState) -> None:
        """Move the start of an empty session, or of one whose window is full, to the text's last `window` tokens."""
        if self._is_full(state, state.missing):
            state.session.truncate(0)
        if self.window and not state.session.length and not state.session.pending:
            state.start = max(0, len(state.tokens) - 1 - self.window)

    def _is_full(self, state: ExpansionState, extra: int) -> bool:
        """Whether a windowed session cannot take this many more tokens."""
        return self.window > 0 and state.session.length + extra > _MAX_WINDOWS * self.window

    def _max_slots(self, length: float = math.inf) -> float:
        """Return the most slots that a text of this length needs, tree included."""
        return min(length, _MAX_WINDOWS * self.window or math.inf) + self._tree_nodes

    def _part(self, state: ExpansionState, tree: TokenTree, frontier: Sequence[int]) -> Part:
        """Return the missing committed tokens followed by the frontier. If tokens are missing, nothing is pending."""
        session, best = state.session, self._proposed if state.ranked_by_model else 0
        text = state.tokens[state.start + session.length : -1]
        tokens, parents = state.slots.expand(tree, frontier, session.pending, missing := len(text))
        if text:
            tokens, parents = [*text, *tokens], [*range(PREFIX, missing - 1), *parents]
        return Part(session, self.clamp_ids(tokens), parents, range(missing, len(tokens)), best=best)

    def clamp_ids(self, tokens: list[int]) -> list[int]:
        """Clamp ids that the draft has no embedding for: a target's vocabulary may be padded further than its
        draft's."""
        last = self.model.vocab_size - 1
        return tokens if max(tokens) <= last else [min(token, last) for token in tokens]


def _log(chance: float) -> float:
    return math.log(chance) if chance else -math.inf


def rows_of(jobs: Sequence[ExpansionJob]) -> list[Row]:
    """Return the rows that a rule needs to rank the logits of the jobs' nodes."""
    rows = []
    for state, tree, frontier in jobs:
        for node in frontier:
            rows.append(Row(state.request, state.tokens, tokens_below_root(tree, node)))
    return rows


def as_top_k_rows(rows: Sequence[TopK]) -> TopKRows:
    """Return the best tokens of rows in the kernels' type."""
    return rows if isinstance(rows, TopKRows) else TopKRows(rows)


def tokens_below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Return the tokens from below the root down to a node."""
    return tuple(tree.path_tokens(node))
