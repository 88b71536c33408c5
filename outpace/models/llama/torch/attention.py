"""Attention over tree nodes: exact (independent of the order of summation) or fast, for one session or for a batch.

Exact attention: a key is stored in another slot, and among other nodes, while it is pending than after it is committed,
so its contribution must not depend on the order of summation. Numbers on a common grid that are few enough bits wide
add up in float64 without rounding, so every order gives the same bits. Queries, keys and values are rounded to grids
whose bounds follow from the weights; the softmax weights are rounded to 2^-25. The error is below that of float32.

Attention for a batch reads a pool's keys and values in place. Heads that share keys are folded into the nodes, so one
product per session and key head serves them all (grouped-query attention, arXiv:2305.13245). Masks are added to the
scores: a hidden slot gets half of the lowest number, so a row that sees nothing stays finite.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from outpace.core.arrays import to_device
from outpace.models.base import Part

_HALF_BITS = 26  # |q|, |k| within 2^26 grid units each: their dot product is within 2^52, exact in float64
_VALUE_BITS = 27  # |v| within 2^27 units, weights within 2^25 and summing to 1: within 2^53
_SUM_GRID = 1.5 * 2.0**16  # adding and subtracting 1.5 * 2^(52-b) rounds to multiples of 2^-b: here b = 36
_WEIGHT_GRID = 1.5 * 2.0**27  # b = 25
_HIDDEN = -1e300  # finite, so that a row that sees nothing stays finite
_SDPA_SETTING = threading.Lock()  # the choice of torch's SDPA backends is global; cuDNN plans anew for every length


def grid_constant(bound: float, bits: int) -> float:
    """Return the number whose addition and subtraction in float64 rounds to a grid of `bits` bits below `bound`."""
    return 1.5 * 2.0 ** (52 + math.ceil(math.log2(max(bound, 1e-30))) - bits)


def rotate_pairs(qkv: Tensor, factors: Tensor) -> Tensor:
    """Multiply neighbouring pairs by complex factors [nodes, heads, d / 2]: [nodes, heads * d] to [nodes, heads, d]"""
    pairs = torch.view_as_complex(qkv.unflatten(1, (factors.shape[1], -1, 2)))
    return torch.view_as_real(pairs * factors).flatten(2)


def exact_weights(scores: Tensor) -> Tensor:
    """Compute the softmax over the last dimension in place, float64, rounded to grids so that all sums are exact."""
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().add_(_SUM_GRID).sub_(_SUM_GRID)
    return weights.div_(weights.sum(-1, keepdim=True)).add_(_WEIGHT_GRID).sub_(_WEIGHT_GRID)


def capped(x: Tensor, cap: float) -> Tensor:
    """Compute cap tanh(x / cap) in place, by exponentials as softmax does; 0: no cap."""
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0 * cap).add_(cap) if cap else x


class ExactAttention:
    """Keys and values in float64 on grids, with exact sums."""

    dtype = torch.float64
    factor_dtype = torch.complex128

    def __init__(self, bounds: Tensor, device: torch.device, sinks: Tensor | None = None, cap: float = 0.0) -> None:
        """Take the bounds of each head's queries and keys (norms), then of each value head (entries).

        `bounds` [heads + 2 kv_heads, 2]; the second column is 1 for a value head. `sinks` [heads]: see `LayerWeights`.
        `cap`: of the scores, 0 without one.
        """
        self._cap = cap
        constants = [grid_constant(float(b), _VALUE_BITS if is_value else _HALF_BITS) for b, is_value in bounds]
        self._sinks = None if sinks is None else sinks.double()
        self._grid = torch.tensor(constants, dtype=torch.float64, device=device)[:, None]  # [heads + 2 kv_heads, 1]

    def prepare(self, qkv: Tensor, factors: Tensor) -> Tensor:
        """Rotate queries, keys and values and round them to their grids: float64 [nodes, heads + 2 kv_heads, d]"""
        return rotate_pairs(qkv.double(), factors).add_(self._grid).sub_(self._grid)

    def round_stored(self, stored: Tensor) -> Tensor:
        """Round keys and values that were stored in fewer bits to their grids again, in place.

        `stored` float64 [2, kv_heads, slots, d] or [2, batch, kv_heads, slots, d]. Storing in fewer bits lengthens a
        key by at most 3 %; sums of twice the bound are still exact.
        """
        grid = self._grid[-2 * stored.shape[-3] :].view(2, *[1] * (stored.dim() - 4), -1, 1, 1)
        return stored.add_(grid).sub_(grid)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Attend with query [nodes, heads, d] over [kv_heads, slots, d]; write to `out` [nodes, heads * d].

        `mask` [nodes, last slots] is -inf for hidden slots among the last ones; None hides nothing.
        """
        scores = capped(_folded_scores(query, keys[None], torch.bmm), self._cap)
        if mask is not None:
            scores[..., -mask.shape[-1] :].add_(mask)
        out.copy_(_weighted_sum(_weights_with(self._sinks, scores, exact_weights), values[None]))


def fold_heads(query: Tensor, batch: int, groups: int) -> Tensor:
    """Fold heads that share keys into the nodes: [batch * nodes, heads, d] to [batch, kv_heads, shared * nodes, d]"""
    nodes, width = len(query) // batch, query.shape[2]
    return query.view(batch, nodes, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)


def unfold_heads(attended: Tensor, nodes: int) -> Tensor:
    """Undo `fold_heads`: [batch, kv_heads, shared * nodes, d] to rows [batch * nodes, heads * d]"""
    return attended.unflatten(2, (-1, nodes)).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)


def attend_folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """Do the same as `FastAttention.attend` with folded heads.

    The GPU kernels of torch that take a mask take no shared keys; its plain definition takes both, but repeats the keys
    and computes in float32.
    """
    folded = fold_heads(query, 1, len(keys))
    wide = None if mask is None else mask.repeat(folded.shape[2] // len(query), 1)
    attended = F.scaled_dot_product_attention(folded, keys[None], values[None], wide, scale=1.0)
    out.copy_(unfold_heads(attended, len(query)))


class FastAttention:
    """Torch's fused attention, in the model's own dtype."""

    factor_dtype = torch.complex64

    def __init__(self, dtype: torch.dtype, sinks: Tensor | None = None, cap: float = 0.0) -> None:
        self.dtype, self._sinks, self._cap = dtype, None if sinks is None else sinks.float(), cap

    def prepare(self, qkv: Tensor, factors: Tensor) -> Tensor:
        """Rotate queries, keys and values, in the model's dtype: [nodes, heads + 2 kv_heads, d]"""
        return rotate_pairs(qkv.float(), factors).to(self.dtype)

    def round_stored(self, stored: Tensor) -> Tensor:
        """Return stored keys and values as they are: no grid is needed."""
        return stored

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Do the same as `ExactAttention.attend`, in the model's dtype."""
        if self._sinks is not None or self._cap:  # torch's fused attention has neither
            scores = capped(_folded_scores(query, keys[None], _float_product), self._cap)
            if mask is not None:
                scores[..., -mask.shape[-1] :].add_(mask)
            weights = _weights_with(self._sinks, scores, partial(torch.softmax, dim=-1))
            out.copy_(_weighted_sum(weights.to(values.dtype), values[None]))
            return
        wide = None if mask is None else F.pad(mask.to(query.dtype), (keys.shape[1] - mask.shape[1], 0))
        if query.device.type == "cuda":
            with _SDPA_SETTING, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                attend_folded(query, keys, values, wide, out)
            return
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            wide,
            scale=1.0,
            enable_gqa=query.shape[1] != len(keys),
        )
        out.view(query.shape).copy_(attended[0].transpose(0, 1))


class WindowView(NamedTuple):
    """The slots that a layer reads: those before `first` are outside every row's window.

    `mask` [nodes, last slots] is -inf where a node does not see one of the last slots; None hides nothing.
    """

    first: int
    mask: Tensor | None


class SessionRows:
    """One session's rows of a forward pass. Creating it reserves their slots. `windows`: the windows of all layers."""

    def __init__(
        self, part: Part, first_row: int, last_position: int, windows: Iterable[int | None], device: torch.device
    ) -> None:
        session, before = part.session, part.session.pending
        visible = session.extend(part.parents)  # [nodes, pending]
        self.session, self.mlp_bias, self.inputs = session, part.mlp_bias, part.inputs
        self.before, self.visible = before, visible
        self.rows = slice(first_row, first_row + len(part.tokens))
        self.used = session.length + session.pending
        self.slots = slice(session.length + before, self.used)
        depths = np.asarray(session.pending_depths, dtype=np.int64)
        length = session.length if part.length is None else part.length
        # a tree may extend past the context; those nodes are never committed
        self.positions = np.minimum(length + depths[before:], last_position).tolist()
        gap = session.length - length  # committed tokens that these nodes do not see
        self.views = {window: _view(length, depths, visible, window, gap, device) for window in windows}


def _view(
    length: int, depths: np.ndarray, visible: np.ndarray, window: int | None, gap: int, device: torch.device
) -> WindowView:
    """Compute what new nodes see: `length` tokens, then `gap` hidden slots, then the pending nodes.

    `visible` [nodes, pending] says which pending nodes each new node sees; `depths` [pending] includes the new nodes.
    A node at position p sees the tokens of its own branch and prefix at positions above p - window.
    """
    new = depths[len(depths) - len(visible) :]
    unseen = np.zeros((len(visible), gap), dtype=bool)
    if window is None or not len(new) or length + new.max() < window:
        return WindowView(0, _mask(np.concatenate([unseen, visible], axis=1), device))
    first = max(0, min(length, length + int(new.min()) + 1 - window))
    positions = np.concatenate([np.arange(first, length), length + depths])
    seen = np.concatenate([np.ones((len(visible), length - first), dtype=bool), visible], axis=1)
    seen &= positions[None] > (length + new - window)[:, None]
    seen = np.concatenate([seen[:, : length - first], unseen, seen[:, length - first :]], axis=1)
    return WindowView(first, _mask(seen, device))


def _mask(seen: np.ndarray, device: torch.device) -> Tensor | None:
    return None if seen.all() else to_device(np.where(seen, 0.0, -np.inf), np.float64, device)


def tree_mask(bits: Tensor, lengths: Tensor, depths: Tensor, below: Tensor, slots: int, window: int | None) -> Tensor:
    """Compute the mask to add to a batch's scores: 0 for a visible slot, else half of the lowest float32.

    float32 [batch, nodes, slots]. `bits` int64 [batch, nodes, words]: bit i of word w is set if the node sees pending
    node 64 w + i. `lengths` [batch]: committed tokens, which all nodes see. `depths` [batch, nodes] of the nodes,
    `below` [batch, 64 words] of the pending nodes. With a `window`, a node sees positions above its own minus the
    window.
    """
    slot = torch.arange(slots, device=bits.device)
    pending = slot - lengths[:, None]  # [batch, slots]: number of the pending node, negative for committed tokens
    words = bits.shape[2]
    clamped = pending.clamp(0, 64 * words - 1)
    word = bits.gather(2, (clamped // 64)[:, None].expand(-1, bits.shape[1], -1))  # [batch, nodes, slots]
    seen = ((word >> (clamped % 64)[:, None]) & 1).bool() & (pending >= 0)[:, None] & (pending < 64 * words)[:, None]
    seen = seen | (pending < 0)[:, None]
    if window is not None:
        offset = torch.where(pending < 0, pending, below.gather(1, clamped))  # position minus the text's length
        seen = seen & (offset[:, None] > depths[:, :, None] - window)
    # not `where` with two numbers: it copies them from the host, which a capture forbids
    return torch.zeros(seen.shape, device=bits.device).masked_fill_(~seen, torch.finfo(torch.float32).min / 2)


def attend_batch(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with scaled query [batch * nodes, heads, d] over [batch, kv_heads, slots, d]; return [rows, heads * d].

    `mask` is that of `tree_mask`.
    """
    scores = _folded_scores(query, keys, _float_product).add_(mask[:, None, None])
    return _weighted_sum(scores.softmax(-1).to(values.dtype), values)


def attend_batch_exactly(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Do the same as `attend_batch` in float64 for numbers on the grids of `ExactAttention`.

    Sums are exact, so a row's bits depend neither on the number of slots, nodes and sessions nor on the slots of its
    keys. `hidden` bool [batch, nodes, slots].
    """
    scores = _folded_scores(query, keys, torch.bmm).masked_fill_(hidden[:, None, None], _HIDDEN)
    return _weighted_sum(exact_weights(scores), values)


def _folded_scores(query: Tensor, keys: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Multiply queries by the keys that they share: [batch, kv_heads, shared, nodes, slots]"""
    batch, groups, slots, _ = keys.shape
    scores = product(fold_heads(query, batch, groups).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    return scores.view(batch, groups, -1, len(query) // batch, slots)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values by weights [batch, kv_heads, shared, nodes, slots]: rows [batch * nodes, heads * d]"""
    batch, groups, _, nodes, _ = weights.shape
    attended = torch.bmm(weights.flatten(2, 3).flatten(0, 1), values.flatten(0, 1))
    return unfold_heads(attended.unflatten(0, (batch, groups)), nodes)


def _weights_with(sinks: Tensor | None, scores: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the weights of slots from scores [batch, kv_heads, shared, nodes, slots], less what the heads' sinks
    take."""
    if sinks is None:
        return softmax(scores)
    column = sinks.view(scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return softmax(torch.cat([scores, column], -1))[..., :-1]


def _float_product(query: Tensor, keys: Tensor) -> Tensor:
    """Compute scores in float32 whatever the dtype; on a GPU the product itself keeps float32 sums."""
    if query.dtype == torch.float32:
        return torch.bmm(query, keys)
    if query.device.type == "cuda":
        if "dtype" in torch.ops.aten.bmm.overloads():  # since torch 2.8
            return torch.bmm(query, keys, out_dtype=torch.float32)
        return torch.bmm(query.float(), keys.float())
    return torch.bmm(query, keys).float()
