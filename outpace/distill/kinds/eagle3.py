"""The kind eagle3: a decoder layer that reads the target's hidden states, in the public format of speculators.

EAGLE-3, Li et al., arXiv:2503.01840. Slot t reads a feature of position t and token t + 1, and predicts token t + 2.
Training also runs STEPS - 1 draft steps, whose slots read the outputs of the step before. The heads that this module
writes are run by `models/heads/kinds/features.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch, follows
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds.head import HeadStudent, last_tap, layer_fields, start_of
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import EMBEDDING, NORM, causal_mask, rope_tables
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.heads.config import EAGLE3, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import TAPS, layer_shapes
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

STEPS = 3  # draft steps in training, and the recommended draft length
DECAY = 0.8  # factor on the loss from one draft step to the next
PREFIX, FC = "model.layers.0.", "model.fc.weight"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Student(HeadStudent):
    """An EAGLE-3 head in training. A new one starts from the target's last layer."""

    kind, name, own_layers = EAGLE3, "eagle3", "one layer"

    @classmethod
    def new_head(
        cls, config: Mapping[str, Any], sizes: LlamaConfig, shape: DraftShape, taps: Sequence[int]
    ) -> tuple[HeadConfig, Mapping[str, Any]]:
        layer = layer_fields(config, sizes)
        layers = replace(from_dict(layer), takes_features=True, norms_features=True, output_bias=sizes.attention_bias)
        return HeadConfig(EAGLE3, layers, tuple(taps), shape.vocab or sizes.vocab_size, sizes.hidden_size), layer

    @classmethod
    def check(cls, head: HeadConfig, folder: Path) -> None:
        if head.layers.num_layers > 1 or head.layers.window(0) is not None:
            raise UserError(
                f"the head {folder} has several layers or a sliding window: only one layer without a window is trained"
            )

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
        hidden, inputs = head.layers.hidden_size, len(head.taps) * head.target_width
        shapes = {PREFIX + name: shape for name, shape in layer_shapes(head.layers, 0).items()}
        shapes |= {NORM: (hidden,), FC: (hidden, inputs)}
        if files is not None:
            extra = [name for name in files.tensors if name.startswith(("fc.bias", "fc_norm.", "input_norm."))]
            shapes |= {f"model.{name}": files.shape(name) for name in extra}
        return shapes

    @classmethod
    def initial(
        cls, target: Checkpoint, sizes: LlamaConfig, shape: DraftShape, name: str, size: tuple[int, ...]
    ) -> Tensor:
        if name == FC:
            return last_tap(size)
        if name.endswith("input_layernorm.weight"):  # the target's becomes the feature's
            return torch.ones(size)
        source = name.replace(PREFIX, f"model.layers.{sizes.num_layers - 1}.").replace("hidden_norm", "input_layernorm")
        return start_of(target, sizes, source, size)

    def fields(self) -> dict[str, Any]:
        flags = {flag: getattr(self.head, flag) for flag in FLAGS}
        return {"architectures": ["Eagle3DraftModel"], "num_drafted": STEPS, TAPS: list(self.taps), **flags}

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        total, weights = torch.zeros((), device=self.device, requires_grad=True), 0.0
        for step, outputs in enumerate(self.steps(batch.packed, STEPS)):
            roots = torch.nonzero(follows(batch, 1) & follows(batch, -step)).squeeze(1)
            if len(roots):
                found = self._scores(outputs, batch.packed.scored[roots] - 1)
                total = total + DECAY**step * loss(found, batch.labels[roots + step], options)
                weights += DECAY**step
        return total / max(weights, 1.0)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        slots = (batch.packed.scored - 1).clamp_min(0)
        outputs = self.steps(batch.packed, length)
        return torch.stack(self.right_slots(batch, (self._scores(step, slots) for step in outputs)), 1)

    def steps(self, batch: PackedRows, count: int) -> list[Tensor]:
        """Run the layer once over the text, and `count` - 1 draft steps from every slot: outputs before the final norm,
        [rows, length, hidden] each. Step n of slot t reads token t + 1 + n and predicts the one after it."""
        config, head = self.config, self.head
        x, mask = self.fuse(batch), causal_mask(batch, None)
        keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(count):
            table = rope_tables(config.head_dim, config.rotations[0], batch.positions + step)
            embedded = F.embedding(batch.tokens.roll(-1 - step, 1), self.tensors[EMBEDDING])
            normed = self._normed(x, PREFIX + "hidden_norm.weight")
            both = torch.cat([self._normed(embedded, PREFIX + "input_layernorm.weight"), normed], -1)
            query, key, value = self._heads(PREFIX, both, table)
            keys.append(key)
            values.append(value)
            attended = _step_attention(query, keys, values, mask, config.attention_scale)
            x = self._finish_layer(PREFIX, normed if head.norm_before_residual else x, attended)
            found.append(x)
            x = self._normed(x, NORM) if head.norm_output else x
        return found

    def fuse(self, batch: PackedRows) -> Tensor:
        """Return the features of the target's hidden states: [rows, length, hidden]."""
        assert batch.taps is not None
        taps = self.normed_taps(batch.taps, "model.") if self.head.fc_norm else batch.taps
        if self.head.norm_before_fc:
            taps = self._normed(taps, "model.input_norm.weight")
        return self._linear("model.fc", taps).float()

    def _scores(self, outputs: Tensor, slots: Tensor) -> Tensor:
        normed = self._normed(outputs.flatten(0, 1)[slots], NORM)
        return F.linear(normed, self._head).float() * self.head.logit_scale


def _step_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor, scale: float
) -> Tensor:
    """Attend to the text's slots by `mask`, and to the slots of later steps at the same position.

    Query, and keys and values of each step: [rows, heads, length, d]. Keys and values begin with those of the text.
    """
    length = query.shape[2]
    scores = [(query * scale) @ keys[0].transpose(2, 3) + mask]
    scores += [(query * scale * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([part.float() for part in scores], -1).softmax(-1).to(values[0].dtype)
    attended = weights[..., :length] @ values[0]
    for place, value in enumerate(values[1:], length):
        attended = attended + weights[..., place, None] * value
    return attended
