"""Attention of a few tree nodes over one session's keys and values: exact, whatever the order of summing, or fast.

Exact: keys of a tree lie in other slots, and among other nodes, than the same keys lie in once they are committed, so
sums must not depend on order. Numbers on a common grid, few enough bits wide, add up in float64 without any rounding:
then every order gives the same bits. Queries, keys and values are rounded to grids fixed by bounds that follow from
the weights alone; the softmax weights to 2^-25. The error is below float32's own.
"""

from __future__ import annotations

import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_HALF_BITS = 26  # |q|, |k| within 2^26 grid units each: their dot product within 2^52, exact in float64
_VALUE_BITS = 27  # |v| within 2^27 units, weights within 2^25 and summing to 1: within 2^53
_SUM_GRID = 1.5 * 2.0**16  # adding and taking off 1.5 * 2^(52-b) rounds to multiples of 2^-b: here b = 36
_WEIGHT_GRID = 1.5 * 2.0**27  # b = 25
_SETTING = threading.Lock()  # which of torch's kernels may run is the process's setting; cuDNN's plans each new length


def grid_constant(bound: float, bits: int) -> float:
    """The number whose addition and subtraction in float64 rounds to a grid of `bits` bits below `bound`."""
    return 1.5 * 2.0 ** (52 + math.ceil(math.log2(max(bound, 1e-30))) - bits)


def rotated(mixed: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring pairs by unit numbers [nodes, heads, d / 2]. [nodes, heads * d] to [nodes, heads, d]"""
    pairs = torch.view_as_complex(mixed.unflatten(1, (turn.shape[1], -1, 2)))
    return torch.view_as_real(pairs * turn).flatten(2)


def exact_weights(scores: Tensor) -> Tensor:
    """The softmax over the last dimension, rounded to grids so that neither its sum nor what it weighs has an order.
    float64, in place."""
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().add_(_SUM_GRID).sub_(_SUM_GRID)
    return weights.div_(weights.sum(-1, keepdim=True)).add_(_WEIGHT_GRID).sub_(_WEIGHT_GRID)


class ExactAttention:
    """Keys and values in float64 on grids; sums that are exact, hence the same in every order."""

    dtype = torch.float64
    turn_dtype = torch.complex128

    def __init__(self, bounds: Tensor, device: torch.device) -> None:
        """Bounds on each head's queries and keys (norms), then on each value head (entries): [heads + 2 kv_heads, 2],
        the second column 1 where the row is a value head's."""
        constants = [grid_constant(float(b), _VALUE_BITS if is_value else _HALF_BITS) for b, is_value in bounds]
        self._grid = torch.tensor(constants, dtype=torch.float64, device=device)[:, None]  # [heads + 2 kv_heads, 1]

    def prepare(self, mixed: Tensor, turn: Tensor) -> Tensor:
        """Queries, keys and values side by side, turned and rounded to their grids: float64 [nodes, heads.., d]."""
        return rotated(mixed.double(), turn).add_(self._grid).sub_(self._grid)

    def rounded(self, held: Tensor) -> Tensor:
        """Keys, then values, that were held in fewer bits, on their grids again: float64 [2 kv_heads, slots, d], or
        [2, batch, kv_heads, slots, d].

        By fewer bits a key's norm grows by 3 % at most; sums of twice the bound are exact still."""
        if held.dim() == 5:
            grid = self._grid[-2 * held.shape[2] :].view(2, 1, -1, 1, 1)
        else:
            grid = self._grid[-len(held) :, :, None]
        return held.add_(grid).sub_(grid)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, out: Tensor) -> None:
        """query [nodes, heads, d] over keys and values [kv_heads, slots, d], written to `out` [nodes, heads * d].

        `hidden` [nodes, pending] is -inf where a node does not see one of the last slots; None: all is seen.
        """
        nodes, _, width = query.shape
        groups = len(keys)
        query = query.view(nodes, groups, -1, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
        scores = torch.bmm(query, keys.transpose(1, 2))  # [kv_heads, heads / kv_heads * nodes, slots]
        if hidden is not None:
            tail = scores.view(groups, -1, nodes, scores.shape[-1])[..., -hidden.shape[-1] :]
            tail.add_(hidden)
        mixed = torch.bmm(exact_weights(scores), values).view(groups, -1, nodes, width)
        out.view(nodes, groups, -1, width).copy_(mixed.permute(2, 0, 1, 3))


def folded(query: Tensor, batch: int, groups: int) -> Tensor:
    """Heads that share keys laid side by side with the nodes: [batch * nodes, heads, d] to [batch, kv_heads, shared *
    nodes, d]"""
    nodes, width = len(query) // batch, query.shape[2]
    return query.view(batch, nodes, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)


def unfolded(mixed: Tensor, nodes: int) -> Tensor:
    """And back: [batch, kv_heads, shared * nodes, d] to rows [batch * nodes, heads * d]"""
    batch, groups, rows, width = mixed.shape
    parts = mixed.view(batch, groups, rows // nodes, nodes, width).permute(0, 3, 1, 2, 4)
    return parts.reshape(batch * nodes, groups * (rows // nodes) * width)


def attend_folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """As `FastAttention.attend`, heads that share keys laid side by side with the nodes: those of torch's kernels for
    GPUs that take a mask take no shared keys, and its definition, which does, repeats them, and computes in float32."""
    part = folded(query, 1, len(keys))
    wide = None if mask is None else mask.repeat(part.shape[2] // len(query), 1)
    mixed = F.scaled_dot_product_attention(part, keys[None], values[None], wide, scale=1.0)
    out.copy_(unfolded(mixed, len(query)))


class FastAttention:
    """The library's fused attention, in the model's own dtype."""

    turn_dtype = torch.complex64

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def prepare(self, mixed: Tensor, turn: Tensor) -> Tensor:
        """As ExactAttention.prepare, nothing rounded, in the model's dtype."""
        return rotated(mixed.float(), turn).to(self.dtype)

    def rounded(self, held: Tensor) -> Tensor:
        """As they are: no grid is needed."""
        return held

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, out: Tensor) -> None:
        """As ExactAttention.attend."""
        nodes, heads, width = query.shape
        mask = None
        if hidden is not None:
            mask = F.pad(hidden.to(query.dtype), (keys.shape[1] - hidden.shape[1], 0))  # [nodes, slots]
        if query.device.type == "cuda":
            with _SETTING, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                attend_folded(query, keys, values, mask, out)
            return
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], mask, scale=1.0, enable_gqa=heads != len(keys)
        )
        out.view(nodes, heads, width).copy_(mixed[0].transpose(0, 1))
