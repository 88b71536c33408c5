"""The kind specformer: slots that attend to each other draft eight tokens in one forward. arXiv:2511.20340.

Slot i at position t predicts token t + 2 + i, from the target's hidden states up to position t and token t + 1.
`models/heads/specformer.py` describes the forward and runs the heads that this module writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.distill.batches import PackedRows, TrainingBatch, follows
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds.head import HeadStudent, layer_fields
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import EMBEDDING, NORM, attention, causal_mask, rope_tables
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.heads.config import SPECFORMER, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.kinds.slots import CONTEXT, LAYER, slot_shapes
from outpace.models.heads.reader import LAYER_IDS
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

SLOTS = 8
DECAY = 0.8  # factor on the loss from one slot to the next


class SpecFormerStudent(HeadStudent):
    """A SpecFormer head in training. A new one has random weights, and both layers pass their input on."""

    kind, name, own_layers = SPECFORMER, "specformer", "two layers"

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Return the first layer, the middle one and the last two."""
        return tuple(sorted({0, num_layers // 2, max(num_layers - 1, 0), num_layers}))

    @classmethod
    def new_head(
        cls, config: Mapping[str, Any], sizes: LlamaConfig, shape: DraftShape, taps: Sequence[int]
    ) -> tuple[HeadConfig, Mapping[str, Any]]:
        layer = layer_fields(config, sizes)
        layers = replace(from_dict(layer), output_bias=sizes.attention_bias)
        vocab, width = shape.vocab or sizes.vocab_size, sizes.hidden_size
        head = HeadConfig(SPECFORMER, layers, tuple(taps), vocab, width, fc_norm=True, block=SLOTS, from_anchor=True)
        return head, layer

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
        return slot_shapes(head)

    @classmethod
    def initial(
        cls, target: Checkpoint, sizes: LlamaConfig, shape: DraftShape, name: str, size: tuple[int, ...]
    ) -> Tensor:
        if len(size) == 1:
            return torch.ones(size) if "norm" in name else torch.zeros(size)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.zeros(size)
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(size, generator=seeded) * size[1] ** -0.5

    def complete(self, target: Checkpoint, files: HeadFiles | None) -> None:
        norm = target.tensor(NORM).float() + target.read_config().norm_offset
        self.tensors[NORM] = norm.to(self.device)  # used, and not trained

    def fields(self) -> dict[str, Any]:
        slots = self.head.block
        named = {"architectures": ["SpecFormerDraftModel"], "num_drafted": slots, "num_slots": slots}
        return named | {LAYER_IDS: list(self.taps)}

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        """Return the mean loss per position, averaged over the slots. The logits of one slot exist at a time."""
        roots = torch.nonzero(follows(batch, 1)).squeeze(1)  # an answer's first token is not drafted
        outputs = self.slots(batch.packed, batch.packed.scored[roots] - 1)
        total, weights = torch.zeros((), device=self.device, requires_grad=True), 0.0
        for slot in range(self.head.block):
            rows = torch.nonzero(follows(batch, -slot)[roots]).squeeze(1)
            if len(rows):
                labels = batch.labels[roots[rows] + slot]
                found = checkpoint(
                    lambda x, labels=labels: loss(self._scores(x), labels, options),
                    outputs[rows, slot],
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                total = total + DECAY**slot * found
                weights += DECAY**slot
        return total / max(weights, 1.0)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        outputs = self.slots(batch.packed, (batch.packed.scored - 1).clamp_min(0)).unbind(1)
        right = self.right_slots(batch, map(self._scores, outputs[:length]))
        return torch.stack(right + [torch.zeros_like(right[0])] * (length - len(right)), 1)

    def slots(self, batch: PackedRows, places: Tensor) -> Tensor:
        """Return the outputs of all slots at these flat positions, before the final norm: [places, slots, hidden]."""
        config, count = self.config, self.head.block
        assert batch.taps is not None
        x = self._linear("fc", torch.cat([self.embedded(batch), self.normed_taps(batch.taps.float())], -1)).float()
        table = rope_tables(config.head_dim, config.rotations[0], batch.positions)
        heads = self._heads(CONTEXT, self._normed(x, CONTEXT + "input_layernorm.weight"), table)
        attended = attention(*heads, causal_mask(batch, None).to(heads[0].dtype), config.attention_scale)
        x = x + self._linear(CONTEXT + "self_attn.o_proj", attended.transpose(1, 2).flatten(2))
        normed = self._normed(x.flatten(0, 1)[places], "hidden_norm.weight")
        x = self._linear("slots", normed).unflatten(1, (count, -1)).float()
        table = rope_tables(config.head_dim, config.rotations[0], torch.arange(count, device=self.device)[None])
        query, key, value = self._heads(LAYER, self._normed(x, LAYER + "input_layernorm.weight"), table)
        weights = (query * config.attention_scale @ key.transpose(2, 3)).float().softmax(-1)
        return self._finish_layer(LAYER, x, weights.to(value.dtype) @ value)

    def embedded(self, batch: PackedRows) -> Tensor:
        """Return the normed embedding of the token after each position: [rows, length, hidden]."""
        return self._normed(F.embedding(batch.tokens.roll(-1, 1), self.tensors[EMBEDDING]), "embed_norm.weight")

    def _scores(self, outputs: Tensor) -> Tensor:
        """Score by the target's final norm and output layer, which are not trained."""
        return F.linear(self._normed(outputs, NORM), self._head).float()
