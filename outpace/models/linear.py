"""Linear layers whose rows do not see one another: packed once, and probed for how many rows they must take at a time.

Equal text needs equal arithmetic: a row's product must not depend on how many other rows travel with it. Stock matrix
products choose their kernel by the row count; some are bitwise alike over many counts, and `find_row_bucket` finds the
multiple that rows must be padded to on this machine for this to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """A linear layer."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs] to x W^T + b (+ residual) [rows, outputs]."""


BUCKETS = (1, 2, 4, 8, 16)
LARGEST = 256  # rows a call; longer inputs are cut
LEAST = 4  # rows a call: oneDNN's packed product takes longer for one or two (23, 25 and 19 ms for 1, 2 and 4)
_PROBED = (*range(1, 17), 24, 32, 48, 64, 128, LARGEST)


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [rows, inputs] -> x W^T + b [rows, outputs], with W [outputs, inputs] laid out anew for few rows on a CPU.

    oneDNN's packed float32 product takes 8 rows in the time of one, where the stock one takes twice as long.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return partial(_stock, weight, bias)
    return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8), bias)


def _stock(weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    product = F.linear(x, weight, bias)
    return product if residual is None else product.add_(residual)


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        return product.default(x, packed, bias, "none", [], "")
    return product.binary(x, residual, packed, bias, "add")


def find_row_bucket(linears: Sequence[tuple[Linear, int]], largest: int = LARGEST) -> int | None:
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


def padding(rows: int, bucket: int | None) -> int:
    """Rows to add so that the count is one that was probed, and not a slow one; 0 where nothing was probed."""
    return 0 if bucket is None else max(rows + -rows % bucket, LEAST) - rows


def _same(linear: Linear, x: Tensor, reference: Tensor, start: int, count: int) -> bool:
    return torch.equal(linear(x[start : start + count].contiguous()), reference[start : start + count])
