"""Linear layers whose rows do not see one another: packed once, and probed for how many rows they must take at a time.

Equal text needs equal arithmetic: a row's product must not depend on how many other rows travel with it. Stock matrix
products choose their kernel by the row count; some are bitwise alike over many counts, and `row_bucket` finds the
multiple that rows must be padded to on this machine for this to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

BUCKETS = (1, 2, 4, 8, 16)
LARGEST = 256  # rows a call; longer inputs are cut
_PROBED = (*range(1, 17), 24, 32, 48, 64, 128, LARGEST)


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [rows, inputs] -> x W^T + b [rows, outputs], with W [outputs, inputs] laid out anew for few rows on a CPU.

    oneDNN's packed float32 product takes 8 rows in the time of one, where the stock one takes twice as long.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, packed, bias, "none", [], "")


def row_bucket(linears: Sequence[tuple[Linear, int]], largest: int = LARGEST) -> int | None:
    """The smallest bucket of rows for which no row's bits depend on its neighbours; None where there is none.

    `linears` come with their input widths. Compares every probed row count, at two places, with the largest.
    """
    alike = set(_PROBED)
    for linear, inputs in linears:
        x = torch.randn(largest, inputs, generator=torch.Generator().manual_seed(inputs))
        counts = sorted(count for count in alike if count <= largest)
        reference = linear(x)
        for count in counts:
            if not (_same(linear, x, reference, 0, count) and _same(linear, x, reference, largest - count, count)):
                alike.discard(count)
    for bucket in BUCKETS:
        if all(count in alike for count in _PROBED if count % bucket == 0 and count <= largest):
            return bucket
    return None


def _same(linear: Linear, x: Tensor, reference: Tensor, start: int, count: int) -> bool:
    return torch.equal(linear(x[start : start + count].contiguous()), reference[start : start + count])
