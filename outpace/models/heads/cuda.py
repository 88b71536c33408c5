"""Runs trained heads by captured passes, for a target with captured passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.models.base import Part
from outpace.models.heads.dflash import BlockSession
from outpace.models.heads.eagle3 import FeatureSession
from outpace.models.heads.medusa import MedusaModel
from outpace.models.heads.torch import TorchBlock, TorchEagle, TorchJoined, TorchSlots, TorchSpecFormer
from outpace.models.llama.cuda.captures import MAX_PENDING, Captures, visible_bits
from outpace.models.llama.cuda.pool import GraphSession
from outpace.models.llama.cuda.runtime import MAX_HEAD_ROWS, BatchPart, GraphLlama, pass_rows


class GraphFeatureSession(FeatureSession, GraphSession):
    """A session that is a row of the pool and has a queue of features."""


class GraphBlockSession(BlockSession, GraphSession):
    """A session that is a row of the pool, for a head that drafts blocks."""


class FeaturePasses(GraphLlama):
    """Captured passes whose rows read features in place of embeddings."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._features = torch.zeros_like(self._hidden)  # of a captured pass: [rows, hidden]

    def _has_bucket(self, part: Part, max_rows: int) -> bool:
        return super()._has_bucket(part._replace(inputs=None), max_rows)

    def capture_passes(self, sizes: Sequence[tuple[int, int]], layers: Sequence[int] = ()) -> None:
        """Do nothing: a pass needs features."""

    def _run(self, start: int, block: Sequence[BatchPart], saved: Mapping[int, Tensor]) -> None:
        rows = pass_rows(start, block, [range(len(part.tokens)) for _, part, *_ in block])
        features = torch.cat([part.inputs for _, part, *_ in block])
        self._features.index_copy_(0, to_device(rows, np.int64, self.device), features.to(self.dtype))
        super()._run(start, block, saved)

    def _embed_pass(self, tokens: Tensor) -> Tensor:
        super()._embed_pass(tokens)
        return self._features[: len(tokens)].clone()


class GraphEagle(TorchEagle, FeaturePasses):
    """An EAGLE-3 or P-EAGLE head with captured passes."""

    session_type = GraphFeatureSession  # type: ignore[assignment]


class GraphJoined(TorchJoined, FeaturePasses):
    """An EAGLE-1 head, or an MTP layer, with captured passes."""

    session_type = GraphFeatureSession  # type: ignore[assignment]


class GraphBlock(TorchBlock, GraphLlama):
    """A DFlash or DSpark head with captured passes."""

    session_type = GraphBlockSession  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        earlier = visible_bits(np.tri(MAX_PENDING, dtype=bool))  # for each slot of a block: the slots up to it
        self._earlier = to_device(earlier, np.int64, self.device)

    def _masks(self, inputs: dict[str, Tensor], slots: int) -> list[Tensor]:
        """Captured: hide later slots of the block in causal layers."""
        masks = super()._masks(inputs, slots)
        if not any(self._is_causal):
            return masks
        bits = inputs["bits"] & self._earlier[: inputs["bits"].shape[1]]
        causal = super()._masks({**inputs, "bits": bits}, slots)
        return [causal[number] if is_causal else masks[number] for number, is_causal in enumerate(self._is_causal)]


class GraphSlots(TorchSlots, FeaturePasses):
    """The layer across SpecFormer's slots, with captured passes."""

    session_type = GraphBlockSession  # type: ignore[assignment]


class GraphSpecFormer(TorchSpecFormer, FeaturePasses):
    """A SpecFormer head with captured passes."""

    session_type = GraphFeatureSession  # type: ignore[assignment]
    slots_type = GraphSlots
    slots: GraphSlots

    @property
    def num_captures(self) -> int:
        return super().num_captures + self.slots.num_captures


class GraphMedusa(MedusaModel):
    """Medusa's heads with a captured forward."""

    captures: Captures

    @property
    def num_captures(self) -> int:
        return self.captures.count

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        count, size = next_power_of_two(len(rows)), (self.head.block, self.vocab_size)
        if count > MAX_HEAD_ROWS:
            return super().logits(rows)
        inputs = self.captures.buffers(("features", count), lambda: rows.new_zeros(count, rows.shape[1]))
        logits = self.captures.buffers(("logits", count, *size), lambda: rows.new_zeros(count, *size))
        inputs[: len(rows)].copy_(rows)
        key, compute = ("heads", count, *size), super().logits
        self.captures.prepare(key, lambda: logits.copy_(compute(inputs)), inputs, logits)
        self.captures.replay(key)
        return logits[: len(rows)].clone()
