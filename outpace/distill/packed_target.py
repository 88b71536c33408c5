"""Computes the target's hidden states during training, for text that does not hold them.

On a GPU this is faster than reading them from a disk, and the captured loop that writes the text stores none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from outpace.distill.batches import PackedRows
from outpace.distill.student import EMBEDDING, Student
from outpace.models.files.find import open_folder
from outpace.models.llama.config.llama_config import tensor_shapes
from outpace.models.options import has_bfloat16


class PackedTarget:
    """The target's layers up to the last one of `taps`; they are loaded on first use.

    Matrices are bfloat16 on a GPU that supports it, else float32.
    """

    def __init__(self, target: Path, taps: Sequence[int], device: str) -> None:
        self._folder, self._taps, self._device = target, tuple(taps), torch.device(device)
        self._is_half = self._device.type == "cuda" and has_bfloat16(self._device)

    @torch.no_grad()
    def taps(self, batch: PackedRows) -> Tensor:
        """Return the residual stream after the layers `taps`: float32 [rows, length, taps * hidden]."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_half):
            return torch.cat([x.float() for x in self._layers.hidden_states(batch, self._taps)], -1)

    @cached_property
    def _layers(self) -> Student:
        with open_folder(self._folder) as checkpoint:
            whole = checkpoint.read_config()
            config = whole.of_layers(range(self._taps[-1]))
            tensors = {
                name: checkpoint.tensor(name).to(self._device, self._dtype(shape))
                for name, shape in tensor_shapes(config).items()
                if name.startswith("model.layers.") or name == EMBEDDING
            }
        return Student.frozen(config, tensors)

    def _dtype(self, shape: Sequence[int]) -> torch.dtype:
        return torch.bfloat16 if self._is_half and len(shape) > 1 else torch.float32
