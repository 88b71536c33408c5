"""Attention of a few tree nodes over one session's keys and values: exact, whatever the order of summing, or fast.

Exact: keys of a tree lie in other slots, and among other nodes, than the same keys lie in once they are committed, so
sums must not depend on order. Numbers on a common grid, few enough bits wide, add up in float64 without any rounding:
then every order gives the same bits. Queries, keys and values are rounded to grids fixed by bounds that follow from
the weights alone; the softmax weights to 2^-25. The error is below float32's own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from outpace.core.arrays import to_device
from outpace.models.base import Part

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


class WindowView(NamedTuple):
    """The slots that matter to a layer: those before `first` are out of every row's window.

    `hidden` [nodes, last slots] is -inf where a node does not see one of the last slots; None: all is seen.
    """

    first: int
    hidden: Tensor | None


class SessionRows:
    """One session's part of a forest; reserves its slots. `windows`: those that the model's layers have."""

    def __init__(
        self, part: Part, first_row: int, last_position: int, windows: Iterable[int | None], device: torch.device
    ) -> None:
        session = part.session
        before = session.pending
        sees = session.extend(part.parents)  # [nodes, pending]
        self.session, self.steer, self.inputs = session, part.steer, part.inputs
        self.rows = slice(first_row, first_row + len(part.tokens))
        self.slots = slice(session.length + before, session.length + session.pending)
        self.seen = session.length + session.pending
        depths = np.asarray(session.pending_depths, dtype=np.int64)
        length = session.length if part.length is None else part.length
        # a tree may reach past the context; what lies there is never committed
        self.positions = np.minimum(length + depths[before:], last_position).tolist()
        gap = session.length - length  # committed tokens that are not there for these nodes
        self.views = {window: _view(length, depths, sees, window, gap, device) for window in windows}


def _view(
    length: int, depths: np.ndarray, sees: np.ndarray, window: int | None, gap: int, device: torch.device
) -> WindowView:
    """What nodes `sees` [nodes, pending], the last of those with `depths` [pending], see behind `length` tokens, then
    `gap` slots that nobody sees.

    A node at position p sees the tokens of its own branch and prefix at positions above p - window.
    """
    new = depths[len(depths) - len(sees) :]
    unseen = np.zeros((len(sees), gap), dtype=bool)
    if window is None or not len(new) or length + new.max() < window:
        return WindowView(0, _hidden(np.concatenate([unseen, sees], axis=1) if gap else sees, device))
    first = max(0, min(length, length + int(new.min()) + 1 - window))
    places = np.concatenate([np.arange(first, length), length + depths])
    seen = np.concatenate([np.ones((len(sees), length - first), dtype=bool), sees], axis=1)
    seen &= places[None] > (length + new - window)[:, None]
    if gap:
        seen = np.concatenate([seen[:, : length - first], unseen, seen[:, length - first :]], axis=1)
    return WindowView(first, _hidden(seen, device))


def _hidden(seen: np.ndarray, device: torch.device) -> Tensor | None:
    return None if seen.all() else to_device(np.where(seen, 0.0, -np.inf), np.float64, device)


KINDS = ("matmul", "sdpa")
FUSED = "fused"  # by kernels of our own, see graph_fused.py
_UNSEEN = -1e300  # finite: a row that sees nothing stays so


def tree_mask(bits: Tensor, lengths: Tensor, depths: Tensor, below: Tensor, slots: int, window: int | None) -> Tensor:
    """Added to the scores: 0 where a node sees a slot, else half of the least float32. float32 [batch, nodes, slots]

    `bits` int64 [batch, nodes, words]: bit i of word w is set where the node sees pending node 64 w + i. `lengths`
    [batch]: committed tokens, which all nodes see. `depths` [batch, nodes] of the nodes, `below` [batch, 64 words] of
    the pending ones. With a `window` a node sees positions above its own less the window.
    """
    slot = torch.arange(slots, device=bits.device)
    place = slot - lengths[:, None]  # [batch, slots]; which pending node, below 0 where committed
    words = bits.shape[2]
    held = place.clamp(0, 64 * words - 1)
    word = bits.gather(2, (held // 64)[:, None].expand(-1, bits.shape[1], -1))  # [batch, nodes, slots]
    seen = ((word >> (held % 64)[:, None]) & 1).bool() & (place >= 0)[:, None] & (place < 64 * words)[:, None]
    seen = seen | (place < 0)[:, None]
    if window is not None:
        offset = torch.where(place < 0, place, below.gather(1, held))  # position less the text's length
        seen = seen & (offset[:, None] > depths[:, :, None] - window)
    # not `where` with two numbers: it copies them from the host, which a capture forbids
    return torch.zeros(seen.shape, device=bits.device).masked_fill_(~seen, torch.finfo(torch.float32).min / 2)


def prepare_mask(mask: Tensor, groups: int, dtype: torch.dtype, kind: str) -> Tensor:
    """The mask as `attend` takes it, made once for all layers. `groups`: query heads that share keys."""
    if kind == "matmul":
        return mask
    batch, nodes, slots = mask.shape
    least = torch.finfo(dtype).min / 2
    wide = mask.clamp(min=least)[:, None].expand(-1, groups, -1, -1)
    return wide.reshape(batch, 1, groups * nodes, slots).to(dtype)


def attend_batch(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: str) -> Tensor:
    """query [batch * nodes, heads, d], scaled, over keys and values [batch, kv_heads, slots, d]: rows [.., heads * d].

    `mask` as `prepared` gives it."""
    batch, groups, slots, width = keys.shape
    nodes, part = len(query) // batch, folded(query, batch, groups)
    if kind == "sdpa":
        mixed = F.scaled_dot_product_attention(part, keys, values, mask, scale=1.0)
    else:
        scores = _product(part.flatten(0, 1), keys.view(-1, slots, width).transpose(1, 2))
        scores.view(batch, groups, -1, nodes, slots).add_(mask[:, None, None])
        weights = scores.softmax(-1).to(values.dtype)
        mixed = torch.bmm(weights, values.view(-1, slots, width))
    return unfolded(mixed.view(part.shape), nodes)


def attend_batch_exactly(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """As `attend`, for what `ExactAttention` put on grids, in float64: sums are exact, so a row's bits depend neither
    on the number of slots, nodes and sessions nor on where its keys lie. `hidden` bool [batch, nodes, slots]."""
    batch, groups, slots, width = keys.shape
    nodes, part = len(query) // batch, folded(query, batch, groups)
    scores = torch.bmm(part.flatten(0, 1), keys.view(-1, slots, width).transpose(1, 2))
    scores.view(batch, groups, -1, nodes, slots).masked_fill_(hidden[:, None, None], _UNSEEN)
    mixed = torch.bmm(exact_weights(scores), values.view(-1, slots, width))
    return unfolded(mixed.view(part.shape), nodes)


def _product(query: Tensor, keys: Tensor) -> Tensor:
    """Scores in float32, whatever the dtype: on a GPU the product itself keeps them so."""
    if query.dtype == torch.float32:
        return torch.bmm(query, keys)
    if query.device.type == "cuda":
        if "dtype" in torch.ops.aten.bmm.overloads():  # from torch 2.8 on
            return torch.bmm(query, keys, out_dtype=torch.float32)
        return torch.bmm(query.float(), keys.float())
    return torch.bmm(query, keys).float()
