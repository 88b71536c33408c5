"""The kind eagle3: a decoder layer that reads the target's hidden states, in the public format of speculators.

EAGLE-3, Li et al., arXiv:2503.01840. Slot t reads a feature of position t and token t + 1, and predicts token t + 2.
Training also runs STEPS - 1 draft steps, whose slots read the outputs of the step before. `models/heads/eagle3.py` runs
the heads that this module writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch, follows
from outpace.distill.kinds.speculators_files import (
    Description,
    HeadStudent,
    default_head_taps,
    head_shape,
    head_vocab_ids,
    last_tap,
    layer_fields,
    read_own_head,
    shapes_function,
    start_head,
    start_of,
    write_head,
)
from outpace.distill.kinds.standalone import LAYERS, DraftShape, target_config
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import EMBEDDING, NORM, Student, causal_mask, rope_tables
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.heads.config import EAGLE3, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import TAPS, layer_shapes
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

STEPS = 3  # draft steps in training, and the recommended draft length
DECAY = 0.8  # factor on the loss from one draft step to the next
PREFIX, FC = "model.layers.0.", "model.fc.weight"
default_taps, vocab_ids = default_head_taps, head_vocab_ids  # the same for all heads
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Student(HeadStudent):
    """An EAGLE-3 head in training."""

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
        """As in `Student`. An answer's first token is not drafted, so a chain that starts with it counts as wrong."""
        best, slots = batch.labels.top[:, 0], (batch.packed.scored - 1).clamp_min(0)
        return torch.stack(
            [
                follows(batch, 1) & (self._scores(outputs, slots).argmax(1) == best.roll(-step))
                for step, outputs in enumerate(self.steps(batch.packed, length))
            ],
            1,
        )

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
        taps = batch.taps
        if self.head.fc_norm:
            parts = taps.chunk(len(self.taps), -1)
            taps = torch.cat([self._normed(part, f"model.fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)
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


def shape_from_options(layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
    """Return the shape for these options: a new head, or the one in the folder `init`; UserError for others."""
    if layers != DraftShape.layers:
        raise UserError(f"--layers is {layers}, and a head of the kind eagle3 has one layer: leave it out")
    return DraftShape(vocab=vocab) if init == LAYERS else head_shape(EAGLE3, "eagle3", layers, init, vocab)


def new_student(
    target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
) -> Eagle3Student:
    """Return a new head, which starts from the target's last layer, or the head to continue training."""
    start = start_head(target, ids, lambda checkpoint: _describe(checkpoint, shape, taps), _shapes, _initial)
    return Eagle3Student(start.head, start.layer, start.tensors, start.output, ids, device)


def write(folder: Path, student: Student, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
    """Replace the head in `folder`, in bfloat16; the old one is kept if that fails."""
    assert isinstance(student, Eagle3Student)
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "num_drafted": STEPS,
        TAPS: list(student.taps),
        **{flag: getattr(student.head, flag) for flag in FLAGS},
    }
    write_head(folder, student, target, shape, origin, "eagle3", fields)


def _describe(target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> Description:
    if shape.draft is not None:
        head, own, files = read_own_head(target, shape.draft, taps)
        if head.layers.num_layers > 1 or head.layers.window(0) is not None:
            raise UserError(
                f"the head {shape.draft} has several layers or a sliding window: only one layer without a window is"
                " trained"
            )
        return head, own, files
    sizes = target_config(target)
    layer = layer_fields(target.config, sizes, "qwen3" if sizes.head_norm else "llama", 1)
    layer["attention_bias"] = sizes.attention_bias
    layers = replace(from_dict(layer), takes_features=True, norms_features=True, output_bias=sizes.attention_bias)
    return HeadConfig(EAGLE3, layers, tuple(taps), shape.vocab or sizes.vocab_size, sizes.hidden_size), layer, None


def _shapes(head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
    hidden, inputs = head.layers.hidden_size, len(head.taps) * head.target_width
    shapes = {PREFIX + name: shape for name, shape in layer_shapes(head.layers, 0).items()}
    shapes |= {NORM: (hidden,), FC: (hidden, inputs)}
    extra = [
        name for name in (files.tensors if files else ()) if name.startswith(("fc.bias", "fc_norm.", "input_norm."))
    ]
    return shapes | {f"model.{name}": files.shape(name) for name in extra if files}


def _initial(target: Checkpoint, sizes: LlamaConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor's initial value, copied from the target's last layer; its input norm becomes the feature's."""
    if name == FC:
        return last_tap(shape)
    if name.endswith("input_layernorm.weight"):
        return torch.ones(shape)
    source = name.replace(PREFIX, f"model.layers.{sizes.num_layers - 1}.").replace("hidden_norm", "input_layernorm")
    return start_of(target, sizes, source, shape)


trained_shapes = shapes_function(_describe, _shapes)
