"""EAGLE-1: `fc` joins a token's embedding and a feature to the input of an ordinary layer. arXiv:2401.15077.

The feature of a position is what the target's output layer reads, the last hidden state after the final norm; that of a
drafted node is its parent's output. EAGLE-2 and HASS have the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outpace.core.arrays import join_rows
from outpace.core.errors import UserError
from outpace.models.base import Model, Part
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Weights
from outpace.models.heads.kinds.eagle3 import FeatureHead
from outpace.models.heads.reader import base_shapes
from outpace.models.llama.config.fields import ReadFields, flag

NORMS = ("norm", "hidden_norm", "embed_norm")


class JoinedHead(FeatureHead):
    """Calls the layers with what `fc` makes of an embedding and a feature."""

    reads_last = True
    swaps_inputs = False  # whether `fc` reads the feature first

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        super().__init__(spec, weights, layers)
        self.vectors["target_norm.weight"] = weights.vector("target_norm.weight")

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        norm, embed_norm = "layers.0.input_layernorm.weight", "embed_norm.weight"
        bias = "fusion_bias" if "speculators_model_type" in config else "bias"
        if flag(config, "layernorms", embed_norm in files) != (embed_norm in files):
            held = "the" if embed_norm in files else "no"
            raise UserError(f"layernorms is {config['layernorms']}, but the files hold {held} tensor {embed_norm!r}")
        return replace(
            head,
            target_width=head.layers.hidden_size,  # a feature may also be an output of the head
            layers=replace(head.layers, norms_features=norm in files),
            has_fc_bias=flag(config, bias, head.has_fc_bias),
        )

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        hidden = head.layers.hidden_size
        norms = tuple(name for name in NORMS if f"{name}.weight" in files)
        return base_shapes(head, files, norms) | {"fc.weight": (hidden, 2 * hidden)}

    def fuse(self, hidden: Any) -> Any:
        return self.normed("target_norm", self.receive(hidden[0]), self.spec.target_eps)

    def make_inputs(self, features: Any, part: Part) -> Any:
        embedded = self.embed(part)
        both = [self.normed("embed_norm", embedded), self.normed("hidden_norm", features)]
        return self.fc(join_rows(both[::-1] if self.swaps_inputs else both, 1))

    def embed(self, part: Part) -> Any:  # type: ignore[override]
        """Return the embeddings of a part's tokens."""
        return self.layers.embed(part.tokens)
