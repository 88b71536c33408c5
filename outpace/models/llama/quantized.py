"""Matrices of the torch runtimes in 8 bits, by torchao, which is imported where they are asked for and nowhere else.

Weights alone are rounded, each output with a scale of its own; sums and everything between are in the model's dtype. A
product that unpacks its weights first reads more than a bfloat16 one: whether it gains on a device is to be measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.models.llama.linear import Linear, Pack, stock
from outpace.models.options import FP8, INT8


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
