"""Attention of many sessions' tree nodes over a pool's keys and values, by a kernel in Triton.

It goes over the slots in blocks with a running softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135), long texts in several pieces that are put together afterwards (Flash-Decoding, 2023). No mask is
made: which of the pending nodes a node sees it reads from their bits, and behind the last of them it stops.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.core.arrays import device_guard, next_power_of_two

BLOCK_SLOTS = 64  # keys that are read at once, and of more bytes than these the fewer
MOST_BYTES = 256
WARPS, STAGES = 4, 2  # of a program; by one stage Triton 3.6 and 3.9 fail to compile it
PIECE = 128  # the fewest slots that have a program of their own
PROGRAMS = 512  # no more of them: there is enough to do for any device
MOST_ROWS = 64  # nodes and heads of one program, and fewer where keys have more bytes
_FEW = 16  # the fewest rows that the units for products take
_LEAST = tl.constexpr(-1e30)  # finite: what sees nothing stays so


@triton.jit
def _seen(words, below, depth, place, is_row, WORDS: tl.constexpr, WINDOW: tl.constexpr):
    """Which rows see which slots, that stand at these places behind the text, or before it: below 0."""
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
    """Some rows' queries over the slots from `first` to `end`: what they mix, not yet over the total of its weights,
    the largest score, and that total."""
    entry = tl.arange(0, DEPTH)
    is_entry = entry < WIDTH
    largest = tl.full([ROWS], _LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(first, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        is_slot = slot < end
        inside = keys + slot[None, :] * WIDTH + entry[:, None]
        key = tl.load(inside, mask=is_slot[None, :] & is_entry[:, None], other=0.0)
        scores = tl.dot(part, key, input_precision=PRECISION)
        is_seen = is_row[:, None] & is_slot[None, :]
        if WINDOW > 0 or start + SLOTS > length:  # else all of it is the text, which all see
            is_seen = is_seen & _seen(words, below, depth, slot - length, is_row, WORDS, WINDOW)
        scores = tl.where(is_seen, scores, _LEAST)
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
    """One session's key head, some of its rows (nodes, times the heads that share the keys), one piece of the slots."""
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
        goal = sums + (tl.program_id(2) * rows + node * HEADS + head) * (WIDTH + 2)
        tl.store(goal[:, None] + entry[None, :], found, mask=is_mine)
        tl.store(goal + WIDTH, largest, mask=is_row)
        tl.store(goal + WIDTH + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["pieces"])
def _join_kernel(sums, out, pieces, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """One row's pieces put together."""
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
    """Into how many pieces so many slots are cut, where there are so many programs without."""
    return max(1, min(-(-slots // PIECE), PROGRAMS // programs))


def blocks_of(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """The most rows of one program, and how many keys of this width it reads at once: they must fit into what a GPU of
    a computer at home has for each program, 99 KB."""
    share = max(1, next_power_of_two(width) * dtype.itemsize // MOST_BYTES)
    return max(_FEW, MOST_ROWS // share), max(_FEW, BLOCK_SLOTS // share)


def attend(query: Tensor, kv: Tensor, given: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
    """query [batch * nodes, heads, d], scaled, over the first `slots` of `kv` [2, batch, kv_heads, .., d]: rows
    [batch * nodes, heads * d]. `given`: bits, lengths, depths, below, as `batched.tree_mask` takes them."""
    (rows, heads, width), groups, bits = query.shape, kv.shape[2], given["bits"]
    batch, nodes, words = bits.shape
    mine = heads // groups * nodes
    most, at_once = blocks_of(query.dtype, width)
    block = min(next_power_of_two(mine, _FEW), most)
    blocks = -(-mine // block)
    pieces = pieces_of(slots, batch * groups * blocks)
    piece = -(-slots // (pieces * at_once)) * at_once
    out = torch.empty_like(query)
    sums = query.new_empty(pieces, rows * heads, width + 2, dtype=torch.float32) if pieces > 1 else out
    with device_guard(query):
        _attend_kernel[(batch * groups, blocks, pieces)](
            query,
            kv,
            bits,
            given["lengths"],
            given["depths"],
            given["below"],
            out,
            sums,
            nodes,
            slots,
            piece,
            *kv.stride()[:3],
            heads,
            groups,
            width,
            words,
            window or 0,
            pieces == 1,
            "ieee" if query.dtype == torch.float32 else "tf32",
            block,
            at_once,
            next_power_of_two(width, _FEW),
            num_warps=WARPS,
            num_stages=STAGES,
        )
        if pieces > 1:
            _join_kernel[(rows * heads,)](sums, out, pieces, width, next_power_of_two(width), num_warps=1)
    return out.view(rows, -1)
