"""Widens a model to the shape of a larger one without changing what it computes, to measure at that model's cost.

The model's own weights are in the corners of larger matrices. The residual stream's added entries stay zero, because
the added rows of the output projections of attention and MLP are zero, as are all rows of these in added layers, and
their columns for added heads and neurons. All other added weights are copies of the model's own. So logits are equal up
to rounding, while a pass reads, computes and stores what a model of that shape does; only the vocabulary stays.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.kernels import kernels
from outpace.core.lazy import torch
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.weight_sources import FLOATS, PREFIX, StoredMatrix, WeightSource
from outpace.models.options import SHAPES, Shape


def inflated_config(config: LlamaConfig, size: str) -> LlamaConfig:
    """Return the config of the model widened to a shape of SHAPES; UserError if it is smaller than the model."""
    wide = _widened(config, SHAPES[size])
    if wide is None:
        larger = [name for name, shape in SHAPES.items() if _widened(config, shape)]
        raise UserError(f"inflate is {size}, the model is larger in some dimension; it fits into {larger or 'none'}")
    return wide


def _widened(config: LlamaConfig, shape: Shape) -> LlamaConfig | None:
    kv_heads = shape.keys // config.head_dim
    group = max(1, shape.queries // config.head_dim // max(kv_heads, 1))  # query heads of a key head
    is_large = shape.hidden >= config.hidden_size and shape.middle >= config.intermediate_size
    if not is_large or shape.layers < config.num_layers or kv_heads < _copies(config, group) * config.num_kv_heads:
        return None
    return replace(
        config.of_layers([layer % config.num_layers for layer in range(shape.layers)]),
        hidden_size=shape.hidden,
        intermediate_size=shape.middle,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden,
        head_norm_eps=config.head_norm_eps or config.rms_norm_eps,
    )


def _copies(config: LlamaConfig, group: int) -> int:
    """Return how many key heads with `group` query heads replace one of the model's key heads."""
    return -(-config.num_heads // config.num_kv_heads // group)


def inflated_source(own: LlamaConfig, wide: LlamaConfig, fetch: WeightSource, device: str) -> WeightSource:
    """Return the source of the widened weights. `fetch` takes the names of `wide`'s layers; tensors are widened on
    `device`."""
    widths = _Widths(own, wide)

    def fetch_inflated(name: str) -> Any:
        weight, (*parts, matrix, kind) = fetch(name), name.split(".")
        if not isinstance(weight, StoredMatrix | np.ndarray):
            weight = weight.to(device)
        is_added = name.startswith(PREFIX) and int(parts[2]) >= own.num_layers
        if matrix in ("embed_tokens", "lm_head"):
            return _placed(weight, None, widths.padded_hidden)
        if matrix in widths.outputs:
            rows, columns = widths.outputs[matrix], widths.hidden
        elif matrix in widths.inputs:
            rows, columns = widths.padded_hidden, widths.inputs[matrix]
            if is_added and kind == "weight":  # the kernels take blocks of zeros, but no matrix without rows
                rows, columns = widths.hidden, np.full_like(columns, -1)
            elif is_added:
                rows = np.full_like(rows, -1)
        elif matrix in ("q_norm", "k_norm"):
            return weight
        else:  # a norm of the residual stream, whose mean square is over more entries now
            scale = sqrt(own.hidden_size / wide.hidden_size)
            return _placed((weight + own.norm_offset) * scale, widths.padded_hidden) - own.norm_offset
        return _placed(weight, rows, columns if kind == "weight" else None)

    return fetch_inflated


class _Widths:
    """Which of the model's own rows and columns the rows and columns of the widened matrices copy; negative: zeros."""

    def __init__(self, own: LlamaConfig, wide: LlamaConfig) -> None:
        self.hidden = np.resize(np.arange(own.hidden_size), wide.hidden_size)
        self.padded_hidden = _padded(own.hidden_size, wide.hidden_size)
        group, wide_group = own.num_heads // own.num_kv_heads, wide.num_heads // wide.num_kv_heads
        copies, heads = _copies(own, wide_group), np.full(wide.num_heads, -1)
        for head in range(own.num_heads):  # next to the other heads of its keys
            copy, place = divmod(head % group, wide_group)
            heads[(head // group * copies + copy) * wide_group + place] = head

        def entries(heads: np.ndarray) -> np.ndarray:
            return (heads[:, None] * own.head_dim + np.arange(own.head_dim)).reshape(-1)

        queries = entries(np.maximum(heads, 0))
        keys = entries(np.arange(wide.num_kv_heads) // copies % own.num_kv_heads)
        middle = np.resize(np.arange(own.intermediate_size), wide.intermediate_size)
        first_key, first_value = (own.head_dim * count for count in (own.num_heads, own.num_heads + own.num_kv_heads))
        self.outputs = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": middle,
            "up_proj": middle,
            "qkv_proj": np.concatenate([queries, first_key + keys, first_value + keys]),
            "gate_up_proj": np.concatenate([middle, own.intermediate_size + middle]),
        }
        self.inputs = {
            "o_proj": np.maximum(entries(heads), -1),
            "down_proj": _padded(own.intermediate_size, wide.intermediate_size),
        }


def _padded(count: int, size: int) -> np.ndarray:
    return np.pad(np.arange(count), (0, size - count), constant_values=-1)


def _placed(weight: Any, rows: np.ndarray | None, columns: np.ndarray | None = None) -> Any:
    """Return these rows and columns of a weight, zeros for negative numbers; None: all."""
    if isinstance(weight, StoredMatrix):
        assert columns is not None
        return _placed_blocks(weight, rows, columns)
    for axis, places in ((1, columns), (0, rows)):
        if places is None:
            continue
        found, zeros = np.maximum(places, 0), np.flatnonzero(places < 0)
        if isinstance(weight, np.ndarray):
            weight = weight.take(found, axis)
            weight[(slice(None),) * axis + (zeros,)] = 0
        else:
            chosen, filled = (torch.from_numpy(part).to(weight.device) for part in (found, zeros))
            weight = weight.index_select(axis, chosen).index_fill_(axis, filled, 0)
    return weight


def _placed_blocks(weight: StoredMatrix, rows: np.ndarray | None, columns: np.ndarray) -> StoredMatrix | np.ndarray:
    """Do the same without decoding a file's blocks; if that would cut a block, return float32."""
    read, data = partial(_placed_values, weight, rows, columns), weight.data
    if weight.kind in FLOATS or weight.kind in kernels.FORMATS:
        size = kernels.FORMATS.get(weight.kind, 1)
        blocks = _whole_blocks(columns, size)
        if blocks is None:
            return read()
        data = _placed(data.reshape(len(data), weight.columns // size, -1), None, blocks)
        data = data.reshape(len(data), -1)  # blocks of zero bytes have the scale 0
    order = weight.order
    if rows is not None:
        order = np.where(rows < 0, -1, order[np.maximum(rows, 0)]).astype(np.int32)
    return replace(weight, data=data, order=order, columns=len(columns), values=read)


def _placed_values(weight: StoredMatrix, rows: np.ndarray | None, columns: np.ndarray) -> np.ndarray:
    values: np.ndarray = _placed(weight.values(), rows, columns)
    return values


def _whole_blocks(columns: np.ndarray, size: int) -> np.ndarray | None:
    """Return the number of the block of `size` columns at each place, -1 for zeros; None if blocks would be cut."""
    if len(columns) % size:
        return None
    parts = columns.reshape(-1, size)
    blocks = parts[:, 0] // size
    is_whole = parts == np.where(blocks < 0, -1, blocks * size + np.arange(size)[:, None]).T
    return blocks if is_whole.all() else None
