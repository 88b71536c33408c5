"""The kind dspark: a few decoder layers that draft a block of tokens in one pass, in the format of speculators.

DSpark, arXiv:2607.05147; DFlash, arXiv:2602.06036. A block begins with an anchor, the last written token; its other
slots are masks. All of them attend to each other, and to keys and values of the target's hidden states before the
anchor. Slot k predicts the token k + 1 places after the anchor; a Markov bias adds what follows from the token before
that one, and a confidence estimates whether the prediction is accepted. `models/heads/dflash.py` runs the heads that
this module writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch, follows
from outpace.distill.draft_shape import DraftShape, pick_layers
from outpace.distill.kinds.head import HeadStudent, last_tap, layer_fields, random_matrix, start_of
from outpace.distill.losses import LossOptions, cross_entropy, total_variation
from outpace.distill.student import EMBEDDING, NORM, rope_tables
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.heads.config import DSPARK, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.kinds.block import CONFIDENCE, MARKOV, MARKOV_KINDS
from outpace.models.heads.reader import LAYER_IDS, draft_ids, layer_shapes
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.weight_sources import source_of

BLOCK = 5  # slots of a new head's block
STRIDE = 4  # positions from one anchor to the next in training
DECAY = 4.0  # slots after which a position's weight in the loss has fallen to 1/e
RANK, RANK_SHARE = 256, 4  # the Markov bias has this rank, or the width divided by this
MIN_NORM = 0.1  # of the mask token's embedding, as a share of the median
FC, FEATURE_NORM = "model.fc.weight", "model.hidden_norm.weight"
BEFORE, AFTER = f"{MARKOV}markov_w1.weight", f"{MARKOV}markov_w2.weight"
WEIGHT, BIAS = f"{CONFIDENCE}weight", f"{CONFIDENCE}bias"


class DSparkStudent(HeadStudent):
    """A DSpark head in training. The layers of a new one start from some of the target's."""

    kind, name = DSPARK, "dspark"

    @classmethod
    def new_head(
        cls, config: Mapping[str, Any], sizes: LlamaConfig, shape: DraftShape, taps: Sequence[int]
    ) -> tuple[HeadConfig, Mapping[str, Any]]:
        count = len(pick_layers(shape, sizes.num_layers))
        # vLLM and speculators run Qwen 3's layers for every target
        own = {"model_type": "qwen3", "num_hidden_layers": count, "attention_bias": False}
        layer = layer_fields(config, sizes) | own
        rows, layers, causal = shape.vocab or sizes.vocab_size, from_dict(layer), (False,) * count
        head = HeadConfig(
            DSPARK, layers, tuple(taps), rows, layers.hidden_size, block=BLOCK, from_anchor=True, causal=causal
        )
        return replace(head, markov=MARKOV_KINDS[0]), layer

    @classmethod
    def check(cls, head: HeadConfig, folder: Path) -> None:
        has_windows = any(head.layers.window(layer) is not None for layer in range(head.layers.num_layers))
        if has_windows or any(head.causal) or not head.from_anchor or head.markov != MARKOV_KINDS[0]:
            raise UserError(
                f"the head {folder} has a sliding window, causal blocks, another Markov bias than {MARKOV_KINDS[0]}, or"
                " no prediction from the anchor: such heads are not trained"
            )

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
        layers, hidden = head.layers, head.layers.hidden_size
        shapes: dict[str, tuple[int, ...]] = {FC: (hidden, len(head.taps) * head.target_width)}
        shapes |= {FEATURE_NORM: (hidden,), NORM: (hidden,)}
        for number in range(layers.num_layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer_shapes(layers, number).items()}
        if files is not None:
            own = [name for name in files.tensors if name.startswith((MARKOV, CONFIDENCE, "fc.bias"))]
            return shapes | {f"model.{name}" if name == "fc.bias" else name: files.shape(name) for name in own}
        rank = min(RANK, hidden // RANK_SHARE)
        shapes |= {BEFORE: (layers.vocab_size, rank), AFTER: (head.num_rows, rank)}
        return shapes | {WEIGHT: (1, hidden + rank), BIAS: (1,)}

    @classmethod
    def initial(
        cls, target: Checkpoint, sizes: LlamaConfig, shape: DraftShape, name: str, size: tuple[int, ...]
    ) -> Tensor:
        """Return a tensor's initial value. The Markov bias and the confidence start from 0."""
        if name == FC:
            return last_tap(size)
        if name == BEFORE:
            return random_matrix(size)
        if name.startswith((MARKOV, CONFIDENCE)):
            return torch.zeros(size)
        layers = pick_layers(shape, sizes.num_layers)
        source = (
            f"model.layers.{layers[-1]}.input_layernorm.weight" if name == FEATURE_NORM else source_of(name, layers)
        )
        return start_of(target, sizes, source, size)

    def complete(self, target: Checkpoint, files: HeadFiles | None) -> None:
        if files is None:
            self.head = replace(self.head, mask_token=_mask_token(self.tensors[EMBEDDING]))
        elif (order := draft_ids(files, self.head)) is not None:
            after = self.tensors[AFTER].detach()[torch.from_numpy(np.argsort(order))]
            self.tensors[AFTER] = after.requires_grad_()

    def fields(self) -> dict[str, Any]:
        head, weight = self.head, self.tensors.get(WEIGHT)
        return {
            "architectures": ["DSparkDraftModel"],
            "num_drafted": head.num_drafted,
            "block_size": head.block,
            "mask_token_id": head.mask_token,
            LAYER_IDS: list(self.taps),
            "sample_from_anchor": True,
            "markov_rank": self.tensors[BEFORE].shape[1],
            "markov_head_type": head.markov,
            "enable_confidence_head": weight is not None,
            "confidence_head_with_markov": weight is not None and weight.shape[1] != head.layers.hidden_size,
        }

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        """Return the loss of the blocks that begin at every STRIDE-th position, weighted by slot.

        The divergence is the sum of |p - q|. The loss of the confidence, which learns the probability of acceptance,
        trains nothing else.
        """
        first = batch.num_tokens % STRIDE  # varies by batch, and needs no wait for the device
        columns = torch.arange(first, batch.packed.tokens.shape[1], STRIDE, device=self.device)
        found = _labels_of(batch, columns, self.head.block)
        kept = torch.nonzero(found >= 0).squeeze(1)  # only they are multiplied by the output layer
        hidden, places = self.blocks(batch.packed, columns).flatten(0, 2)[kept], found[kept]
        labels, before = batch.labels[places], _tokens_before(batch, places)
        log_q = self.scores(hidden, before).log_softmax(-1)
        variation = total_variation(log_q, labels)
        losses = options.token_weight * cross_entropy(log_q, labels) + 2 * options.distribution_weight * variation
        if (score := self.confidence(hidden.detach(), before)) is not None:
            losses = losses + F.binary_cross_entropy_with_logits(score, 1.0 - variation.detach(), reduction="none")
        weights = torch.exp(-(kept % self.head.block) / DECAY)
        return (losses * weights).sum() / weights.sum().clamp_min(1.0)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        """As in `Student`. An answer's first token is not drafted, so a chain that starts with it counts as wrong; so
        do tokens beyond a block."""
        columns, best = torch.arange(batch.packed.tokens.shape[1], device=self.device), batch.labels.top[:, 0]
        outputs = self.blocks(batch.packed, columns).flatten(0, 1)[batch.packed.scored]  # [scored, block, hidden]
        right = torch.zeros(len(best), length, dtype=torch.bool, device=self.device)
        for slot in range(min(length, self.head.block)):
            places = (torch.arange(len(best), device=self.device) + slot).clamp_max(len(best) - 1)
            scores = self.scores(outputs[:, slot], _tokens_before(batch, places))
            right[:, slot] = follows(batch, 1) & (scores.argmax(1) == best[places])
        return right

    def blocks(self, batch: PackedRows, columns: Tensor) -> Tensor:
        """Return the normed outputs of the blocks whose anchors are the tokens of these columns, in all rows: [rows,
        columns, block, hidden]."""
        config, size = self.config, self.head.block
        slots = torch.arange(size, device=self.device)
        places = (batch.positions[:, columns, None] + slots).flatten(1)
        masks = self.tensors[EMBEDDING][self.head.mask_token].expand(*batch.tokens[:, columns].shape, size - 1, -1)
        x = torch.cat([F.embedding(batch.tokens[:, columns, None], self.tensors[EMBEDDING]), masks], 2).flatten(1, 2)
        features, mask = self.features(batch), _context_mask(batch, columns)
        tables = [
            [rope_tables(config.head_dim, one, at) for at in (batch.positions, places)] for one in config.rotations
        ]
        for number in range(config.num_layers):
            prefix, rotation = f"model.layers.{number}.", config.rotation(number)
            of_text, of_block = (None, None) if rotation is None else tables[rotation]
            context = self._heads(prefix, features, of_text)[1:]
            normed = self._normed(x, prefix + "input_layernorm.weight")
            query, *own = self._heads(prefix, normed, of_block)
            attended = _attend(query.unflatten(2, (-1, size)), context, own, mask, config.attention_scale)
            x = self._finish_layer(prefix, x, attended)
        return self._normed(x, NORM).unflatten(1, (-1, size))

    def features(self, batch: PackedRows) -> Tensor:
        """Return the features of the target's hidden states, from which layers compute keys and values: [rows, length,
        hidden]."""
        assert batch.taps is not None
        return self._normed(self._linear("model.fc", batch.taps).float(), FEATURE_NORM)

    def scores(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits of slots with these outputs, given the tokens `before` the predicted ones: [slots, ids]."""
        bias = F.linear(F.embedding(before, self.tensors[BEFORE]), self.tensors[AFTER])
        return F.linear(hidden, self._head).float() + bias.float()

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return the log-odds that the slots' tokens are accepted: [slots]. None if the head does not estimate it."""
        weight = self.tensors.get(WEIGHT)
        if weight is None:
            return None
        reads_token = weight.shape[1] != hidden.shape[1]
        both = [hidden, *([F.embedding(before, self.tensors[BEFORE].detach())] if reads_token else [])]
        return F.linear(torch.cat(both, 1), weight, self.tensors[BIAS]).squeeze(1).float()


def _tokens_before(batch: TrainingBatch, places: Tensor) -> Tensor:
    """Return the tokens before those of the labels at `places`."""
    return batch.packed.tokens.flatten()[batch.packed.scored[places]]


def _labels_of(batch: TrainingBatch, columns: Tensor, block: int) -> Tensor:
    """Return the label of each slot of the blocks of these columns, -1 for slots beyond an answer: int64 [rows *
    columns * block]."""
    rows, length = batch.packed.tokens.shape
    device, scored, answers = columns.device, batch.packed.scored, batch.labels.answers
    numbers = torch.full((rows * length,), -1, device=device)
    numbers[scored] = torch.arange(len(scored), device=device)
    ahead = columns[:, None] + torch.arange(block, device=device)  # [columns, block]
    found = numbers.view(rows, length)[:, ahead.clamp_max(length - 1)]
    is_of_answer = (found >= 0) & (found[:, :, :1] >= 0) & (ahead < length)
    is_of_answer &= answers[found.clamp_min(0)] == answers[found[:, :, :1].clamp_min(0)]
    return found.masked_fill(~is_of_answer, -1).flatten()


def _context_mask(batch: PackedRows, columns: Tensor) -> Tensor:
    """Return 0 for earlier tokens of the same sequence as each column's, else -inf: [rows, 1, columns, 1, length]."""
    earlier = torch.arange(batch.tokens.shape[1], device=columns.device) < columns[:, None]
    visible = (batch.sequences[:, columns, None] == batch.sequences[:, None]) & earlier
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None, :, None]


def _attend(query: Tensor, context: Sequence[Tensor], own: Sequence[Tensor], mask: Tensor, scale: float) -> Tensor:
    """Attend to the text by `mask`, and to all slots of the same block: [rows, heads, columns * block, d].

    Query: [rows, heads, columns, block, d]. Keys and values of the text: [rows, heads, length, d]; of all slots: [rows,
    heads, columns * block, d].
    """
    query = query * scale
    (key, value), (own_key, own_value) = context, (part.unflatten(2, query.shape[2:4]) for part in own)
    of_text = (query.flatten(2, 3) @ key.transpose(2, 3)).unflatten(2, query.shape[2:4]) + mask
    scores = torch.cat([of_text.float(), (query @ own_key.transpose(3, 4)).float()], -1)
    of_text, of_block = scores.softmax(-1).to(value.dtype).split([key.shape[2], query.shape[3]], -1)
    return of_text.flatten(2, 3) @ value + (of_block @ own_value).flatten(2, 3)


def _mask_token(embedding: Tensor) -> int:
    """Return the last token that has an embedding: vocabularies end with tokens that texts do not hold, and unused rows
    may be zero."""
    norms = embedding.norm(dim=1)
    return int(torch.nonzero(norms >= MIN_NORM * norms.median())[-1])
