"""A draft model grows a token tree: one forward expands the most likely nodes of all requests.

CARD's drafter, arXiv:2508.04462; with width 1 it is the chain of Leviathan et al., arXiv:2211.17192.

Each forward expands K (`width`) nodes of a request and adds children of them. `ChildAdder.attach` decides which:
the K best by path score form CARD's primary cache C, the others its secondary cache B. B is limited: at most K children
of each expanded node are added, and only as many as fit into `tree_nodes` (or the share of it that the directives
allow) and can be verified.
"""

from __future__ import annotations

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.types import Capabilities, Drafter, DraftSource
from outpace.drafters._composite import DraftSelector
from outpace.drafters._model_drafter import BaseModelDrafter, ModelOptions
from outpace.models.base import Model

Options = ModelOptions


class ModelDrafter(BaseModelDrafter):
    """Drafts with a draft model."""

    capabilities = Capabilities(
        (DraftSource("model", runs_model=True),), q_at_leaves=True, cost="a forward of the draft model for each level"
    )


def build(options: Options, *, given: BuildContext) -> Drafter:
    """Build the drafter for the draft model, or one that selects among several draft models; UserError without one."""
    if given.draft is None:
        raise UserError("drafter model needs a draft model, name one with --draft (or draft=...)")
    drafts = (given.draft, *given.others)
    parts = [ModelDrafter(draft, options) for draft in drafts]
    return parts[0] if len(parts) == 1 else DraftSelector(parts, [_cost(draft, given.target) for draft in drafts])


def _cost(draft: Model, target: Model | None) -> float | None:
    """Return the cost of a step as a fraction of the target pass; both are bound by reading their weights."""
    own, whole = draft.weight_bytes, target.weight_bytes if target is not None else None
    return own / whole if own and whole else None
