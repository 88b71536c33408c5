"""Add children below the nodes that a forward scored: a layer of a tree, or all of its layers.

Models that predict several places of the text at once give the logits of all layers in one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from outpace_kernels import OfferMap, TopKRows, attach_offers

from outpace.core.logits import SparseLogits, select_rows
from outpace.core.options import MethodOptions, parsed, whole
from outpace.core.types import Observation, TopK
from outpace.drafters._calibration import PickModels
from outpace.drafters._sampled import DrawCounts, draw_layer, is_drawn
from outpace.drafters._tree_expander import SPARE, ExpansionJob, ExpansionState, rows_of
from outpace.rules.base import top_k_rows

LogConfidence = Callable[[ExpansionJob, int], float | None]
"""Returns the logarithm of the estimated probability that a child of a job's node is accepted; None: no estimate."""


@dataclass
class OfferState(ExpansionState):
    """A request's state. `offers`: the proposals below a tree node, by node id."""

    offers: OfferMap = field(default_factory=OfferMap)


@dataclass(frozen=True)
class ChildOptions(MethodOptions):
    """`width`: nodes of a layer that get children, and children of each; `tree_nodes`: maximum size of the tree;
    `draws`: children drawn below a node of depth 0, 1, ..., for rules that judge several drawn children."""

    width: int = whole(2, 1, 512)
    tree_nodes: int = whole(256, 2, 1 << 20)
    draws: str = parsed("2,1", DrawCounts.read)


@dataclass(frozen=True)
class HeadOptions(ChildOptions):
    """`head_window`: number of trailing tokens that the head sees; 0: as the file says, usually all."""

    head_window: int = whole(0, 0, 1 << 30)


class ChildAdder:
    """Adds at most `width` children below each node, the best of all, and learns from what the target wrote."""

    def __init__(self, options: ChildOptions) -> None:
        self._width, self._tree_nodes = options.width, options.tree_nodes
        self._draws, self.pick_models = DrawCounts.read(options.draws), PickModels()

    def learn(self, state: Any, seen: Observation) -> None:
        """Learn from the tokens that the target wrote below the proposals."""
        if not is_drawn(state.request):
            self.pick_models.of(state.request).learn_written(state.offers, seen.node_ids, seen.tokens)

    def add(
        self, jobs: Sequence[ExpansionJob], logits: Sequence[SparseLogits], log_confidence: LogConfidence | None = None
    ) -> None:
        """Add children below the jobs' frontiers from the logits of their nodes."""
        picked, offers = [], list[TopK]()
        for job, held in zip(jobs, logits, strict=True):
            if is_drawn(job.state.request):
                draw_layer(job.tree, job.frontier, held, rows_of([job]), self._draws)
                continue
            picked.append(job)
            found = top_k_rows(held, rows_of([job]), self._width + SPARE)
            is_greedy = job.state.request.sampling.is_greedy
            for place, node in enumerate(job.frontier):
                tokens, values = found[place]
                shift = log_confidence(job, node) if log_confidence and is_greedy else None
                offers.append((tokens, values if shift is None else [value + shift for value in values]))
        if picked:
            self._attach(picked, offers)

    def add_layers(
        self,
        jobs: Sequence[ExpansionJob],
        depths: int,
        logits_of: Callable[[int, int, Sequence[int]], SparseLogits],
        log_confidence: LogConfidence | None = None,
    ) -> None:
        """Add up to `depths` layers to each tree. `logits_of` returns the logits below nodes of the same depth, given
        the number of the job, the depth, and the nodes."""
        for depth in range(depths):
            layer, logits = [], []
            for number, job in enumerate(jobs):
                if frontier := self._frontier(job, depth):
                    layer.append(job._replace(frontier=frontier))
                    logits.append(logits_of(number, depth, frontier))
            self.add(layer, logits, log_confidence)

    def add_block(self, jobs: Sequence[ExpansionJob], held: SparseLogits, block: int) -> None:
        """Add up to `block` layers from as many rows of logits of each job, which do not depend on the nodes."""

        def logits_of(number: int, depth: int, nodes: Sequence[int]) -> SparseLogits:
            return held._replace(values=select_rows(held.values, [number * block + depth] * len(nodes)), best=())

        self.add_layers(jobs, block, logits_of)

    def _attach(self, jobs: Sequence[ExpansionJob], offers: Sequence[TopK]) -> None:
        states, trees, frontiers = zip(*jobs, strict=True)
        widths = [min(state.directives.width or self._width, self._width) for state in states]
        most = [min(self._tree_nodes - len(tree), 2 * width) for tree, width in zip(trees, widths, strict=True)]
        picks, maps = [self.pick_models.of(state.request) for state in states], [state.offers for state in states]
        attach_offers(trees, frontiers, TopKRows(offers), maps, picks, widths, most)

    def _frontier(self, job: ExpansionJob, depth: int) -> list[int]:
        """Return the nodes of this depth with the best path scores; none if the tree is full or deep enough."""
        tree, directives = job.tree, job.state.directives
        if len(tree) >= self._tree_nodes or depth >= min(directives.depth or tree.max_depth, tree.max_depth):
            return []
        layer = [node for node, below in enumerate(tree.depths) if below == depth]
        width = min(directives.width or self._width, self._width)
        return sorted(nlargest(width, layer, key=lambda node: (tree.scores[node], -node)))
