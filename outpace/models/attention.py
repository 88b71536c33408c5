"""Attention of a few tree nodes over one session's keys and values: exact, whatever the order of summing, or fast.

Exact: keys of a tree lie in other slots, and among other nodes, than the same keys lie in once they are committed, so
sums must not depend on order. Numbers on a common grid, few enough bits wide, add up in float64 without any rounding:
then every order gives the same bits. Queries, keys and values are rounded to grids fixed by bounds that follow from
the weights alone; the softmax weights to 2^-25. The error is below float32's own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_BITS = 26  # |q|, |k| within 2^26 grid units each: their dot product within 2^52, exact in float64
_VALUE_BITS = 27  # |v| within 2^27 units, weights within 2^25 and summing to 1: within 2^53
_SUM_GRID = 1.5 * 2.0**16  # adding and taking off 1.5 * 2^(52-b) rounds to multiples of 2^-b: here b = 36
_WEIGHT_GRID = 1.5 * 2.0**27  # b = 25


def grid_constant(bound: float, bits: int) -> float:
    """The number whose addition and subtraction in float64 rounds to a grid of `bits` bits below `bound`."""
    return 1.5 * 2.0 ** (52 + math.ceil(math.log2(max(bound, 1e-30))) - bits)


def on_grid(x: Tensor, constant: Tensor) -> Tensor:
    """x as float64, rounded to the grid of `constant` (float64, broadcast against x)."""
    return torch.add(x, constant).sub_(constant)


class ExactAttention:
    """Keys and values in float64 on grids; sums that are exact, hence the same in every order."""

    dtype = torch.float64

    def __init__(self, query_key_bounds: Tensor, value_bounds: Tensor) -> None:
        """Bounds on the norms of each head's queries and keys [heads + kv_heads] and on each value head [kv_heads]."""
        halves = [grid_constant(float(bound), _HALF_BITS) for bound in query_key_bounds]
        values = [grid_constant(float(bound), _VALUE_BITS) for bound in value_bounds]
        self._halves = torch.tensor(halves, dtype=torch.float64)[:, None]  # [heads + kv_heads, 1]
        self._values = torch.tensor(values, dtype=torch.float64)[:, None]  # [kv_heads, 1]

    def prepare(self, query_key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds [nodes, heads + kv_heads, d] and [nodes, kv_heads, d] to their grids, float64."""
        return on_grid(query_key, self._halves), on_grid(value, self._values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
        """query [nodes, heads, d], keys and values [kv_heads, slots, d] -> [nodes, heads * d] float32.

        `hidden` [nodes, pending] is -inf where a node does not see one of the last slots; None: all is seen.
        """
        nodes, heads, width = query.shape
        groups = len(keys)
        query = query.view(nodes, groups, -1, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
        scores = torch.bmm(query, keys.transpose(1, 2))  # [kv_heads, heads / kv_heads * nodes, slots]
        if hidden is not None:
            tail = scores.view(groups, -1, nodes, scores.shape[-1])[..., -hidden.shape[-1] :]
            tail.add_(hidden)
        scores.sub_(scores.amax(-1, keepdim=True))
        weights = torch.add(scores.to(torch.float32).exp_(), scores.new_tensor([_SUM_GRID])).sub_(_SUM_GRID)
        weights.div_(weights.sum(-1, keepdim=True)).add_(_WEIGHT_GRID).sub_(_WEIGHT_GRID)
        mixed = torch.bmm(weights, values).view(groups, -1, nodes, width)
        return mixed.permute(2, 0, 1, 3).to(torch.float32).reshape(nodes, heads * width)


class FastAttention:
    """The library's fused attention, in the model's own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, query_key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to round."""
        return query_key, value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
        """As ExactAttention.attend."""
        nodes, heads, width = query.shape
        mask = None
        if hidden is not None:
            mask = F.pad(hidden.to(query.dtype), (keys.shape[1] - hidden.shape[1], 0))  # [nodes, slots]
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], mask, scale=1.0, enable_gqa=heads != len(keys)
        )
        return mixed[0].transpose(0, 1).reshape(nodes, heads * width)
