"""The kind steered: a draft whose MLPs are biased by the target's hidden states at the last verified position.

SD2, Steering Pretrained Drafters during Speculative Decoding, arXiv:2511.09844. Unlike the authors, who also tune the
draft, this kind trains the steering alone, which begins at zero. In each batch the token at position t is steered by
the hidden states at t - d, for one offset d. `models/heads/steering.py` runs what this module writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch
from outpace.distill.draft_shape import LAYERS, SHIPPED, DraftShape, draft_config
from outpace.distill.kinds.head import DIGESTS, HeadStudent
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import TOKENIZER_FILES, Student, copy_files, stored_tensors
from outpace.distill.writer import TAPS, tap_list
from outpace.models.files.cache import replaced_folder
from outpace.models.files.checkpoint import INDEX, SINGLE, Checkpoint, read_index
from outpace.models.heads.config import STEERING
from outpace.models.heads.steering import DELTA, EPS, FC, NORM, NORM_BIAS, open_steering, steering_shapes
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

OFFSETS = 8  # the largest distance from a token to the hidden states that steer it


class SteeredStudent(Student):
    """A draft whose steering is trained; its own weights stay as they are."""

    learning_rate = 3e-4

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        ids: Tensor | None,
        steering: Mapping[str, Tensor],
        taps: Sequence[int],
    ) -> None:
        super().__init__(config, {**tensors, **steering}, ids)
        self.taps = tuple(taps)
        for name, value in self.tensors.items():
            value.requires_grad_(name in steering)

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        return HeadStudent.default_taps(num_layers)

    @classmethod
    def shape_from_options(cls, layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
        """Return the shape of the draft to steer, by default the shipped one; UserError if there is none."""
        if layers != DraftShape.layers or vocab:
            raise UserError("the kind steered keeps the shape of its draft: leave out --layers and --vocab")
        try:
            return super().shape_from_options(layers, SHIPPED if init == LAYERS else init, vocab, target)
        except UserError as error:
            if init == LAYERS:
                raise UserError(
                    f"no draft comes with outpace for {target}: name the draft to steer with --init FOLDER"
                ) from error
            raise

    @classmethod
    def trained_shapes(
        cls, target: Checkpoint, shape: DraftShape, taps: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        """As in `Student`; UserError also for a steering that reads other layers."""
        super().trained_shapes(target, shape)
        config = from_dict(draft_config(target.config, shape))
        shapes = steering_shapes(config, len(taps), target.read_config().hidden_size)
        if (steering := open_steering(_draft_of(shape))) is not None:
            if steering.taps != tuple(taps):
                own = tap_list(steering.taps)
                raise UserError(
                    f"the draft {shape.draft} reads the layers {own}, not {tap_list(taps)}: name --taps {own}"
                )
            steering.check_shapes(shapes)
        return shapes

    @classmethod
    def new(
        cls, target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
    ) -> SteeredStudent:
        """Return the draft with a steering of zero, or the steered draft to continue training."""
        draft = Student.new(target, shape, ids, device)
        steering = open_steering(_draft_of(shape))
        if steering is None:
            hidden = draft.config.hidden_size
            shapes = steering_shapes(draft.config, len(taps), hidden)
            tensors = {name: torch.zeros(size) for name, size in shapes.items()}
            tensors[FC], tensors[NORM] = torch.eye(hidden).repeat(1, len(taps)), torch.ones(shapes[NORM])
        else:
            tensors = {name: torch.from_numpy(steering.array(name).copy()) for name in (FC, NORM, NORM_BIAS, DELTA)}
        tensors = {name: value.to(device) for name, value in tensors.items()}
        return cls(draft.config, draft.tensors, draft.ids, tensors, taps)

    def write(self, folder: Path, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
        """Replace the draft in `folder` by a copy of the steered draft's files and its steering, in bfloat16; the old
        one is kept if that fails."""
        from safetensors.torch import save_file

        draft = _draft_of(shape)
        parts = read_index(draft / INDEX).values() if (draft / INDEX).is_file() else ()
        described = {name: origin[name] for name in DIGESTS if name in origin}
        with replaced_folder(folder) as unfinished:
            copy_files(draft, unfinished, ("config.json", SINGLE, INDEX, VOCAB_FILE, *TOKENIZER_FILES, *set(parts)))
            metadata = {"format": "pt", TAPS: tap_list(self.taps), **described}
            save_file(stored_tensors(self.trained), unfinished / STEERING, metadata)

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        offset = (
            1 + int(batch.packed.tokens.sum()) % OFFSETS
        )  # a function of the batch, so that an interrupted training can be repeated
        return loss(self.steered_logits(batch.packed, offset), batch.labels, options)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        """As in `Student`; a chain's n-th token is predicted with the hidden states n positions before its parent."""
        best = batch.labels.top[:, 0]
        steps = [self.steered_logits(batch.packed, 1 + step).argmax(1) == best for step in range(length)]
        return torch.stack([right.roll(-step) for step, right in enumerate(steps)], 1)

    def steered_logits(self, batch: PackedRows, offsets: Tensor | int) -> Tensor:
        """Return `logits` with each token steered by the hidden states this number of positions before it, if its text
        has them. `offsets`: int64 [rows, length], or one for all."""
        distances = torch.as_tensor(offsets, device=self.device).expand_as(batch.positions)
        places = torch.arange(batch.tokens.shape[1], device=self.device) - distances
        features = self.features(batch).take_along_dim(places.clamp_min(0)[..., None], 1)
        bias = F.linear(features, self.tensors[DELTA]) * (batch.positions >= distances)[..., None]
        return self.logits(batch, bias.unflatten(-1, (self.config.num_layers, -1)))

    def features(self, batch: PackedRows) -> Tensor:
        """Return the features of the target's hidden states: [rows, length, hidden]."""
        assert batch.taps is not None
        fused = F.linear(batch.taps, self.tensors[FC]).float()
        return F.layer_norm(fused, fused.shape[-1:], self.tensors[NORM], self.tensors[NORM_BIAS], EPS)


def _draft_of(shape: DraftShape) -> Path:
    """Return the folder of the draft to steer."""
    if shape.draft is None:
        raise UserError("the kind steered needs a draft to steer: name it with --init FOLDER")
    return shape.draft
