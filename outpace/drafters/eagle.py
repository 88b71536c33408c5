"""An EAGLE head, or an MTP layer, grows a token tree: one decoder layer that reads the target's hidden states.

EAGLE-1, arXiv:2401.15077; EAGLE-3, arXiv:2503.01840; trees by the product of probabilities as in EAGLE-2,
arXiv:2406.16858.

A slot of the head's session reads a token and a feature, which comes from the target's hidden states or, for a drafted
node, from the output of the parent's slot. Between rounds only slots with the target's features are kept: the root's
slot stays, and accepted tokens are read again in the next forward. Nothing is drafted if features of the text are
missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.options import number, whole
from outpace.core.types import Capabilities, DraftSource
from outpace.drafters._feature_drafter import FeatureDrafter, FeatureExpander, given_head
from outpace.drafters._model_drafter import HeadOptions


@dataclass(frozen=True)
class Options(HeadOptions):
    """Those of other heads, wider by default."""

    width: int = whole(4, 1, 512, help="nodes that a forward expands in each tree, and children of each")
    floor: float = number(0.005, 0.0, 1.0, help="lowest estimated probability of a node that is expanded")


class EagleDrafter(FeatureDrafter):
    """Adds one level to each tree in a forward."""

    capabilities = Capabilities(
        (
            DraftSource("eagle", runs_model=True, reads=0, by_length=True),
        ),  # reads nothing itself: the passes deliver it
        Needs(prompt=True),  # each instance adds the layers whose hidden states its head reads
        q_at_leaves=True,
        cost="a forward of one layer and the head's output layer for each level of the tree",
    )

    def __init__(self, head: Any, options: Options) -> None:
        expander = FeatureExpander(head, options.width, options.tree_nodes, options.floor)
        super().__init__(head, expander, options)


def build(options: Options, *, given: BuildContext) -> EagleDrafter:
    """Build the drafter; raise UserError if the draft is not such a head."""
    head = given_head(given, options, "eagle", "an EAGLE head for the target, or its MTP layer")
    return EagleDrafter(head, options)
