"""What the torch runtime keeps of a text: keys and values in the attention's own type, or in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.models.base import Session
from outpace.models.llama.config.footprint import SCALED, num_scales
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.options import AUTO, INT8

MOST_HALF = 65504.0  # the largest number in half precision: nothing becomes infinite
MOST_SCALED = 1e38  # what is read back must not become infinite either
TINY = 1e-30  # 127 / top must stay finite


class KVFormat:
    """How keys and values [..., head_dim] are held. In int8 their scales' bytes stand behind them."""

    def __init__(self, kv_dtype: str, own: torch.dtype, head_dim: int) -> None:
        """`own`: the attention's type, which "auto" means."""
        self.is_own = kv_dtype == AUTO
        self.dtype: torch.dtype = own if self.is_own else getattr(torch, kv_dtype)
        self._own, self._depth = own, head_dim
        self.width = head_dim + (2 * num_scales(head_dim) if kv_dtype == INT8 else 0)

    def encode(self, x: Tensor) -> Tensor:
        """As they are held: [..., width]"""
        if self.dtype == torch.int8:
            return self._as_bytes(x.float().clamp(-MOST_SCALED, MOST_SCALED))
        return (x.clamp(-MOST_HALF, MOST_HALF) if self.dtype == torch.float16 else x).to(self.dtype)

    def decode(self, held: Tensor) -> Tensor:
        """In the attention's type: [..., head_dim]"""
        if self.dtype != torch.int8:
            return held.to(self._own)
        scales = held[..., self._depth :].contiguous().view(torch.int16).int() << 16
        each = scales.view(torch.float32).repeat_interleave(SCALED, -1)[..., : self._depth]
        return (held[..., : self._depth].float() * each).to(self._own)

    def _as_bytes(self, x: Tensor) -> Tensor:
        """Entries and their scales: (largest / 127) rounded up to bfloat16."""
        grouped = F.pad(x, (0, -self._depth % SCALED)).unflatten(-1, (-1, SCALED))
        top = grouped.abs().amax(-1)
        high = ((top / 127.0).view(torch.int32) + 0xFFFF) >> 16
        high = torch.where(top > TINY, high, torch.zeros_like(high))
        scales = (high << 16).view(torch.float32)[..., None]
        entries = torch.where(scales > 0, (grouped / scales).round(), torch.zeros_like(grouped))
        flat = entries.to(torch.int8).flatten(-2)[..., : self._depth]
        return torch.cat([flat, high.to(torch.int16).view(torch.int8)], -1)


class LlamaSession(Session):
    """Keys and values, a tensor a layer: [keys then values of the kv_heads, slots, width of a held head].

    Attention wants them in one piece, so a session that grows is copied, layer after layer: beside the new slots only
    one layer's old ones are there at any time.
    """

    def __init__(self, capacity: int, room: int, config: LlamaConfig, holding: KVFormat, device: torch.device) -> None:
        super().__init__(capacity, room)
        self.last_position = config.max_positions - 1
        shape = (2 * config.num_kv_heads, 0, holding.width)
        self.kv = [torch.empty(shape, dtype=holding.dtype, device=device) for _ in range(config.num_layers)]

    def read(self, length: int) -> Tensor:
        """What the first `length` slots hold. [layers, keys then values of the kv_heads, length, width]"""
        return torch.stack([layer[:, :length] for layer in self.kv])

    @torch.inference_mode()
    def _resize(self, slots: int) -> None:
        held = min(slots, self.length + self.pending)
        for number, layer in enumerate(self.kv):
            grown = layer.new_empty(layer.shape[0], slots, layer.shape[2])
            grown[:, :held] = layer[:, :held]
            self.kv[number] = grown

    @torch.inference_mode()
    def _move(self, source: Sequence[int], start: int) -> None:
        index = to_device(source, np.int64, self.kv[0].device)
        for layer in self.kv:
            layer[:, start : start + len(source)] = layer[:, index]

    @torch.inference_mode()
    def _copy(self, other: LlamaSession, length: int) -> None:
        for mine, others in zip(self.kv, other.kv, strict=True):
            mine[:, :length] = others[:, :length]
