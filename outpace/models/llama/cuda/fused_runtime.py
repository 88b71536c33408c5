"""Captured forwards whose layers are ten launches: four products, and kernels of `fused.py` between them.

Not for exact mode, where every operation must give a row the same bits whatever the bucket. It is imported where Triton
is there alone.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from outpace.core.triton_support import slow_path_warning
from outpace.models.base import chain
from outpace.models.llama.config.families import GELU
from outpace.models.llama.cuda import triton_kernels
from outpace.models.llama.cuda.captures import MOST_PENDING, WORDS, Captures
from outpace.models.llama.cuda.multi_step_runtime import SteppingLlama
from outpace.models.llama.torch.attention import FUSED, KINDS
from outpace.models.llama.torch.linear import Linear, add_product, in_float32


class FusedLlama(SteppingLlama):
    """As SteppingLlama, with scores in float32. Keys and values in fewer bits are left to it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.attention = FUSED if self._holding.is_own else KINDS[0]
        self.score_dtype = torch.float32
        self._floor, self._head_floor = float(self._norm_floor), float(self._head_norm_floor)

    @classmethod
    def from_tensors(cls, *args: Any, **more: Any) -> SteppingLlama:
        """As GraphLlama's. Where a compiler fails on a kernel of this model, the same model by torch's own operations,
        with a notice."""
        model = super().from_tensors(*args, **more)
        assert isinstance(model, FusedLlama)
        try:
            model.try_kernels()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of many kinds, by what failed
            return model.by_torch(f"{type(error).__name__}: {error}")
        return model

    @torch.inference_mode()
    def try_kernels(self) -> None:
        """A small pass, and attention of the largest programs over one piece and over several: what would fail later
        fails here."""
        self.score([chain(self.open(2, 1), [0], [0])])
        if self.attention != FUSED:
            return
        heads, groups, width = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        nodes, piece = triton_kernels.MOST_ROWS, triton_kernels.PIECE
        shape = {"bits": (1, nodes, WORDS), "lengths": (1,), "depths": (1, nodes), "below": (1, MOST_PENDING)}
        given = {name: torch.zeros(size, dtype=torch.int64, device=self.device) for name, size in shape.items()}
        query = torch.zeros(nodes, heads, width, dtype=self.dtype, device=self.device)
        for slots, window in product((piece, 4 * piece), self._windows):
            triton_kernels.attend(query, query.new_zeros(2, 1, groups, slots, width), given, slots, window)

    def by_torch(self, why: str) -> SteppingLlama:
        """The same model without the kernels; the reason is in its notice."""
        ends, ids = (self._embedding, self._head), self._head_ids
        model = SteppingLlama(self.config, self._layers, *ends, self.exact, ids, self.kv_dtype)
        model.captures, model.quantized = Captures(self.captures.is_eager), self.quantized
        model.notice = slow_path_warning(why)
        return model

    def _layers_pass(self, start: int, given: dict[str, Tensor], slots: int) -> None:
        if self.attention != FUSED:
            super()._layers_pass(start, given, slots)
            return
        x = self._embedded(given["tokens"].flatten())
        for number in range(len(self._layers)):
            x = self._feed(number, self._mix_fused(number, start, x, given, slots), ())
        self._hidden[: len(x)].copy_(x)

    def _mix_fused(self, number: int, start: int, x: Tensor, given: dict[str, Tensor], slots: int) -> Tensor:
        """A layer's attention, for all sessions at once."""
        layer, config = self._layers[number], self.config
        kv = self.pool.kv[number][:, start : start + len(given["lengths"])]
        mixed = self._apply_normed(layer.qkv, x)
        where, scale = (given["positions"], given["slots"], kv), config.attention_scale
        query = triton_kernels.turn(
            mixed, layer.head_norm, self._head_floor, self._turns.of_layer(number), *where, scale
        )
        mixed = triton_kernels.attend(query, kv, given, slots, config.window(number))
        return self._add_mixed(number, mixed, x)

    def _feed(self, number: int, x: Tensor, spans: Any) -> Tensor:
        if any(span.steer is not None for span in spans):
            return super()._feed(number, x, spans)
        layer = self._layers[number]
        gated = triton_kernels.gated(self._apply_normed(layer.gate_up, x), self.config.activation == GELU)
        return self._add(layer.down, layer.down_norm, gated, x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return triton_kernels.norm(x.contiguous(), weight, self._floor)

    def _scored(self, normed: Tensor) -> Tensor:
        return in_float32(self._head.linear, normed)

    def _apply(self, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The residual is written over: it has no other use."""
        return linear(x) if residual is None else add_product(linear, x, residual)
