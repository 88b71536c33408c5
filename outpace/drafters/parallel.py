"""A draft model trained with mask tokens drafts several tokens in one forward: a mask after the text for each.

PARD, arXiv:2504.18583.

The row of the root predicts the next token, and that of the j-th mask the token j places later, without regard to the
tokens in between. So one forward gives proposals for every layer, and the tree has the paths with the best products of
probabilities. The masks' keys and values are dropped; accepted tokens are read in the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from outpace_kernels import OfferMap, TopKRows, attach_offers

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.options import MethodOptions, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, Observation, Request, Row, Source
from outpace.drafters._calibration import PickModels
from outpace.drafters._mask_expander import MaskExpander
from outpace.drafters._sampled import DrawCounts, draw_layer, is_drawn
from outpace.drafters._tree_expander import SPARE, ExpansionJob, ExpansionState, tokens_below_root
from outpace.models.base import Model
from outpace.rules.base import top_k_rows


@dataclass(frozen=True)
class Options(MethodOptions):
    """`block`: number of consecutive tokens that a forward drafts; `width`: nodes of each layer that get children, and
    children of each; `tree_nodes`: maximum size of the tree; `draws`: children drawn below a node of depth 0, 1, ...,
    for rules that judge several drawn children."""

    block: int = whole(8, 1, 64)
    width: int = whole(2, 1, 512)
    tree_nodes: int = whole(256, 2, 1 << 20)
    draws: str = "2,1"

    def __post_init__(self) -> None:
        DrawCounts.read(self.draws)
        super().__post_init__()


@dataclass
class ParallelState(ExpansionState):
    """A request's state. `offers`: the proposals below a tree node, by node id."""

    offers: OfferMap = field(default_factory=OfferMap)


class ParallelDrafter(Drafter):
    """Keeps a session of the draft model for each request, in step with what the target commits."""

    capabilities = Capabilities(
        (Source("parallel", runs_model=True),), cost="a forward of the draft model for all layers of the tree together"
    )

    def __init__(self, model: Model, mask: int, options: Options) -> None:
        self._options, self._draws = options, DrawCounts.read(options.draws)
        self._expander, self._pick_models = MaskExpander(model, mask, options.block, options.tree_nodes), PickModels()
        self.capabilities = self._expander.capabilities(self.capabilities, self._pick_models)

    def open(self, request: Request) -> ParallelState:
        return ParallelState(request, session=self._expander.open(request))

    def grow(self, states: Sequence[ParallelState], trees: Sequence[TokenTree]) -> None:
        """Run one forward for all trees that were not grown in this round."""
        self._expander.grow(states, trees, self._expand)

    def observe(self, state: ParallelState, seen: Observation) -> None:
        if not is_drawn(state.request):
            self._pick_models.of(state.request).learn_written(state.offers, seen.node_ids, seen.tokens)
        self._expander.follow(state, seen)
        state.offers.keep(state.slots)

    def pause(self, state: ParallelState) -> None:
        self._expander.pause(state)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> list[int]:
        """Run one forward and add all layers; return the number of nodes added to each tree."""
        held, block, added = self._expander.score(jobs), self._options.block, []
        for number, job in enumerate(jobs):
            added.append(self._add(job.state, job.tree, held.part(slice(number * block, (number + 1) * block))))
        return added

    def _add(self, state: ParallelState, tree: TokenTree, logits: SparseLogits) -> int:
        """Add a layer for each row: children of the best nodes of the layer above."""
        before, width = len(tree), state.directives.width or self._options.width
        for depth in range(min(self._options.block, state.directives.depth or self._options.block)):
            frontier = _best_of_layer(tree, depth, min(width, self._options.width))
            if not frontier or len(tree) >= self._options.tree_nodes:
                break
            rows = [Row(state.request, state.tokens, tokens_below_root(tree, node)) for node in frontier]
            logits_of_layer = logits.part(slice(depth, depth + 1))
            if is_drawn(state.request):
                if not sum(
                    draw_layer(tree, [node], logits_of_layer, [row], self._draws)
                    for node, row in zip(frontier, rows, strict=True)
                ):
                    break
                continue
            offers = TopKRows([top_k_rows(logits_of_layer, [row], self._options.width + SPARE)[0] for row in rows])
            picks, most = self._pick_models.of(state.request), 2 * self._options.width
            most = min(self._options.tree_nodes - len(tree), most)
            attach_offers([tree], [frontier], offers, [state.offers], [picks], [self._options.width], [most])
        return len(tree) - before


def _best_of_layer(tree: TokenTree, depth: int, count: int) -> list[int]:
    """Return the nodes of this depth with the best path scores."""
    layer = [node for node, below in enumerate(tree.depths) if below == depth]
    return sorted(nlargest(count, layer, key=lambda node: (tree.scores[node], -node)))


def build(options: Options, *, given: BuildContext) -> ParallelDrafter:
    """Build the drafter; UserError without a draft model that has a mask token."""
    if given.draft is None or given.draft.mask_token is None:
        raise UserError(
            "drafter parallel needs a draft model trained to draft in parallel, with a pard_token in its config.json as"
            " PARD's have: name one with --draft (or draft=...), or use drafter model"
        )
    return ParallelDrafter(given.draft, given.draft.mask_token, options)
