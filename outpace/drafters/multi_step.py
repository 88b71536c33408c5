"""A draft model grows several levels of a token tree in one CUDA graph, so that the host waits once in a round.

Trees of this shape: EAGLE-2, arXiv:2406.16858.

The graph begins at the root of a tree, once in a round, and expands what its own scores prefer. Where it cannot, as for
requests with penalties, filters or a grammar, and near the end of an answer, the draft model takes single steps as for
drafter `model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import tensor_of
from outpace.core.noise import row_words
from outpace.core.options import whole
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, DraftSource, Observation, TopK
from outpace.drafters._model_drafter import BaseModelDrafter, ModelOptions, OfferState
from outpace.drafters._tree_expander import SPARE, ExpansionJob
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel
from outpace.rules.match import Match

if TYPE_CHECKING:
    from outpace.models.llama.cuda.multi_step import ExpandedNode, MultiStepGraph


@dataclass(frozen=True)
class Options(ModelOptions):
    """Those of other draft models, and the steps."""

    steps: int = whole(4, 2, 8, help="draft steps in one CUDA graph, and so the depth of a tree")


@dataclass
class MultiStepState(OfferState):
    """A request's state. `is_grown`: whether the graph has grown a tree in this round."""

    is_grown: bool = False


class MultiStepDrafter(BaseModelDrafter):
    """Drafts with a draft model that has captured passes."""

    capabilities = Capabilities(
        (DraftSource("multi_step", runs_model=True),),
        q_at_leaves=True,
        cost="forwards of the draft model for all levels of the tree together",
    )
    state_type = MultiStepState

    def __init__(self, graph: MultiStepGraph, options: Options) -> None:
        super().__init__(graph.model, options)
        self._graph = graph

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """Grow trees by the graph, or by one forward, unless the graph has grown them in this round."""
        pairs = [(state, tree) for state, tree in zip(states, trees, strict=True) if not state.is_grown]
        if pairs:
            super().grow(*zip(*pairs, strict=True))

    def observe(self, state: Any, seen: Observation) -> None:
        state.is_grown = False
        super().observe(state, seen)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        together = [job for job in jobs if self._fits(job)]
        if single := [job for job in jobs if not self._fits(job)]:
            super()._expand(single)
        if together:
            self._expand_together(together)

    def _fits(self, job: ExpansionJob) -> bool:
        """Whether the graph can grow this tree: it begins at the root, and ranks proposals by log q, with or without
        the position's noise, and by nothing else."""
        state, request = job.state, job.state.request
        is_bare = request.adjustments is None and request.constraint is None and not request.sampling.filters
        is_directed = state.directives.outcomes or state.directives.in_levels
        is_fresh = job.frontier == [0] and not state.session.pending
        is_plain = is_bare and not is_directed and type(request.rule) in (Greedy, Gumbel, Match)
        return is_fresh and is_plain and state.deepest(job.tree) >= self._graph.steps - 1

    def _expand_together(self, jobs: Sequence[ExpansionJob]) -> None:
        """Score the roots by a forward, take the graph's steps, and add the children of the nodes that they expand."""
        from outpace.models.llama.cuda.multi_step import RootNode

        logits = tensor_of(self._expander.score(jobs).to_dense())
        roots = []
        for state, _, _ in jobs:
            state.is_grown, sampling = True, state.request.sampling
            temperature = 1.0 if sampling.is_greedy else sampling.temperature
            roots.append(RootNode(state.session, temperature, self._keys(state)))
        found = self._graph.run(roots, logits)
        places: list[dict[int, int]] = [{} for _ in jobs]  # tree node by number of the expanded node
        for step in range(self._graph.steps):
            first = 1 + (step - 1) * self._graph.width if step else 0
            numbers = range(first, first + self._graph.width) if step else range(1)
            grown, offers = [], []
            for (state, tree, _), nodes, known in zip(jobs, found, places, strict=True):
                for number in numbers:
                    if (place := _place(tree, nodes[number], known)) is not None:
                        known[number] = place
                        state.slots[tree.ids[place]] = number
                frontier = sorted((known[number], number) for number in numbers if number in known)
                if frontier:
                    grown.append(ExpansionJob(state, tree, [place for place, _ in frontier]))
                    offers += [_offer(nodes[number]) for _, number in frontier]
            if grown:
                self._children.attach(grown, offers)

    def _keys(self, state: MultiStepState) -> np.ndarray | None:
        """Return the keys of the noise for proposals below nodes of each depth; None for rules without noise."""
        request, start = state.request, len(state.tokens)
        if type(request.rule) is not Gumbel:
            return None
        return row_words(request.seed, request.choice, np.arange(start, start + self._graph.steps))


def _place(tree: TokenTree, node: ExpandedNode | None, known: dict[int, int]) -> int | None:
    """Return the tree node of an expanded node; None if the tree does not have it."""
    if node is None or (node.parent >= 0 and node.parent not in known):
        return None
    return 0 if node.parent < 0 else tree.child(known[node.parent], node.token)


def _offer(node: ExpandedNode | None) -> TopK:
    """Return a node's proposals without tokens that are filtered out, which come last."""
    assert node is not None
    possible = sum(value > -np.inf for value in node.values)
    return node.tokens[:possible], node.values[:possible]


def build(options: Options, *, given: BuildContext) -> MultiStepDrafter:
    """Build the drafter; UserError unless there is a draft model with captured passes that has space for the steps."""
    if not hasattr(given.draft, "captures"):
        raise UserError(
            "drafter multi_step needs a draft model with graphs, on a GPU or by graphs eager: name one with --draft (or"
            " draft=...), or use drafter model"
        )
    from outpace.models.llama.cuda.multi_step import MultiStepGraph

    return MultiStepDrafter(MultiStepGraph(given.draft, options.steps, options.width, options.width + SPARE), options)
