"""Sessions of the torch runtime, and the format of their keys and values: the attention's own type or fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.models.base import Session
from outpace.models.llama.config.llama_config import SCALED, LlamaConfig, num_scales
from outpace.models.llama.torch.recurrent import RecurrentMemory, Snapshot
from outpace.models.options import AUTO, INT8

MAX_HALF = 65504.0  # the largest finite number in half precision
MAX_SCALED = 1e38  # larger values could become infinite when they are decoded
TINY = 1e-30  # 127 / largest must stay finite


class KVFormat:
    """Encodes keys and values [..., head_dim]. In int8, their scales' bytes follow them."""

    def __init__(self, kv_dtype: str, own: torch.dtype, head_dim: int) -> None:
        """`own`: the attention's type, which "auto" selects."""
        self.is_own = kv_dtype == AUTO
        self.dtype: torch.dtype = own if self.is_own else getattr(torch, kv_dtype)
        self._own, self._head_dim = own, head_dim
        self.width = head_dim + (2 * num_scales(head_dim) if kv_dtype == INT8 else 0)

    def encode(self, x: Tensor) -> Tensor:
        """Encode keys or values for storage: [..., head_dim] to [..., width]"""
        if self.dtype == torch.int8:
            return self._quantize(x.float().clamp(-MAX_SCALED, MAX_SCALED))
        return (x.clamp(-MAX_HALF, MAX_HALF) if self.dtype == torch.float16 else x).to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        """Decode to the attention's type: [..., width] to [..., head_dim]"""
        if self.dtype != torch.int8:
            return stored.to(self._own)
        scales = stored[..., self._head_dim :].contiguous().view(torch.int16).int() << 16
        scales = scales.view(torch.float32).repeat_interleave(SCALED, -1)[..., : self._head_dim]
        return (stored[..., : self._head_dim].float() * scales).to(self._own)

    def _quantize(self, x: Tensor) -> Tensor:
        """Return int8 entries and the bytes of their scales: (largest / 127) rounded up to bfloat16."""
        grouped = F.pad(x, (0, -self._head_dim % SCALED)).unflatten(-1, (-1, SCALED))
        largest = grouped.abs().amax(-1)
        high = ((largest / 127.0).view(torch.int32) + 0xFFFF) >> 16
        high = torch.where(largest > TINY, high, torch.zeros_like(high))
        scales = (high << 16).view(torch.float32)[..., None]
        entries = torch.where(scales > 0, (grouped / scales).round(), torch.zeros_like(grouped))
        flat = entries.to(torch.int8).flatten(-2)[..., : self._head_dim]
        return torch.cat([flat, high.to(torch.int16).view(torch.int8)], -1)


class LlamaSession(Session):
    """Stores keys and values in one tensor per layer: [keys and values, kv_heads, slots, encoded width].

    Attention needs contiguous tensors, so growing copies one layer after the other: only one layer exists twice. The
    tensors of recurrent layers are empty, as those of layers that read the keys of others; `memory` holds the states.
    """

    memory: RecurrentMemory

    def __init__(
        self,
        capacity: int,
        max_pending: int,
        config: LlamaConfig,
        kv_formats: Sequence[KVFormat],
        device: torch.device,
        is_exact: bool,
    ) -> None:
        """`kv_formats`: of each layer."""
        super().__init__(capacity, max_pending)
        self.kv = [
            torch.empty(
                2,
                config.of_layer(layer).num_kv_heads,
                0,
                kv_format.width if layer in config.stored_layers else 0,
                dtype=kv_format.dtype,
                device=device,
            )
            for layer, kv_format in enumerate(kv_formats)
        ]
        if config.recurrence and config.num_recurrent_layers:
            self.is_recurrent = True
            self.memory = RecurrentMemory(config.recurrence, config.num_recurrent_layers, device, is_exact)

    def read(self, length: int) -> Tensor:
        """Return the first `length` slots, layer after layer [keys and values, kv_heads, slots, width], flattened."""
        return torch.cat([layer[:, :, :length].flatten() for layer in self.kv if layer.shape[-1]])

    def extend_bytes(self, parents: Sequence[int]) -> bytes:
        mask = super().extend_bytes(parents)
        if self.is_recurrent:
            self.memory.add(len(parents))
        return mask

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        super().keep(path, live)
        if self.is_recurrent:
            self.memory.keep(path, live)

    def trim(self, exact: bool = False) -> None:
        super().trim(exact)
        if self.is_recurrent:
            self.memory.trim()

    def _save_state(self) -> Snapshot:
        return self.memory.save()

    def _load_state(self, saved: Snapshot | None) -> None:
        self.memory.load(saved)

    @torch.inference_mode()
    def _resize(self, slots: int) -> None:
        used = min(slots, self.length + self.pending)
        for number, layer in enumerate(self.kv):
            self.kv[number] = grown = layer.new_empty(*layer.shape[:2], slots, layer.shape[3])
            grown[:, :, :used] = layer[:, :, :used]

    @torch.inference_mode()
    def _move(self, source: Sequence[int], start: int) -> None:
        index = to_device(source, np.int64, self.kv[0].device)
        for layer in self.kv:
            layer[:, :, start : start + len(source)] = layer[:, :, index]

    @torch.inference_mode()
    def _copy(self, other: LlamaSession, length: int) -> None:
        for mine, others in zip(self.kv, other.kv, strict=True):
            mine[:, :, :length] = others[:, :, :length]
