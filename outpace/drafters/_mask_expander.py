"""Score token trees with a model that was trained to draft in parallel: one forward for all layers of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.drafters._feature_expander import FeatureExpander
from outpace.drafters._tree_expander import ExpansionJob, ExpansionState, TreeExpander
from outpace.models.base import Model
from outpace.models.heads.eagle3 import EagleModel


class MaskExpander(TreeExpander):
    """Scores the root of each tree and `block` - 1 mask tokens after it."""

    def __init__(self, model: Model, mask: int, block: int, tree_nodes: int) -> None:
        super().__init__(model, block, tree_nodes, window=model.draft_window)
        self._mask, self._block = mask, block

    def _frontiers(self, open_trees: Sequence[tuple[Any, TokenTree]]) -> list[list[int]]:
        """Return the root of each tree that was not expanded in this round."""
        return [[] if tree.ids[0] in state.slots or state.deepest(tree) < 0 else [0] for state, tree in open_trees]

    def score(self, jobs: Sequence[ExpansionJob]) -> SparseLogits:
        """Run one forward and return `block` rows of logits per job: of the root and of the masks after it."""
        self._catch_up([job.state for job in jobs])
        parts, roots = [], []
        for job in jobs:
            part = self._part(*job)
            root = len(part.tokens) - 1
            masks = [self._mask] * (self._block - 1)
            parents = [*part.parents, *range(root, root + len(masks))]
            rows = range(root, root + self._block)
            parts.append(part._replace(tokens=[*part.tokens, *masks], parents=parents, logit_rows=rows, best=0))
            roots.append(root)
            self._prepare(job.state)
        held = self.model.score_held(parts)
        for job, root in zip(jobs, roots, strict=True):
            job.state.session.keep(range(root), (root,))
        return held

    def _prepare(self, state: ExpansionState) -> None:
        """Prepare a session for the masks of a forward."""


class RootExpander(FeatureExpander, MaskExpander):
    """Scores the root of each tree with a head."""


class FeatureMaskExpander(RootExpander):
    """Scores the root and mask slots with a head; the mask slots read a feature of their own."""

    model: EagleModel

    def _prepare(self, state: Any) -> None:
        state.session.add_features(self.model.mask_features(self._block - 1))
