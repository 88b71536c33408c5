"""Triton kernels of a captured pass: norms, rotation and storing of keys, gates, and attention over a pool.

By torch's own operations a layer of a small pass takes thirty launches, each of about two microseconds on a GPU however
little it does; with these kernels it takes ten.

Attention reads the slots in blocks with a running softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135), and long texts in several pieces that are combined afterwards (Flash-Decoding, 2023). There is no
mask tensor: a node's visible pending nodes are read from bits, and slots after the last of them are skipped.
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
    slope = 1.59576912 + 0.0713548162 * gate * gate if IS_GELU else 1.0  # 2 * tanh argument of GELU / gate
    gated = (gate / (1.0 + tl.exp(-gate * slope))).to(kind).to(tl.float32)  # torch rounds between the two operations
    tl.store(out + row * width + place, (gated * up).to(kind), mask=is_there)


@triton.jit(do_not_specialize=["nodes"])
def _rotate_kernel(
    qkv, norms, table, positions, slots, query, kv, floor, scale, max_value, nodes, kind_stride, row_stride,
    head_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    is_there = pair < WIDTH // 2
    held = query.dtype.element_ty
    start = qkv + (row * (HEADS + 2 * GROUPS) + head) * WIDTH + 2 * pair
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
            factor = table + (tl.load(positions + row) * (WIDTH // 2) + pair) * 2
            cosine = tl.load(factor, mask=is_there, other=0.0)
            sine = tl.load(factor + 1, mask=is_there, other=0.0)
            even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    if head < HEADS:
        address = query + (row * HEADS + head) * WIDTH + 2 * pair
        tl.store(address, (even * scale).to(held), mask=is_there)
        tl.store(address + 1, (odd * scale).to(held), mask=is_there)
    else:  # a request whose numbers overflow must not spoil the next one in its row
        even = tl.minimum(tl.maximum(tl.where(even == even, even, 0.0), -max_value), max_value)
        odd = tl.minimum(tl.maximum(tl.where(odd == odd, odd, 0.0), -max_value), max_value)
        group = head - HEADS
        place = (group // GROUPS) * kind_stride + (row // nodes) * row_stride + (group % GROUPS) * head_stride
        address = kv + place + tl.load(slots + row) * WIDTH + 2 * pair
        tl.store(address, even.to(held), mask=is_there)
        tl.store(address + 1, odd.to(held), mask=is_there)


def norm(x: Tensor, weight: Tensor | None, floor: float) -> Tensor:
    """Divide x [rows, width] by sqrt(sum of squares + floor^2) and multiply by `weight`; return x's dtype."""
    out, (rows, width) = torch.empty_like(x), x.shape
    block = next_power_of_two(width)
    warps = min(max(block // 512, 1), 16)
    weights = x if weight is None else weight
    if rows:
        with device_guard(x):
            _norm_kernel[(rows,)](x, weights, out, floor, width, weight is not None, block, num_warps=warps)
    return out


def gated(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Compute f(gate) * up from both side by side, [rows, 2 * width] to [rows, width]. f: SiLU, or tanh GELU."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out, block = gate_up.new_empty(rows, width), min(next_power_of_two(width), 1024)
    if rows:
        with device_guard(out):
            _gate_kernel[(rows, -(-width // block))](gate_up, out, width, is_gelu, block)
    return out


def rotate_and_store(
    qkv: Tensor, norms: Tensor | None, floor: float, table: Tensor | None, positions: Tensor, slots: Tensor, kv: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Rotate and scale queries [batch * nodes, heads, d]; store keys and values in `kv` [2, batch, kv_heads, .., d].

    `qkv` [batch * nodes, (heads + 2 kv_heads) * d] has rotation pairs as neighbours; `norms` [heads + 2 kv_heads, d]:
    weights of queries' and keys' own norms; `table` complex [positions, d / 2]: factors of pairs, None: no rotation;
    `positions` and `slots` [batch, nodes]: a node's position in its text, and its slot in `kv`.
    """
    width, groups, (batch, nodes) = kv.shape[-1], kv.shape[2], slots.shape
    heads = qkv.shape[1] // width - 2 * groups
    query = qkv.new_empty(len(qkv), heads, width)
    assert kv.stride(3) == width
    assert kv.stride(4) == 1
    tensors = (qkv, qkv if norms is None else norms, qkv if table is None else torch.view_as_real(table))
    sizes = (floor, scale, torch.finfo(kv.dtype).max, nodes, *kv.stride()[:3])
    shape = (heads, groups, width, next_power_of_two(width // 2), norms is not None, table is not None)
    with device_guard(kv):
        _rotate_kernel[(batch * nodes, heads + 2 * groups)](
            *tensors, positions, slots, query, kv, *sizes, *shape, num_warps=1
        )
    return query


BLOCK_SLOTS = 64  # keys that a program reads at once; fewer if a key has more than MOST_BYTES
MAX_BYTES = 256
WARPS, STAGES = 4, 2  # of a program; Triton 3.6 and 3.9 fail to compile it with one stage
PIECE = 128  # minimum number of slots for a program of its own
PROGRAMS = 512  # enough programs for any device
MAX_ROWS = 64  # nodes times heads of one program; fewer if keys have more bytes
_FEW = 16  # minimum number of rows for tensor cores
_LOWEST = tl.constexpr(-1e30)  # finite, so that a row that sees nothing stays finite


@triton.jit
def _seen(words, below, depth, place, is_row, WORDS: tl.constexpr, WINDOW: tl.constexpr):
    """Return which rows see which slots; `place` is a slot minus the text's length, negative for committed tokens."""
    held = tl.minimum(tl.maximum(place, 0), 64 * WORDS - 1)
    is_tree = (place >= 0) & (place < 64 * WORDS)
    word = tl.load(words[:, None] + (held // 64)[None, :], mask=is_row[:, None] & is_tree[None, :], other=0)
    is_seen = (((word >> (held % 64)[None, :]) & 1) != 0) | (place < 0)[None, :]
    if WINDOW > 0:
        offset = tl.where(place < 0, place, tl.load(below + held, mask=is_tree, other=0))
        is_seen = is_seen & (offset[None, :] > depth[:, None] - WINDOW)
    return is_seen


@triton.jit
def _over_slots(
    part, keys, values, words, below, depth, is_row, length, first, end,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Attend with some rows' queries over the slots from `first` to `end`.

    Returns the weighted sum of values, not yet divided by the total weight, the largest score, and that total.
    """
    entry = tl.arange(0, DEPTH)
    is_entry = entry < WIDTH
    largest = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(first, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        is_slot = slot < end
        inside = keys + slot[None, :] * WIDTH + entry[:, None]
        key = tl.load(inside, mask=is_slot[None, :] & is_entry[:, None], other=0.0)
        scores = tl.dot(part, key, input_precision=PRECISION)
        is_seen = is_row[:, None] & is_slot[None, :]
        if WINDOW > 0 or start + SLOTS > length:  # else the block is committed text, which all rows see
            is_seen = is_seen & _seen(words, below, depth, slot - length, is_row, WORDS, WINDOW)
        scores = tl.where(is_seen, scores, _LOWEST)
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp(scores - higher[:, None]), 0.0)
        shrunk = tl.exp(largest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        inside = values + slot[:, None] * WIDTH + entry[None, :]
        value = tl.load(inside, mask=is_slot[:, None] & is_entry[None, :], other=0.0)
        found = found * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = higher
    return found, largest, total


@triton.jit(do_not_specialize=["nodes", "piece"])
def _attend_kernel(
    query, kv, bits, lengths, depths, below, out, sums, nodes, slots, piece, kind_stride, row_stride, head_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr,
    IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Attend for one session's key head, some rows (nodes times heads that share keys), and one piece of slots."""
    session, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < HEADS // GROUPS * nodes
    node, head = session * nodes + row % nodes, group * (HEADS // GROUPS) + row // nodes
    entry = tl.arange(0, DEPTH)
    is_entry = entry < WIDTH
    at = (node * HEADS + head) * WIDTH
    is_mine = is_row[:, None] & is_entry[None, :]
    part = tl.load(query + at[:, None] + entry[None, :], mask=is_mine, other=0.0)
    length = tl.load(lengths + session)
    words = bits + node * WORDS
    end = length
    for number in tl.static_range(WORDS):
        some = tl.load(words + number, mask=is_row, other=0)
        end = tl.where(tl.max((some != 0).to(tl.int32), 0) > 0, length + 64 * (number + 1), end)
    first = tl.program_id(2).to(tl.int64) * piece
    end = tl.minimum(tl.minimum(end, first + piece), slots)
    depth = tl.load(depths + node, mask=is_row, other=0)
    if WINDOW > 0:
        first = tl.maximum(first, tl.maximum(length - WINDOW + 1, 0) // SLOTS * SLOTS)
    keys = kv + session * row_stride + group * head_stride
    found, largest, total = _over_slots(
        part, keys, keys + kind_stride, words, below + session * (64 * WORDS), depth, is_row, length, first, end,
        WIDTH, WORDS, WINDOW, PRECISION, ROWS, SLOTS, DEPTH,
    )  # fmt: skip
    if IS_WHOLE:
        found = found / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + at[:, None] + entry[None, :], found.to(out.dtype.element_ty), mask=is_mine)
    else:
        rows = tl.num_programs(0).to(tl.int64) // GROUPS * nodes * HEADS
        address = sums + (tl.program_id(2) * rows + node * HEADS + head) * (WIDTH + 2)
        tl.store(address[:, None] + entry[None, :], found, mask=is_mine)
        tl.store(address + WIDTH, largest, mask=is_row)
        tl.store(address + WIDTH + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["pieces"])
def _join_kernel(sums, out, pieces, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Combine one row's pieces."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    entry = tl.arange(0, DEPTH)
    is_entry = entry < WIDTH
    largest, total, found = -1e30, 0.0, tl.zeros([DEPTH], tl.float32)
    for number in range(pieces):
        start = sums + (number * rows + row) * (WIDTH + 2)
        highest = tl.load(start + WIDTH)
        higher = tl.maximum(largest, highest)
        before, now = tl.exp(largest - higher), tl.exp(highest - higher)
        found = found * before + tl.load(start + entry, mask=is_entry, other=0.0) * now
        total = total * before + tl.load(start + WIDTH + 1) * now
        largest = higher
    found = found / tl.maximum(total, 1e-30)
    tl.store(out + row * WIDTH + entry, found.to(out.dtype.element_ty), mask=is_entry)


def pieces_of(slots: int, programs: int) -> int:
    """Return the number of pieces to cut the slots into, given the number of programs without pieces."""
    return max(1, min(-(-slots // PIECE), PROGRAMS // programs))


def blocks_of(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Return the most rows of one program, and the number of keys of this width that it reads at once.

    They must fit into the 99 KB of shared memory that a consumer GPU has for each program.
    """
    share = max(1, next_power_of_two(width) * dtype.itemsize // MAX_BYTES)
    return max(_FEW, MAX_ROWS // share), max(_FEW, BLOCK_SLOTS // share)


def attend(query: Tensor, kv: Tensor, inputs: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
    """Attend with scaled query [batch * nodes, heads, d] over the first `slots` of `kv` [2, batch, kv_heads, .., d].

    Returns rows [batch * nodes, heads * d]. `inputs`: bits, lengths, depths and below, as in `attention.tree_mask`.
    """
    (rows, heads, width), groups, bits = query.shape, kv.shape[2], inputs["bits"]
    batch, nodes, words = bits.shape
    mine = heads // groups * nodes
    max_rows, at_once = blocks_of(query.dtype, width)
    block = min(next_power_of_two(mine, _FEW), max_rows)
    blocks = -(-mine // block)
    pieces = pieces_of(slots, batch * groups * blocks)
    piece = -(-slots // (pieces * at_once)) * at_once
    out = torch.empty_like(query)
    sums = query.new_empty(pieces, rows * heads, width + 2, dtype=torch.float32) if pieces > 1 else out
    masks = (bits, inputs["lengths"], inputs["depths"], inputs["below"])
    sizes = (nodes, slots, piece, *kv.stride()[:3])
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    shape = (heads, groups, width, words, window or 0, pieces == 1, precision, block, at_once)
    with device_guard(query):
        _attend_kernel[(batch * groups, blocks, pieces)](
            query, kv, *masks, out, sums, *sizes, *shape, next_power_of_two(width, _FEW),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        if pieces > 1:
            _join_kernel[(rows * heads,)](sums, out, pieces, width, next_power_of_two(width), num_warps=1)
    return out.view(rows, -1)
