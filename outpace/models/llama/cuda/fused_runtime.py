"""Captured passes whose layers take ten launches: four products, and the kernels of `triton_kernels.py` between them.

They do not support exact mode, in which every operation must give a row the same bits whatever the bucket. Import this
module only if Triton is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outpace.core.noise import slow_path_warning
from outpace.models.base import chain
from outpace.models.llama.config.families import GELU
from outpace.models.llama.cuda import triton_kernels
from outpace.models.llama.cuda.captures import Captures, StaticInputs, pass_shapes
from outpace.models.llama.cuda.runtime import NO_STATES, GraphLlama, save_states
from outpace.models.llama.torch.linear import Linear, add_product, float_product


class FusedLlama(GraphLlama):
    """Captured passes with fused kernels and float32 logits. Encoded keys and values use the unfused attention."""

    min_slots = 512  # fused attention skips empty slots, so few captures serve all short texts

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.attention = "fused" if self._kv_format.is_own else "matmul"
        self.score_dtype = torch.float32
        self._floor, self._head_floor = float(self._norm_floor), float(self._head_norm_floors[self.config.head_dim])

    @classmethod
    def from_tensors(cls, *args: Any, **options: Any) -> GraphLlama:  # type: ignore[override]
        """Build a model; if a kernel does not compile, return the same model without our kernels, with a notice."""
        model = super().from_tensors(*args, **options)
        try:
            model.try_kernels()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's errors are of many types
            return model.by_torch(f"{type(error).__name__}: {error}")
        return model

    @torch.inference_mode()
    def try_kernels(self) -> None:
        """Run a small pass, and attention in its largest programs over one and over several pieces.

        Whatever would fail later fails here.
        """
        self.score([chain(self.open(2, 1), [0], [0])])
        if self.attention != "fused":
            return
        heads, groups, width = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        nodes, piece = triton_kernels.MAX_ROWS, triton_kernels.PIECE
        inputs = StaticInputs(pass_shapes(1, nodes), self.device).device
        query = torch.zeros(nodes, heads, width, dtype=self.dtype, device=self.device)
        for slots, window in product((piece, 4 * piece), self._windows):
            triton_kernels.attend(query, query.new_zeros(2, 1, groups, slots, width), inputs, slots, window)

    def by_torch(self, reason: str) -> GraphLlama:
        """Return the same model without our kernels, with the reason in its notice."""
        weights = self._layers, self.embedding, self._head
        model = GraphLlama(self.config, *weights, self.exact, self._head_ids, self.kv_dtype)
        model.captures = Captures(self.captures.is_eager)
        model.notice = slow_path_warning(reason)
        return model

    def _layers_pass(
        self, start: int, inputs: dict[str, Tensor], slots: int, saved: Mapping[int, Tensor] = NO_STATES
    ) -> None:
        if self.attention != "fused":
            super()._layers_pass(start, inputs, slots, saved)
            return
        x = self._embed(inputs["tokens"].flatten())
        for number in range(len(self._layers)):
            save_states(saved, number, x)
            x = self._mlp(number, self._fused_attention(number, start, x, inputs, slots))
        self._hidden[: len(x)].copy_(x)

    def _fused_attention(self, number: int, start: int, x: Tensor, inputs: dict[str, Tensor], slots: int) -> Tensor:
        layer, config = self._layers[number], self.config
        kv = self.pool.kv[number][:, start : start + len(inputs["lengths"])]
        qkv = self._apply_normed(layer.qkv, x)
        places, table = (inputs["positions"], inputs["slots"]), self._rope.of_layer(number)
        query = triton_kernels.rotate_and_store(
            qkv, layer.head_norm, self._head_floor, table, *places, kv, config.attention_scale
        )
        attended = triton_kernels.attend(query, kv, inputs, slots, config.window(number))
        return self._add_attention(number, attended, x)

    def _mlp(self, number: int, x: Tensor, sessions: Any = ()) -> Tensor:
        if any(rows.mlp_bias is not None for rows in sessions):
            return super()._mlp(number, x, sessions)
        layer = self._layers[number]
        gated = triton_kernels.gated(self._apply_normed(layer.gate_up, x), self.config.activation == GELU)
        assert layer.down is not None
        return self._add(layer.down, layer.down_norm, gated, x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return triton_kernels.norm(x.contiguous(), weight, self._floor)

    def _head_product(self, linear: Linear, normed: Tensor) -> Tensor:
        return float_product(linear, normed)

    def _apply(self, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply a product, overwriting the residual, which has no other use."""
        return linear(x) if residual is None else add_product(linear, x, residual)
