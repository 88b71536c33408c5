"""Attention of many sessions' tree nodes at once over a pool's keys and values, which are read where they lie.

Heads that share keys are laid side by side with the nodes, so one product a session and key head serves them all
(grouped-query attention, arXiv:2305.13245). Masks are added: what is hidden scores half of the least number, so a row
that sees nothing stays finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.llama.attention import exact_weights, folded, unfolded

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


def prepared(mask: Tensor, groups: int, dtype: torch.dtype, kind: str) -> Tensor:
    """The mask as `attend` takes it, made once for all layers. `groups`: query heads that share keys."""
    if kind == "matmul":
        return mask
    batch, nodes, slots = mask.shape
    least = torch.finfo(dtype).min / 2
    wide = mask.clamp(min=least)[:, None].expand(-1, groups, -1, -1)
    return wide.reshape(batch, 1, groups * nodes, slots).to(dtype)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: str) -> Tensor:
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


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
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
