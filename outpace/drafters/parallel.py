"""A draft trained with mask tokens drafts several tokens in one forward: a mask after the text for each.

PARD, arXiv:2504.18583; P-EAGLE, a head that reads the target's hidden states, arXiv:2602.01469.

The row of the root predicts the next token, and that of the j-th mask the token j positions later, independently of the
tokens in between. So one forward gives proposals for every level, and the tree consists of the paths with the largest
products of probabilities. The masks' keys and values are dropped; accepted tokens are read in the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.options import whole
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, Observation, Request
from outpace.drafters._feature_drafter import FeatureDrafter, FeatureMaskExpander, MaskExpander
from outpace.drafters._model_drafter import ChildAdder, ChildOptions, OfferState
from outpace.drafters._tree_expander import ExpansionJob
from outpace.models.base import Model
from outpace.models.heads.head import Head


@dataclass(frozen=True)
class Options(ChildOptions):
    """Those of heads, and the length of a block."""

    block: int = whole(8, 1, 64, help="number of consecutive tokens that a forward drafts")


class ParallelDrafter(Drafter):
    """Keeps a session of the draft model for each request, which follows the tokens that the target commits."""

    capabilities = Capabilities(
        (DraftSource("parallel", runs_model=True),),
        cost="a forward of the draft model for all levels of the tree together",
    )

    def __init__(self, model: Model, mask: int, options: Options) -> None:
        self._children = ChildAdder(options.width, options.tree_nodes, options.draws)
        self._block, self._expander = options.block, MaskExpander(model, mask, options.block, options.tree_nodes)
        self.capabilities = self._expander.capabilities(self.capabilities, self._children.pick_models)

    def open(self, request: Request) -> OfferState:
        session, pick_model = self._expander.open(request), self._children.pick_models.for_request(request)
        return OfferState(request, session=session, pick_model=pick_model)

    def grow(self, states: Sequence[OfferState], trees: Sequence[TokenTree]) -> None:
        """Run one forward for all trees that were not grown in this round."""
        if jobs := self._expander.jobs(states, trees):
            self._expand(jobs)

    def observe(self, state: OfferState, seen: Observation) -> None:
        self._children.learn(state, seen)
        self._expander.follow(state, seen)
        state.offers.keep(state.slots)

    def pause(self, state: OfferState) -> None:
        self._expander.pause(state)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        self._children.add_block(jobs, self._expander.score(jobs), self._block)


class ParallelHeadDrafter(FeatureDrafter):
    """Drafts by a P-EAGLE head, whose state is that of an EAGLE-3 head."""

    capabilities = Capabilities(
        (DraftSource("parallel", runs_model=True, reads=0, by_length=True),), Needs(prompt=True)
    )

    def __init__(self, head: Any, options: Options) -> None:
        self._block = options.block
        expander = FeatureMaskExpander(head, head.spec.mask_token or 0, options.block, options.tree_nodes)
        super().__init__(head, expander, options)


def build(options: Options, *, given: BuildContext) -> Drafter:
    """Build the drafter; raise UserError unless the draft has a mask token."""
    if isinstance(given.draft, Head) and given.draft.drafter == "parallel":
        return ParallelHeadDrafter(given.draft, options)
    if given.draft is None or given.draft.mask_token is None:
        raise UserError(
            "drafter parallel needs a draft model trained to draft in parallel, with a pard_token in its config.json as"
            " PARD's have: name one with --draft (or draft=...), or use drafter model"
        )
    return ParallelDrafter(given.draft, given.draft.mask_token, options)
