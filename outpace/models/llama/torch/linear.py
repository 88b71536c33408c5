"""Linear layers whose rows do not see one another: packed once, and probed for how many rows they must take at a time.

Equal text needs equal arithmetic: a row's product must not depend on how many other rows travel with it. Stock matrix
products choose their kernel by the row count; some are bitwise alike over many counts. `find_row_counts` finds those
to which rows may be padded on this machine for this to hold. No product is ever given another count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.options import FP8, INT8


class Linear(Protocol):
    """A linear layer."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs] to x W^T + b (+ residual) [rows, outputs]."""


Pack = Callable[[Tensor, "Tensor | None"], Linear]

# Row counts to try. Fewer than four rows take oneDNN's packed product longer (23, 25, 19 ms for 1, 2, 4).
COUNTS = (4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
HEAD_COUNTS = COUNTS[:11]  # the output layer is large, and few rows are wanted
FIXED = 64  # rows of every product where they cannot be tried out at each count: of captured forwards
SMALLEST = 16  # exact mode is not worth having where no count up to this one is alike


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [rows, inputs] -> x W^T + b [rows, outputs], with W [outputs, inputs] laid out anew for few rows on a CPU.

    oneDNN's packed product takes 8 rows in the time of one, where the stock one takes twice as long; in bfloat16 it
    takes half of float32's. Float16 has no such product on most CPUs and stays with the stock one.
    """
    if not can_pack(weight.device, weight.dtype):
        return partial(stock, weight, bias)
    return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8), bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed product for it on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def stock(weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The library's own product."""
    product = F.linear(x, weight, bias)
    return product if residual is None else product.add_(residual)


def add_product(linear: Linear, x: Tensor, residual: Tensor) -> Tensor:
    """As `linear(x, residual)`, written over the residual where the library's own product can add to it."""
    weight = _plain_weight(linear)
    return linear(x, residual) if weight is None else residual.addmm_(x, weight.t())


def in_float32(linear: Linear, x: Tensor) -> Tensor:
    """As `linear(x)`, the sums not rounded to x's dtype where the library's own product can leave that out: the two
    largest of many scores are often nearer to each other than half precisions tell apart."""
    weight = _plain_weight(linear) if x.dtype != torch.float32 and x.is_cuda else None
    if weight is None or "dtype" not in torch.ops.aten.mm.overloads():  # which torch has from 2.8 on
        return linear(x).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _plain_weight(linear: Linear) -> Tensor | None:
    """The weight of a library's own product without a bias; None for any other. One that is held in 8 bits is of a type
    of its own."""
    if not isinstance(linear, partial) or linear.func is not stock:
        return None
    weight, bias = linear.args
    return weight if type(weight) is Tensor and bias is None else None


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        return product.default(x, packed, bias, "none", [], "")
    return product.binary(x, residual, packed, bias, "add")


def find_row_counts(
    linears: Sequence[tuple[Linear, int]], counts: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Those of `counts` (rising) for which no row's bits depend on its neighbours; empty where that is too few.

    `linears` come with their input widths. Holds every count, at two places, against the largest.
    """
    alike = set(counts)
    largest = counts[-1]
    for linear, inputs in linears:
        x = torch.randn(largest, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)
        reference = linear(x)
        for count in sorted(alike):
            if not (_same(linear, x, reference, 0, count) and _same(linear, x, reference, largest - count, count)):
                alike.discard(count)
    return tuple(sorted(alike)) if alike and min(alike) <= SMALLEST else ()


def rows_stay(linears: Sequence[tuple[Linear, int]], count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether no row's bits depend on its place among `count` rows or on what the others hold.

    `linears` come with their input widths. Every row is tried at 8 places, and alone among rows of zeros at one.
    """
    for linear, inputs in linears:
        x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs)).to(device, dtype)
        expected = linear(x)
        shifts = sorted({1 << bit for bit in range(count.bit_length() - 1)} | {count // 2 + 1, count - 1})
        turned = [torch.equal(linear(x.roll(shift, 0)), expected.roll(shift, 0)) for shift in shifts]
        alone = torch.zeros_like(x)
        alone[count // 3] = x[0]
        if not all(turned) or not torch.equal(linear(alone)[count // 3], expected[0]):
            return False
    return True


def padded(x: Tensor, counts: Sequence[int]) -> Tensor:
    """x with rows of zeros added, so that `in_calls` meets allowed counts only; as it is where there are none."""
    if not counts:
        return x
    rest = len(x) % counts[-1]
    missing = next(count for count in counts if count >= rest) - rest if rest else 0
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def in_calls(linear: Linear, x: Tensor, residual: Tensor | None, counts: Sequence[int]) -> Tensor:
    """The product of padded rows, in calls of at most as many rows as were probed."""
    if not counts or len(x) <= counts[-1]:
        return linear(x, residual)
    rests: Iterable[Tensor | None] = repeat(None) if residual is None else residual.split(counts[-1])
    return torch.cat([linear(piece, rest) for piece, rest in zip(x.split(counts[-1]), rests, strict=False)])


def _same(linear: Linear, x: Tensor, reference: Tensor, start: int, count: int) -> bool:
    return torch.equal(linear(x[start : start + count].contiguous()), reference[start : start + count])


def packer(kind: str) -> Pack:
    """Lays a weight out in int8 or fp8 (e4m3), as `pack` does in the model's dtype."""
    from torchao import quantization

    configs = {INT8: quantization.Int8WeightOnlyConfig, FP8: quantization.Float8WeightOnlyConfig}
    return partial(_quantized_linear, partial(quantization.quantize_, config=configs[kind]()))


def _quantized_linear(quantize: Any, weight: Tensor, bias: Tensor | None = None) -> Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    quantize(module)
    return partial(stock, module.weight, bias)
