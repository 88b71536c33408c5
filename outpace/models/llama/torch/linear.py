"""Linear layers, packed once, with row counts at which a row's result does not depend on the other rows.

Equal text needs equal arithmetic: a row's product must not depend on how many other rows are computed with it. Matrix
products of the library choose their kernel by the row count, but some agree bitwise over many counts.
`find_row_counts` finds the counts that agree on this machine; exact mode pads to those and uses no others.
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
        """Compute x W^T + b (+ residual): [rows, inputs] to [rows, outputs]"""


# Row counts to try. Fewer than four rows take oneDNN's packed product longer (23, 25, 19 ms for 1, 2, 4).
COUNTS = (4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
HEAD_COUNTS = COUNTS[:11]  # the output layer is large, and only a few rows need logits
FIXED = 64  # rows of every product in captured passes, where other counts cannot be probed
SMALLEST = 16  # exact mode needs a count of at most this many rows


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Make a linear layer of W [outputs, inputs], repacked for small row counts on a CPU.

    oneDNN's packed product takes 8 rows in the time of one, where the stock product takes twice as long; bfloat16
    takes half the time of float32. Float16 has no such product on most CPUs and uses the stock one.
    """
    if not can_pack(weight.device, weight.dtype):
        return partial(stock, weight, bias)
    return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8), bias)


def plain_rows(linear: Linear) -> tuple[Tensor, bool]:
    """Return the weights of a layer that `pack` made, [outputs, inputs], and whether they are a copy, as where they
    were repacked."""
    assert isinstance(linear, partial)
    weight: Tensor = linear.args[0]
    return (weight.to_dense(), True) if weight.is_mkldnn else (weight, False)


def pack_first(rows: Tensor, first: int, others: int) -> tuple[Linear, Tensor]:
    """Make a linear layer of the first rows of a weight matrix, and of `others` rows of zeros; return these too, to be
    written to at any time."""
    weight = torch.cat([rows[:first], rows.new_zeros(others, rows.shape[1])])
    if not can_pack(rows.device, rows.dtype):
        return partial(stock, weight, None), weight[first:]
    changing = weight[first:].clone()
    return partial(_joined, pack(weight[:first]), changing), changing


def _joined(packed: Linear, changing: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    assert residual is None
    return torch.cat([packed(x), F.linear(x, changing)], 1)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a packed product for this type on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def stock(weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Compute the product by torch's own kernel."""
    product = F.linear(x, weight, bias)
    return product if residual is None else product.add_(residual)


def add_product(linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """Compute `linear(x, residual)`, overwriting the residual if torch's own product can add to it."""
    weight = _plain_weight(linear)
    return linear(x, residual) if weight is None else residual.addmm_(x, weight.t())


def float_product(linear: Linear, x: Tensor) -> Tensor:
    """Compute `linear(x)` in float32; sums are not rounded to x's dtype if torch can avoid it.

    The two highest of many logits are often closer than half precisions can distinguish.
    """
    weight = _plain_weight(linear) if x.dtype != torch.float32 and x.is_cuda else None
    if weight is None or "dtype" not in torch.ops.aten.mm.overloads():  # torch has it since 2.8
        return linear(x).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _plain_weight(linear: Linear) -> Tensor | None:
    """Return the weight of a stock product without a bias; None for any other layer."""
    if not isinstance(linear, partial) or linear.func is not stock or linear.args[1] is not None:
        return None
    weight: Tensor = linear.args[0]
    return weight


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        return product.default(x, packed, bias, "none", [], "")
    return product.binary(x, residual, packed, bias, "add")


def find_row_counts(
    linears: Sequence[tuple[Linear, int]], counts: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Return those of `counts` (rising) for which no row's bits depend on its neighbours; empty if there are too few.

    `linears` come with their input widths. Every count is compared with the largest at two offsets.
    """
    alike = set(counts)
    largest = counts[-1]
    for linear, inputs in linears:
        x = torch.randn(largest, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)
        reference = linear(x)
        for count in sorted(alike):
            for start in (0, largest - count):
                rows = slice(start, start + count)
                if not torch.equal(linear(x[rows].contiguous()), reference[rows]):
                    alike.discard(count)
    return tuple(sorted(alike)) if alike and min(alike) <= SMALLEST else ()


def rows_are_independent(
    linears: Sequence[tuple[Linear, int]], count: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether no row's bits depend on its place among `count` rows or on the other rows.

    `linears` come with their input widths. Every row is tried at several places, and one alone among rows of zeros.
    """
    for linear, inputs in linears:
        x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs)).to(device, dtype)
        expected = linear(x)
        shifts = sorted({1 << bit for bit in range(count.bit_length() - 1)} | {count // 2 + 1, count - 1})
        rolled = [torch.equal(linear(x.roll(shift, 0)), expected.roll(shift, 0)) for shift in shifts]
        alone = torch.zeros_like(x)
        alone[count // 3] = x[0]
        if not all(rolled) or not torch.equal(linear(alone)[count // 3], expected[0]):
            return False
    return True


def pad_rows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Append rows of zeros so that `apply_in_chunks` uses allowed counts only; return x itself if there are none."""
    if not counts:
        return x
    rest = len(x) % counts[-1]
    missing = next(count for count in counts if count >= rest) - rest if rest else 0
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def apply_in_chunks(linear: Linear, x: Tensor, residual: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Compute the product of padded rows, in calls of at most as many rows as were probed."""
    if not counts or len(x) <= counts[-1]:
        return linear(x, residual)
    pieces = x.split(counts[-1])
    rests = [None] * len(pieces) if residual is None else residual.split(counts[-1])
    return torch.cat([linear(piece, rest) for piece, rest in zip(pieces, rests, strict=True)])
