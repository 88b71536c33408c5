"""A pass's norms, turning and storing, and gates, one kernel each, in Triton.

By torch's own operations a layer of a small pass is thirty launches, each of which takes a GPU some two microseconds
however little it does; with these, and `fused_attention.py`, it is ten.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.core.arrays import device_guard, next_power_of_two


@triton.jit
def _norm_kernel(x, weight, out, floor, width, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_there = place < width
    values = tl.load(x + row * width + place, mask=is_there, other=0.0).to(tl.float32)
    values = values / tl.sqrt(tl.sum(values * values, 0) + floor * floor)
    if HAS_WEIGHT:
        values *= tl.load(weight + place, mask=is_there, other=0.0)
    tl.store(out + row * width + place, values.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _gate_kernel(gate_up, out, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < width
    gate = tl.load(gate_up + row * 2 * width + place, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + place, mask=is_there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    slope = 1.59576912 + 0.0713548162 * gate * gate if IS_GELU else 1.0  # twice what tanh has in GELU, over the gate
    gated = (gate / (1.0 + tl.exp(-gate * slope))).to(kind).to(tl.float32)  # rounded as it is between two operations
    tl.store(out + row * width + place, (gated * up).to(kind), mask=is_there)


@triton.jit(do_not_specialize=["nodes"])
def _turn_kernel(
    mixed,
    norms,
    table,
    positions,
    slots,
    query,
    kv,
    floor,
    scale,
    most,
    nodes,
    kind_stride,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    is_there = pair < WIDTH // 2
    held = query.dtype.element_ty
    start = mixed + (row * (HEADS + 2 * GROUPS) + head) * WIDTH + 2 * pair
    even = tl.load(start, mask=is_there, other=0.0).to(tl.float32)
    odd = tl.load(start + 1, mask=is_there, other=0.0).to(tl.float32)
    if head < HEADS + GROUPS:
        if HAS_NORM:
            divisor = tl.sqrt(tl.sum(even * even + odd * odd, 0) + floor * floor)
            weight = norms + head * WIDTH + 2 * pair
            even = even / divisor * tl.load(weight, mask=is_there, other=0.0)
            odd = odd / divisor * tl.load(weight + 1, mask=is_there, other=0.0)
            even, odd = even.to(held).to(tl.float32), odd.to(held).to(tl.float32)
        if ROTATES:
            turn = table + (tl.load(positions + row) * (WIDTH // 2) + pair) * 2
            cosine = tl.load(turn, mask=is_there, other=0.0)
            sine = tl.load(turn + 1, mask=is_there, other=0.0)
            even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    if head < HEADS:
        goal = query + (row * HEADS + head) * WIDTH + 2 * pair
        tl.store(goal, (even * scale).to(held), mask=is_there)
        tl.store(goal + 1, (odd * scale).to(held), mask=is_there)
    else:  # a request whose numbers overflow must not spoil the one that comes into its row
        even = tl.minimum(tl.maximum(tl.where(even == even, even, 0.0), -most), most)
        odd = tl.minimum(tl.maximum(tl.where(odd == odd, odd, 0.0), -most), most)
        group = head - HEADS
        place = (group // GROUPS) * kind_stride + (row // nodes) * row_stride + (group % GROUPS) * head_stride
        goal = kv + place + tl.load(slots + row) * WIDTH + 2 * pair
        tl.store(goal, even.to(held), mask=is_there)
        tl.store(goal + 1, odd.to(held), mask=is_there)


def norm(x: Tensor, weight: Tensor | None, floor: float) -> Tensor:
    """x [rows, width] over sqrt(sum of squares + floor^2), times `weight`: in x's dtype."""
    out, (rows, width) = torch.empty_like(x), x.shape
    block = next_power_of_two(width)
    warps = min(max(block // 512, 1), 16)
    given = x if weight is None else weight
    if rows:
        with device_guard(x):
            _norm_kernel[(rows,)](x, given, out, floor, width, weight is not None, block, num_warps=warps)
    return out


def gated(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """f(gate) * up, of both side by side: [rows, 2 * width] to [rows, width]. f: SiLU, or GELU by tanh."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out, block = gate_up.new_empty(rows, width), min(next_power_of_two(width), 1024)
    if rows:
        with device_guard(out):
            _gate_kernel[(rows, -(-width // block))](gate_up, out, width, is_gelu, block)
    return out


def turn(
    mixed: Tensor,
    norms: Tensor | None,
    floor: float,
    table: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    scale: float,
) -> Tensor:
    """Turned queries [batch * nodes, heads, d], times `scale`; keys, values go into `kv` [2, batch, kv_heads, .., d].

    `mixed` [batch * nodes, (heads + 2 kv_heads) * d], pairs side by side; `norms` [heads + 2 kv_heads, d]: weights of
    queries' and keys' own norms; `table` complex [positions, d / 2]: what pairs are multiplied by, None: they stay;
    `positions` and `slots` [batch, nodes]: where a node stands in its text, and in `kv`.
    """
    width, groups, (batch, nodes) = kv.shape[-1], kv.shape[2], slots.shape
    heads = mixed.shape[1] // width - 2 * groups
    query = mixed.new_empty(len(mixed), heads, width)
    assert kv.stride(3) == width
    assert kv.stride(4) == 1
    with device_guard(kv):
        _turn_kernel[(batch * nodes, heads + 2 * groups)](
            mixed,
            mixed if norms is None else norms,
            mixed if table is None else torch.view_as_real(table),
            positions,
            slots,
            query,
            kv,
            floor,
            scale,
            torch.finfo(kv.dtype).max,
            nodes,
            *kv.stride()[:3],
            heads,
            groups,
            width,
            next_power_of_two(width // 2),
            norms is not None,
            table is not None,
            num_warps=1,
        )
    return query
