"""EAGLE-3: a decoder layer that reads the target's hidden states. Li et al., arXiv:2503.01840.

Slot t of a session holds the feature f_t of position t and the token x_(t+1), and predicts x_(t+2). For positions that
the target has computed, f_t = fc(the target's hidden states); for drafted nodes it is the output of the parent's slot.
So a session holds the text from its second token on, and a queue of features: those of the committed tokens to be read
next, and that of the tree's root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outpace.core.arrays import join_rows
from outpace.core.logits import SparseLogits
from outpace.models.base import Part, apply_keep
from outpace.models.heads.config import EAGLE3, HeadConfig
from outpace.models.heads.fields import agreed, within
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head, stack_rows
from outpace.models.llama.config.fields import ReadFields, flag


class FeatureHead(Head):
    """Calls the layers with one feature per node. This is the base of all kinds whose sessions follow the text."""

    drafter = "eagle"

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        stated = agreed(config, within("eagle_config", "norm_before_residual"), flag)
        is_guess = stated is None and head.kind == EAGLE3 and "speculators_model_type" in config
        norm_before_residual = stated[1] if stated else is_guess
        guess = ("norm_before_residual is missing and taken as true, as vLLM does",) if is_guess else ()

        def either(*names: str) -> bool:
            found = agreed(config, within("eagle_config", *names), flag)
            return found is not None and found[1]

        return replace(
            head,
            layers=replace(head.layers, takes_features=True, norms_features=not norm_before_residual),
            norm_before_residual=norm_before_residual,
            norm_before_fc=either("norm_before_fc"),
            fc_norm=either("fc_norm", "use_aux_norm"),
            norm_output=either("norm_output"),
            notices=head.notices + guess,
        )

    def make_inputs(self, features: Any, part: Part) -> Any:
        """Return the inputs of the layers for a part's nodes, which read these features: the first layer's residual."""
        return self.normed("layers.0.hidden_norm", features) if self.spec.norm_before_residual else features

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        """Score nodes. Each reads a feature, from the session's queue or from the output of its parent's slot.

        The outputs of nodes with a logit row are stored for their children. A parent must have been scored in an
        earlier pass, unless the node's feature comes from the queue.
        """
        parts = apply_keep(forest)
        logits, hidden = self.layers.score_sparse_hidden(self._calls(parts), (self.num_layers,))
        outputs = iter(self.normed("norm", hidden[0]) if self.spec.norm_output else hidden[0])
        for part in parts:
            new: list[Any] = [None] * len(part.tokens)
            for node in part.logit_rows:
                new[node] = next(outputs)
            part.session.outputs += new
        scale = self.spec.logit_scale
        return logits if scale == 1.0 else logits._replace(values=logits.values * scale)

    def _score(self, forest: Sequence[Part]) -> Any:
        return self.score_sparse(forest).to_dense()

    def _calls(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts of a pass of the layers, and take the features that they use off the queues."""
        return [
            part._replace(
                session=part.session.stored,
                inputs=self.make_inputs(_features_of(part), part),
                hidden_rows=part.logit_rows,
                best=0,
            )
            for part in parts
        ]


def _features_of(part: Part) -> Any:
    """Return each node's feature, [nodes, width], and take the used ones off the queue."""
    session, count = part.session, len(part.tokens)
    queued, outputs = min(len(session.features), count), session.outputs
    rows = [session.features[:queued]] if queued else []
    if queued < count:
        parents = [part.parents[node] for node in range(queued, count)]
        if not all(0 <= parent < len(outputs) for parent in parents):
            raise ValueError("a node has neither a queued feature nor a parent with an output")
        rows.append(stack_rows([outputs[parent] for parent in parents]))
    session.features = session.features[queued:]
    return join_rows(rows)
