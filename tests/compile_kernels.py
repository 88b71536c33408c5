"""Compiles the Triton kernels for several GPUs, without needing one.

test_fused.py runs it in another process, because nothing is compiled with TRITON_INTERPRET, which that file sets.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.core import fused_noise
from outpace.models.llama.cuda import triton_kernels

HEADS = {"HEADS": 8, "GROUPS": 2}
STRIDES = {"kind_stride": "i64", "row_stride": "i32", "head_stride": "i32"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = 99 * 1024  # bytes that one program may have on the GPUs of computers at home


def compiled(kernel: Any, capability: int, warps: int, types: dict[str, str], constants: dict[str, Any]) -> int:
    """The bytes of fast memory that one program takes."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(
        source, GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": triton_kernels.STAGES}
    )
    return int(made.metadata.shared)


def small(capability: int, kind: str) -> None:
    """All but attention."""
    x, at = f"*{kind}", "*i64"
    for flag in (True, False):
        given, constants = {"gate_up": x, "out": x, "width": "i32"}, {"IS_GELU": flag, "BLOCK": 1024}
        compiled(triton_kernels._gate_kernel, capability, 4, given, constants)
        given = {"x": x, "weight": "*fp32", "out": x, "floor": "fp32", "width": "i32"}
        compiled(triton_kernels._norm_kernel, capability, 4, given, {"HAS_WEIGHT": flag, "BLOCK": 1024})
        given = {"qkv": x, "norms": "*fp32", "table": "*fp32", "positions": at, "slots": at, "query": x, "kv": x}
        given |= {"floor": "fp32", "scale": "fp32", "max_value": "fp32", "nodes": "i32", **STRIDES}
        constants = {**HEADS, "WIDTH": 80, "HALF": 64, "HAS_NORM": flag, "ROTATES": flag}
        compiled(triton_kernels._rotate_kernel, capability, 1, given, constants)
        given = {"words": "*i32", "out": "*fp32", "vocab": "i32"}
        compiled(fused_noise._noise_kernel, capability, 4, given, {"IS_GUMBEL": flag, "SIZE": fused_noise.BLOCK})


def attention(capability: int, kind: str, width: int, rows: int, is_whole: bool, window: int) -> None:
    x, at = f"*{kind}", "*i64"
    given = {"query": x, "kv": x, "bits": at, "lengths": at, "depths": at, "below": at, "out": x, "sums": "*fp32"}
    given |= {"nodes": "i32", "slots": "i32", "piece": "i32", **STRIDES}
    most, slots = triton_kernels.blocks_of(DTYPES[kind], width)
    rows, depth = min(rows, most), triton_kernels.next_power_of_two(width, 16)
    constants = {**HEADS, "WIDTH": width, "WORDS": 4, "WINDOW": window, "IS_WHOLE": is_whole, "ROWS": rows}
    constants |= {"PRECISION": "ieee" if kind == "fp32" else "tf32", "DEPTH": depth, "SLOTS": slots}
    shared = compiled(triton_kernels._attend_kernel, capability, triton_kernels.WARPS, given, constants)
    assert shared <= SHARED, (capability, kind, width, rows, shared)
    pieces = {"sums": "*fp32", "out": x, "pieces": "i32"}
    compiled(triton_kernels._join_kernel, capability, 1, pieces, {"WIDTH": width, "DEPTH": depth})


def main() -> None:
    if "--short" in sys.argv:
        small(80, "bf16")
        attention(80, "bf16", 128, 64, False, 100)
        attention(80, "fp32", 64, 16, True, 0)
    else:
        for capability, kind in product((80, 89, 90), ("bf16", "fp16", "fp32")):
            small(capability, kind)
            for width, rows, is_whole, window in ((32, 16, True, 0), (128, 64, False, 100), (256, 64, True, 0)):
                attention(capability, kind, width, rows, is_whole, window)
    print("compiled")


if __name__ == "__main__":
    main()
