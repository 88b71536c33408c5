"""A SpecFormer head drafts several tokens in one forward, by slots that attend to each other.

SpecFormer, arXiv:2511.20340.

A session of the head follows the text, one token behind the target, as with EAGLE-3. Each slot predicts one of the next
tokens, independently of the ones in between, so the tree consists of the paths with the largest products of
probabilities. Nothing is drafted if hidden states of the text are missing.
"""

from __future__ import annotations

from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.types import Capabilities, DraftSource
from outpace.drafters._feature_drafter import FeatureDrafter, RootExpander, given_head
from outpace.drafters._model_drafter import HeadOptions

Options = HeadOptions


class SpecFormerDrafter(FeatureDrafter):
    """Drafts by a SpecFormer head."""

    capabilities = Capabilities(
        (DraftSource("specformer", runs_model=True, reads=0, by_length=True),),
        Needs(prompt=True),  # each instance adds the layers whose hidden states its head reads
        cost="a forward of the head's two layers and its output layer for all levels of the tree together",
    )

    def __init__(self, head: Any, options: Options) -> None:
        self._block = head.spec.block
        super().__init__(head, RootExpander(head, 0, 1, options.tree_nodes), options)


def build(options: Options, *, given: BuildContext) -> SpecFormerDrafter:
    """Build the drafter; raise UserError if the draft is not such a head."""
    head = given_head(given, options, "specformer", "a SpecFormer head for the target")
    return SpecFormerDrafter(head, options)
