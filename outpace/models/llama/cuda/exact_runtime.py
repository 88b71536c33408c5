"""Captured forwards in exact mode: a row's bits depend on its token, prefix and ancestors alone, whatever the bucket.

Two things make sums depend on a bucket. Products: here every one takes `FIXED` rows, padded or in pieces, and so do the
norms, whose kernels a GPU chooses by the shape too; that a row's place among them leaves it alone is tried out at every
start, on the device that will run. Attention: its numbers lie on grids in float64, where sums are exact
(`ExactAttention`), so slots, sessions and nodes may be as many as they like.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from outpace.models.llama.cuda.draft_steps import SteppingLlama
from outpace.models.llama.torch.attention import ExactAttention, attend_batch_exactly, tree_mask
from outpace.models.llama.torch.linear import FIXED, Linear, rows_stay
from outpace.models.llama.torch.weights import Normed


class ExactGraphLlama(SteppingLlama):
    """As GraphLlama. Keys and values are float64, unless they are held in fewer bits."""

    exact_where = f"whose products of {FIXED} rows give a row other bits at another place"

    def _mask(self, given: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        """True where a slot is hidden."""
        return tree_mask(given["bits"], given["lengths"], given["depths"], given["below"], slots, window) < 0

    def _attend_all(self, number: int, query: Tensor, held: Tensor, mask: Tensor) -> Tensor:
        attention = self._attention[number]
        assert isinstance(attention, ExactAttention)
        if not self._holding.is_own:
            held = attention.rounded(held)
        keys, values = held
        mixed = attend_batch_exactly(query, keys, values, mask).to(self.dtype)
        missing = -len(mixed) % FIXED
        return torch.cat([mixed, mixed.new_zeros(missing, mixed.shape[1])]) if missing else mixed

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm(piece, weight) for piece in x.split(FIXED)])

    def _norm_heads(self, mixed: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm_heads(piece, weight) for piece in mixed.split(FIXED)])

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layer, hidden, config = self._layers[0], self.config.hidden_size, self.config
        narrow = [(self._tried(normed), hidden) for normed in (layer.qkv, layer.gate_up, self._head)]
        wide = [(layer.output, config.num_heads * config.head_dim), (layer.down, config.intermediate_size)]
        if not config.sandwich_norms:
            wide = [(partial(_added, linear, hidden), inputs) for linear, inputs in wide]
        alike = rows_stay([*narrow, *wide], FIXED, self.dtype, self.device)
        return ((FIXED,), (FIXED,)) if alike else ((), ())

    def _tried(self, normed: Normed) -> Linear:
        return lambda x, residual=None: normed.linear(self._norm(x, normed.norm), residual)


def _added(linear: Linear, hidden: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """As the forward calls it, with a residual: that is another kernel on a CPU."""
    return linear(x, x.new_ones(len(x), hidden))
