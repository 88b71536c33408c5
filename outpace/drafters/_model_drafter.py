"""Drafters that run a model: their base, the children that they add, and the calibration of what the target picks.

Children are added below the nodes that a forward scored: a level of a tree, or all of its levels. They are the
likeliest tokens, or drawn from q, for the rules that judge by the ratio p / q; q is stored with drawn ones. Models that
predict several places of the text at once give the logits of all levels in one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush, nlargest
from typing import Any

import numpy as np
import outpace_kernels as kernels

from outpace.core.adjust import adjust_logits
from outpace.core.distribution import UNFILTERED, DecisionKey, TokenDistribution, distribution_of
from outpace.core.errors import UserError, check_whole
from outpace.core.logits import SparseLogits, host_array, select_rows
from outpace.core.noise import DRAW
from outpace.core.options import MethodOptions, number, parsed, whole
from outpace.core.stats import MIN_RATE, RESTORED_WEIGHT
from outpace.core.tree import DrawnChildren, Siblings, TokenTree
from outpace.core.types import Drafter, Observation, Request, Row, TopK
from outpace.drafters._tree_expander import SPARE, ExpansionJob, ExpansionState, TreeExpander, as_top_k_rows, rows_of
from outpace.models.base import Model
from outpace.rules.base import top_k_rows

_MIN_OPEN = 0.05  # smallest restored rate of open probability; its logarithm is needed
_OPEN_WEIGHT = 2.0


class PickModel(kernels.PickModel):
    """P(the target picks the i-th best proposal) = coverage * softmax(values / temperature)_i, with fitted parameters.

    A drafter's own q is only a substitute for it, and under shared noise not even that: the target picks by log p + g,
    so the estimate is a softmax of log q + g at a temperature that expresses how much p and q differ.

    Coverage is the probability that it picks any of the proposals: a constant; or, if the values are shares (log q),
    one minus a fitted multiple of the probability that they leave to other tokens. `learn` and `log_chances` are native
    (`kernels/src/tree.h`); they take the values of all proposals, best first: log q, or log q + g.
    """

    def state_dict(self) -> dict[str, Any]:
        temperature, coverage, open_rate = self.fit
        return {"coverage": coverage, "temperature": temperature} | ({} if open_rate is None else {"open": open_rate})

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        coverage = min(max(float(kept["coverage"]), MIN_RATE), 1.0)
        open_rate = min(max(float(kept.get("open", 1.0)), _MIN_OPEN), 1 / _MIN_OPEN)
        self.restore(float(kept["temperature"]), coverage, open_rate, RESTORED_WEIGHT, _OPEN_WEIGHT)


class PickModels:
    """The PickModel of greedy requests and that of sampled ones."""

    def __init__(self) -> None:
        self._models = {"greedy": PickModel(has_shares=True), "sampled": PickModel()}

    def for_request(self, request: Request) -> PickModel:
        return self._models["greedy" if request.sampling.is_greedy else "sampled"]

    def learn(self, request: Request, offers: Mapping[int, TopK], seen: Observation) -> None:
        """Learn from the proposals below each accepted node (by id) and the tokens that the target wrote there."""
        for node, written in zip(seen.node_ids, seen.tokens, strict=False):
            if offer := offers.get(node):
                tokens, values = offer
                self.for_request(request).learn(values, tokens.index(written) if written in tokens else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted parameters of both, for the profile."""
        return {name: model.state_dict() for name, model in self._models.items()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        for name, model in self._models.items():
            model.load_state_dict(kept[name])


PRODUCT_OF_Q = PickModel(has_shares=True)  # its parameters leave log q unchanged; it never learns
PRODUCT_OF_Q.restore(1.0, 1.0, 1.0, 1.0, 1.0)
_CHILDREN = 2  # children per expanded node that a forward may always add

LogConfidence = Callable[[ExpansionJob, int], float | None]
"""Returns the logarithm of the estimated probability that a child of a job's node is accepted; None: no estimate."""


@dataclass(frozen=True)
class DrawCounts:
    """Numbers of children drawn below a node, by its depth; the last number applies to all deeper nodes. Rules that
    take chains draw one."""

    by_depth: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> DrawCounts:
        """Parse whole numbers separated by commas; UserError for anything else."""
        parts = str(text).split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"draws is {text!r}, it must be whole numbers with commas between them, as in 2,1")
        for part in parts:
            check_whole("draws", int(part), 1, 64)
        return cls(tuple(map(int, parts)))

    def below(self, tree: TokenTree, node: int, request: Request) -> int:
        """Return the number of children of one node. A token that was drawn k times gets k times as many."""
        if not request.rule.traits.several_draws:
            return 1
        parent = tree.parents[node]
        times = tree.drawn[parent].tokens.count(tree.tokens[node]) if node else 1
        return times * self.by_depth[min(tree.depth(node), len(self.by_depth) - 1)]


def is_drawn(request: Request) -> bool:
    """Whether the request's rule judges drawn children."""
    return request.rule.traits.siblings is not Siblings.PICKED


def draw_level(
    tree: TokenTree, frontier: Sequence[int], scores: SparseLogits, rows: Sequence[Row], draws: DrawCounts
) -> None:
    """Draw children of these nodes of one request from the draft's logits [nodes, kept tokens]."""
    request = rows[0].request
    for index, (node, row) in enumerate(zip(frontier, rows, strict=True)):
        q, raw = proposed(scores.part(slice(index, index + 1)), row)
        draw_children(tree, node, q, request, draws.below(tree, node, request), raw)


def proposed(scores: SparseLogits, row: Row) -> tuple[TokenDistribution, Callable[[], TokenDistribution] | None]:
    """Return q of one row of draft logits [1, kept tokens] and, for rules that need it, a function that returns the
    unscaled q."""
    own, ids = _adjusted(scores, row)[0], scores.ids
    q = distribution_of(own, row.request.sampling, ids)
    return q, cache(partial(distribution_of, own, UNFILTERED, ids)) if row.request.rule.traits.unscaled_q else None


def _adjusted(scores: SparseLogits, row: Row) -> np.ndarray:
    """Return the row on the host, in memory that no later step overwrites, with penalties and constraints applied. [1,
    kept tokens]"""
    if row.request.adjustments is None and row.request.constraint is None:
        own = host_array(scores.values)
        return own if isinstance(scores.values, np.ndarray) else own.copy()  # a captured pass reuses its output tensor
    try:
        wide = adjust_logits(scores.to_dense(), [row])
    except UserError:  # a failed constraint ends its request in the target pass
        wide = adjust_logits(scores.to_dense(), [row._replace(skips_mask=True)])
    return host_array(wide if scores.ids is None else wide[:, scores.ids])


def draw_children(
    tree: TokenTree,
    node: int,
    q: TokenDistribution,
    request: Request,
    count: int = 1,
    raw: Callable[[], TokenDistribution] | None = None,
) -> None:
    """Draw `count` children of `node` from q, or fewer if q has no more tokens to draw without replacement. A node's
    children are drawn once."""
    if not q.total > 0:  # the constraint allows none of the draft's tokens
        return
    kind = request.rule.traits.siblings
    key = DecisionKey(request.seed, request.choice, tree.ids[node], DRAW)
    tokens: list[int] = []
    left = q
    while len(tokens) < count:
        tokens.append(request.rule.random_source.draw(key.again(len(tokens)), left))
        if kind == Siblings.WITHOUT_REPLACEMENT and len(tokens) < count:
            left = left.without(tokens[-1])
            if not left.total > 0:
                break
    tree.draw(node, DrawnChildren(q, tuple(tokens), raw), kind)
    q.forget()


@dataclass
class OfferState(ExpansionState):
    """A request's state. `offers`: the proposals below a tree node, by node id. `pick_model`: the fitted `PickModel` of
    requests with the same kind of sampling."""

    offers: kernels.OfferMap = field(default_factory=kernels.OfferMap)
    pick_model: PickModel = field(default_factory=PickModel)
    is_drawn: bool = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_drawn = is_drawn(self.request)


@dataclass(frozen=True)
class ChildOptions(MethodOptions):
    """Options of drafters that add children below the nodes of one forward."""

    width: int = whole(2, 1, 512, help="nodes that a forward expands in each tree, and children of each")
    tree_nodes: int = whole(256, 2, 1 << 20, help="maximum size of the tree")
    draws: str = parsed(
        "2,1",
        DrawCounts.read,
        "children drawn below a node of depth 0, 1, ..., for rules that judge several drawn children",
    )


@dataclass(frozen=True)
class HeadOptions(ChildOptions):
    """Options of drafters that run a trained head."""

    head_window: int = whole(
        0, 0, 1 << 30, help="number of trailing tokens that the head sees; 0: as the file says, usually all"
    )


class ChildAdder:
    """Adds children below the nodes of a tree, the best of all, and learns from what the target wrote."""

    def __init__(self, width: int, tree_nodes: int, draws: str, fills_tree: bool = False) -> None:
        """`fills_tree`: add as many children as the directives allow; otherwise about `width` for each level."""
        self._width, self._tree_nodes, self._fills_tree = width, tree_nodes, fills_tree
        self.draws, self.pick_models = DrawCounts.read(draws), PickModels()

    def learn(self, state: OfferState, seen: Observation) -> None:
        """Learn from the tokens that the target wrote below the proposals."""
        if not state.is_drawn:
            state.pick_model.learn_written(state.offers, seen.node_ids, seen.tokens)

    def add(self, jobs: Sequence[ExpansionJob], held: SparseLogits) -> None:
        """Add children below the jobs' frontiers from the logits of their nodes, job after job."""
        if not any(job.state.is_drawn for job in jobs):
            self.attach(jobs, top_k_rows(held, rows_of(jobs), self._width + SPARE))
            return
        first = 0
        for job in jobs:
            mine = slice(first, first + len(job.frontier))
            first = mine.stop
            offers = self._propose(job, held.part(mine))
            if offers is not None:
                self.attach([job], offers)

    def add_levels(
        self,
        jobs: Sequence[ExpansionJob],
        depths: int,
        logits_of: Callable[[int, int, Sequence[int]], SparseLogits],
        log_confidence: LogConfidence | None = None,
    ) -> None:
        """Add up to `depths` levels to each tree. `logits_of` returns the logits below nodes of the same depth, given
        the number of the job, the depth, and the nodes."""
        for depth in range(depths):
            picked, offers = [], list[TopK]()
            for index, job in enumerate(jobs):
                if frontier := self._frontier(job, depth):
                    level = job._replace(frontier=frontier)
                    found = self._propose(level, logits_of(index, depth, frontier), log_confidence)
                    picked += [level] if found is not None else []
                    offers += found or []
            if picked:
                self.attach(picked, offers)

    def add_best_first(
        self,
        jobs: Sequence[ExpansionJob],
        depths: int,
        logits_of: Callable[[int, int, Sequence[int]], SparseLogits],
        log_confidence: LogConfidence | None = None,
    ) -> None:
        """Add as many children as `add_levels` may, always below the best node of a tree; drawn ones in levels."""
        for index, job in enumerate(jobs):
            if job.state.is_drawn:
                self.add_levels([job], depths, lambda _, *rows, index=index: logits_of(index, *rows), log_confidence)
                continue
            tree, directives = job.tree, job.state.directives
            max_depth = min(depths, directives.depth or tree.max_depth, tree.max_depth)
            best, left = [(0.0, 0)], max_depth * min(directives.width or self._width, self._width)
            while best and left and len(tree) < self._tree_nodes:
                _, node = heappop(best)
                if (depth := tree.depth(node)) < max_depth:
                    one, known, left = job._replace(frontier=[node]), len(tree), left - 1
                    self.attach([one], self._propose(one, logits_of(index, depth, [node]), log_confidence) or ())
                    for child in range(known, len(tree)):
                        heappush(best, (-tree.scores[child], child))

    def add_block(self, jobs: Sequence[ExpansionJob], held: SparseLogits, block: int) -> None:
        """Add up to `block` levels from as many rows of logits of each job, which do not depend on the nodes."""

        def logits_of(number: int, depth: int, nodes: Sequence[int]) -> SparseLogits:
            return held._replace(values=select_rows(held.values, [number * block + depth] * len(nodes)), best=())

        self.add_levels(jobs, block, logits_of)

    def attach(self, jobs: Sequence[ExpansionJob], offers: Sequence[TopK]) -> None:
        """Add the best children below each frontier: the best `width` of them all are primary (CARD's cache C), the
        others secondary (B). The best child of each node is added whatever its probability, so that the node does not
        look unexpanded."""
        widths, max_children, picks = [], [], []
        for state, tree, _ in jobs:
            directives, num_free = state.directives, self._tree_nodes - len(tree)
            width = min(directives.width or self._width, self._width)
            share = directives.share if self._fills_tree else 0.0
            widths.append(width)
            max_children.append(min(num_free, max(_CHILDREN * width, int(num_free * share))))
            picks.append(PRODUCT_OF_Q if directives.in_levels else state.pick_model)
        states, trees, frontiers = zip(*jobs, strict=True)
        maps = [state.offers for state in states]
        kernels.attach_offers(trees, frontiers, as_top_k_rows(offers), maps, picks, widths, max_children)

    def _propose(
        self, job: ExpansionJob, logits: SparseLogits, log_confidence: LogConfidence | None = None
    ) -> Sequence[TopK] | None:
        """Return the proposals below each node of a frontier; None after drawing children."""
        rows = rows_of([job])
        if job.state.is_drawn:
            draw_level(job.tree, job.frontier, logits, rows, self.draws)
            return None
        offers: Sequence[TopK] = top_k_rows(logits, rows, self._width + SPARE)
        if log_confidence is None or not job.state.request.sampling.is_greedy:
            return offers
        shifts = [log_confidence(job, node) or 0.0 for node in job.frontier]
        return [(ids, [value + shift for value in values]) for (ids, values), shift in zip(offers, shifts, strict=True)]

    def _frontier(self, job: ExpansionJob, depth: int) -> list[int]:
        """Return the nodes of this depth with the best path scores; none if the tree is full or deep enough."""
        tree, directives = job.tree, job.state.directives
        if len(tree) >= self._tree_nodes or depth >= min(directives.depth or tree.max_depth, tree.max_depth):
            return []
        level = [node for node, below in enumerate(tree.depths) if below == depth]
        width = min(directives.width or self._width, self._width)
        return sorted(nlargest(width, level, key=lambda node: (tree.scores[node], -node)))


@dataclass(frozen=True)
class ModelOptions(ChildOptions):
    """Options of drafters that run a draft model step by step."""

    width: int = whole(4, 1, 512, help="nodes that a forward expands in each tree, and children of each")
    floor: float = number(0.005, 0.0, 1.0, help="lowest estimated probability of a node that is expanded")
    draft_window: int | None = whole(
        None, 0, help="trailing tokens that a draft model reads at first; 0: all; the default is in its config.json"
    )


class BaseModelDrafter(Drafter):
    """Keeps a session of the draft model for each request, in step with what the target commits. A subclass sets
    `capabilities`."""

    expander_type = TreeExpander
    state_type = OfferState

    def __init__(self, model: Model, options: ModelOptions) -> None:
        window = model.draft_window if options.draft_window is None else options.draft_window
        count = options.width + SPARE
        self._expander = self.expander_type(
            model, options.width, options.tree_nodes, options.floor, window, proposed=count
        )
        self._children = ChildAdder(options.width, options.tree_nodes, options.draws, fills_tree=True)
        self.capabilities = self._expander.capabilities(self.capabilities, self._children.pick_models)

    def open(self, request: Request) -> OfferState:
        session, pick_model = self._expander.open(request), self._children.pick_models.for_request(request)
        return self.state_type(request, session=session, pick_model=pick_model)

    def grow(self, states: Sequence[OfferState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the draft model over the frontiers of all trees, and another one where another drafter's
        branch had all its nodes already."""
        if jobs := self._expander.jobs(states, trees):
            self._expand(jobs)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward over the frontiers and add the children that it proposes."""
        held = self._expander.score(jobs)
        offers = as_top_k_rows(held.best)
        if offers.is_complete:  # the model found every row's best tokens itself
            self._children.attach(jobs, offers)
        else:
            self._children.add(jobs, held)

    def observe(self, state: OfferState, seen: Observation) -> None:
        self._children.learn(state, seen)
        self._expander.follow(state, seen)
        state.offers.keep(state.slots)

    def likelihood(self, state: OfferState, tokens: Sequence[int]) -> list[float] | None:
        """Return log q of these tokens as a continuation of the text, by one forward; see `TreeExpander.likelihood`."""
        return self._expander.likelihood(state, tokens)

    def pause(self, state: OfferState) -> None:
        self._expander.pause(state)
