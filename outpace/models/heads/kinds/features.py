"""Heads that read a feature at each position: EAGLE-3, P-EAGLE, EAGLE-1 and the MTP layers of MiMo and Qwen3.5.

Slot t of a session holds the feature f_t of position t and the token x_(t+1), and predicts x_(t+2). For positions that
the target has computed, f_t is made of its hidden states; for drafted nodes it is the output of the parent's slot. So a
session holds the text from its second token on, and a queue of features: those of the committed tokens to be read next,
and that of the tree's root.

EAGLE-3: arXiv:2503.01840. P-EAGLE: arXiv:2602.01469. EAGLE-1: arXiv:2401.15077; EAGLE-2 and HASS have the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outpace.core.arrays import join_rows
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.models.base import Model, Part, apply_keep
from outpace.models.heads.config import EAGLE1, EAGLE3, MIMO_MTP, MTP_LAYERS, P_EAGLE, HeadConfig
from outpace.models.heads.fields import agreed, within
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head, Weights, stack_rows
from outpace.models.heads.reader import base_shapes, read_mask
from outpace.models.llama.config.fields import ReadFields, flag

NORMS = ("norm", "hidden_norm", "embed_norm")  # an MTP layer has all of them


class FeatureHead(Head):
    """EAGLE-3: calls the layers with one feature per node, `fc` of the hidden states."""

    kinds: tuple[str, ...] = (EAGLE3,)
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


class MaskHead(FeatureHead):
    """P-EAGLE: EAGLE-3 with a feature for mask slots, which follow the root's."""

    kinds: tuple[str, ...] = (P_EAGLE,)
    drafter = "parallel"

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        head = super().complete(head, config, files, target)
        return replace(head, mask_token=read_mask(head, config, files, target))

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        return super().shapes(head, files) | {"mask_hidden": (1, 1, len(head.taps) * head.target_width)}

    def mask_features(self, count: int) -> Any:
        """Return the features of mask slots: [count, width]."""
        hidden = self.vectors["mask_hidden"].reshape(len(self.spec.taps), 1, -1)
        return join_rows([self.fuse(hidden)] * count)


class JoinedHead(FeatureHead):
    """EAGLE-1 and MTP layers: `fc` joins a token's embedding and a feature to the input of an ordinary layer.

    The feature of a position is what the target's output layer reads, the last hidden state after the final norm. An
    MTP layer is in the files of its target, and has further norms.
    """

    kinds: tuple[str, ...] = (EAGLE1, *MTP_LAYERS)
    reads_last = True

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        super().__init__(spec, weights, layers)
        self.vectors["target_norm.weight"] = weights.vector("target_norm.weight")

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        is_mtp, norm, embed_norm = head.kind in MTP_LAYERS, "layers.0.input_layernorm.weight", "embed_norm.weight"
        bias = "fusion_bias" if "speculators_model_type" in config else "bias"
        if flag(config, "layernorms", embed_norm in files) != (embed_norm in files):
            held = "the" if embed_norm in files else "no"
            raise UserError(f"layernorms is {config['layernorms']}, but the files hold {held} tensor {embed_norm!r}")
        return replace(
            head,
            target_width=head.layers.hidden_size,  # a feature may also be an output of the head
            layers=replace(head.layers, norms_features=is_mtp or norm in files),
            has_fc_bias=flag(config, bias, head.has_fc_bias) and not is_mtp,
            norm_output=is_mtp,
        )

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        hidden = head.layers.hidden_size
        norms = tuple(name for name in NORMS if head.kind in MTP_LAYERS or f"{name}.weight" in files)
        return base_shapes(head, files, norms) | {"fc.weight": (hidden, 2 * hidden)}

    def fuse(self, hidden: Any) -> Any:
        return self.normed("target_norm", self.receive(hidden[0]), self.spec.target_eps)

    def make_inputs(self, features: Any, part: Part) -> Any:
        embedded, session, is_mimo = self.embed(part), part.session, self.spec.kind == MIMO_MTP
        if is_mimo and not session.length + session.pending:
            embedded[0] = 0.0  # MiMo was trained without the embedding at the first position
        both = [self.normed("embed_norm", embedded), self.normed("hidden_norm", features)]
        return self.fc(join_rows(both[::-1] if is_mimo else both, 1))

    def embed(self, part: Part) -> Any:
        """Return the embeddings of a part's tokens."""
        return self.layers.embed(part.tokens)


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
