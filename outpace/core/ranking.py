"""The largest of rows on a device, largest first, equal ones by place: the same whatever the device.

`torch.topk` leaves open which of equal values it gives. Here each is made a whole number of its own first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_BELOW_SIGN = 0x7FFFFFFF


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places and values of the `count` largest of each row: int64 and as they are [rows, count]. A nan is largest."""
    width = values.shape[-1]
    if values.dtype != torch.float32:
        top = values.sort(dim=-1, descending=True, stable=True)
        return top.indices[..., :count], top.values[..., :count]
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    rising = bits ^ ((bits >> 31) & _BELOW_SIGN)  # in the order of the values
    last = torch.arange(width - 1, -1, -1, device=values.device)
    keys = rising.long().mul_(width).add_(last)
    top_keys = keys.topk(count, dim=-1).values
    places = (width - 1) - top_keys.remainder(width)
    return places, values.gather(-1, places)
