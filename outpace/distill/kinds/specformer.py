"""The kind specformer: slots that attend to each other draft eight tokens in one forward. arXiv:2511.20340.

Slot i at position t predicts token t + 2 + i, from the target's hidden states up to position t and token t + 1.
`models/heads/specformer.py` describes the forward and runs the heads that this module writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch
from outpace.distill.kinds.eagle3 import follows, layer_fields, stored_tensor
from outpace.distill.kinds.eagle3 import vocab_ids as vocab_ids
from outpace.distill.kinds.standalone import LAYERS, DraftShape, target_config
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import EMBEDDING, HEAD, NORM, Student, attention, causal_mask, rope_tables
from outpace.distill.taps import tap_list
from outpace.models.files.cache import replaced_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.find import open_folder
from outpace.models.files.reading import write_json
from outpace.models.heads.config import SPECFORMER, HeadConfig
from outpace.models.heads.files import open_head
from outpace.models.heads.load import kind_of_head
from outpace.models.heads.reader import LAYER_IDS, draft_ids, read_head, slot_shapes
from outpace.models.heads.specformer import CONTEXT, LAYER
from outpace.models.llama.config.llama_config import from_dict

SLOTS = 8
OWN_FIELDS = ("architectures", "num_slots", LAYER_IDS, "draft_vocab_size", "speculators_config", "outpace")
DECAY = 0.8  # factor on the loss from one slot to the next


class SpecFormerStudent(Student):
    """The weights of a head in training."""

    def __init__(
        self,
        head: HeadConfig,
        layer: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        norm: Tensor,
        output: Tensor,
        ids: Tensor | None,
    ) -> None:
        """`layer`: config.json's fields of a layer. `tensors`: those to train, and EMBEDDING. `norm` [hidden] and
        `output` [ids, hidden]: the target's final norm, and its output layer for the tokens `ids`; None: all tokens."""
        super().__init__(replace(head.layers, tie_embeddings=True), tensors, None)
        self.head, self.layer, self.taps, self.ids = head, layer, head.taps, ids
        self._norm, self._head = norm, output

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
                )
                total = total + DECAY**slot * found
                weights += DECAY**slot
        return total / max(weights, 1.0)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        """As in `Student`. An answer's first token is not drafted, so a chain that starts with it counts as wrong."""
        best = batch.labels.top[:, 0]
        outputs = self.slots(batch.packed, (batch.packed.scored - 1).clamp_min(0))
        right = [
            follows(batch, 1) & (self._scores(outputs[:, slot]).argmax(1) == best.roll(-slot))
            for slot in range(min(length, self.head.block))
        ]
        return torch.stack(right + [torch.zeros_like(right[0])] * (length - len(right)), 1)

    def slots(self, batch: PackedRows, places: Tensor) -> Tensor:
        """Return the outputs of all slots at these flat positions, before the final norm: [places, slots, hidden]."""
        config, count = self.config, self.head.block
        x = self._linear("fc", torch.cat([self.embedded(batch), self.normed_taps(batch)], -1)).float()
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

    def normed_taps(self, batch: PackedRows) -> Tensor:
        """Return the target's hidden states, each normed: [rows, length, taps * hidden]."""
        assert batch.taps is not None
        parts = batch.taps.float().chunk(len(self.taps), -1)
        return torch.cat([self._normed(part, f"fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)

    def _scores(self, outputs: Tensor) -> Tensor:
        """Score by the target's final norm and output layer, which are not trained."""
        normed = F.rms_norm(outputs, outputs.shape[-1:], self._norm, self.config.rms_norm_eps)
        return F.linear(normed, self._head).float()


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose hidden states heads read by default: the first, the middle one and the last two."""
    return tuple(sorted({0, num_layers // 2, max(num_layers - 1, 0), num_layers}))


def shape_from_options(layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
    """Return the shape for these options: a new head, or the one in the folder `init`; UserError for others."""
    if layers != DraftShape.layers:
        raise UserError(f"--layers is {layers}, and a head of the kind specformer has two layers: leave it out")
    if init == LAYERS:
        return DraftShape(vocab=vocab)
    path = Path(init)
    if not path.is_dir() or kind_of_head(path) != SPECFORMER:
        raise UserError(
            f"init is {init!r}, for the kind specformer it must be {LAYERS} or the folder of a SpecFormer head"
        )
    if vocab:
        raise UserError(f"the head {init} has a vocabulary of its own: leave out --vocab")
    files = open_head(path)
    return DraftShape(vocab=prod(files.shape("d2t")) if "d2t" in files else 0, draft=path)


def trained_shapes(target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained tensors; UserError for a head that does not fit the target or the taps."""
    return slot_shapes(_describe(target, shape, taps)[0])


def new_student(
    target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
) -> SpecFormerStudent:
    """Return a new head of random weights, or the head to continue training."""
    with open_folder(target) as checkpoint:
        head, layer = _describe(checkpoint, shape, taps)
        sizes = target_config(checkpoint)
        embedding = checkpoint.tensor(EMBEDDING).float()
        output = embedding if sizes.tie_embeddings else checkpoint.tensor(HEAD).float()
        norm = checkpoint.tensor(NORM).float() + sizes.norm_offset
    if shape.draft is None:
        tensors = {name: _initial(name, size) for name, size in slot_shapes(head).items()}
    else:
        files = open_head(shape.draft)
        tensors = {name: stored_tensor(files, name) for name in slot_shapes(head)}
        if (order := draft_ids(files, head)) is not None:
            output, ids = stored_tensor(files, HEAD)[np.argsort(order)], torch.from_numpy(np.sort(order))
    tensors = {name: value.to(device) for name, value in {**tensors, EMBEDDING: embedding}.items()}
    output = output if ids is None or len(output) == len(ids) else output[ids]
    ids = None if ids is None else ids.to(device)
    return SpecFormerStudent(head, layer, tensors, norm.to(device), output.to(device), ids)


def write(folder: Path, student: Student, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
    """Replace the head in `folder`, in bfloat16; the old one is kept if that fails."""
    from safetensors.torch import save_file

    assert isinstance(student, SpecFormerStudent)
    with open_folder(target) as source:
        architectures, size = source.config.get("architectures"), student.config.vocab_size
    tensors = dict(student.trained)
    if student.ids is not None:
        ids = student.ids.cpu()
        tensors |= {HEAD: student._head, "d2t": ids - torch.arange(len(ids))}
    config = {
        **student.layer,
        "architectures": ["SpecFormerDraftModel"],
        "num_slots": student.head.block,
        LAYER_IDS: list(student.taps),
        "draft_vocab_size": size if student.ids is None else len(student.ids),
        "speculators_config": {"verifier": {"name_or_path": origin.get("target"), "architectures": architectures}},
        "outpace": {name: origin[name] for name in ("tokenizer", "template", "weights", "runtime") if name in origin},
    }
    with replaced_folder(folder) as unfinished:
        write_json(unfinished / "config.json", config)
        stored = {
            name: value.detach().cpu().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
            for name, value in tensors.items()
        }
        save_file(stored, unfinished / SINGLE, {"format": "pt"})


def _describe(target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> tuple[HeadConfig, Mapping[str, Any]]:
    """Return the head's configuration, and config.json's fields of its layers."""
    sizes = target_config(target)
    if shape.draft is None:
        layer = layer_fields(target, sizes)
        layers = replace(from_dict(layer), attention_bias=sizes.attention_bias, output_bias=sizes.attention_bias)
        vocab, width = shape.vocab or sizes.vocab_size, sizes.hidden_size
        head = HeadConfig(SPECFORMER, layers, tuple(taps), vocab, width, fc_norm=True, block=SLOTS, from_anchor=True)
        return head, layer
    files = open_head(shape.draft)
    head = read_head(files, target.config, sizes.max_positions, sizes.num_layers)
    draft_ids(files, head)  # UserError for tokens that the target does not have
    if head.taps != tuple(taps):
        own = tap_list(head.taps)
        raise UserError(f"the head {shape.draft} reads the layers {own}, not {tap_list(taps)}: name --taps {own}")
    return head, {name: value for name, value in files.config.items() if name not in OWN_FIELDS}


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor's initial value: at first both layers pass their input on."""
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name else torch.zeros(shape)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros(shape)
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=seeded) * shape[1] ** -0.5
