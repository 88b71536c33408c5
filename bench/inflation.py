"""Widens a loaded target to the shape of a larger model without changing what it computes, to measure at its cost.

The model's own weights are in the corners of larger matrices. The residual stream's added entries stay zero, because
the added rows of the output projections of attention and MLP are zero, as are all rows of these in added layers, and
their columns for added heads and neurons. All other added weights are copies of the model's own. So logits are equal up
to rounding, while a pass reads, computes and stores what a model of that shape does; only the vocabulary stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.files.find import open_source, resolve
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.weight_sources import PREFIX, source_of
from outpace.models.runtimes import Loaded

Shape = tuple[int, int, int, int, int, int]  # layers, hidden and intermediate size, heads, key heads and head size


def inflate(loaded: Loaded, size: str, shape: Shape) -> Loaded:
    """Return a target of captured passes with a widened model on the same device. Drafts made of the target's layers
    are still its own."""
    assert loaded.files is not None
    own = loaded.model
    config = inflated_config(own.config, shape)
    layers = [layer % own.config.num_layers for layer in range(config.num_layers)]
    with open_source(resolve(str(loaded.files()))) as source:

        def fetch(name: str) -> Tensor:
            weight: Tensor = source.tensor(source_of(name, layers))
            return weight.to(own.device)

        tensors = inflated_tensors(own.config, config, fetch)
        given = {"device": own.device, "dtype": own.dtype, "exact": own.exact, "is_eager": own.captures.is_eager}
        model = type(own).from_tensors(config, tensors, **given)
    return replace(loaded, model=model, name=f"{loaded.name} (cost of {size})")


def inflated_config(own: LlamaConfig, shape: Shape) -> LlamaConfig:
    """Return the config of the model widened to a shape; UserError if the model is larger, or of an architecture that
    is not widened."""
    layers, hidden, middle, heads, key_heads, width = shape
    queries, kv_heads = heads * width // own.head_dim, key_heads * width // own.head_dim
    group = max(1, queries // max(kv_heads, 1))  # query heads of a key head
    is_large = hidden >= own.hidden_size and middle >= own.intermediate_size and layers >= own.num_layers
    if not is_large or kv_heads < _copies(own, group) * own.num_kv_heads:
        raise UserError(f"the model is larger than {shape} in some dimension")
    if own.head_norm or own.fused:
        raise UserError("models with norms of heads or fused matrices are not widened")
    return replace(
        own.of_layers([layer % own.num_layers for layer in range(layers)]),
        hidden_size=hidden,
        intermediate_size=middle,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        rms_norm_eps=own.rms_norm_eps * own.hidden_size / hidden,
    )


def _copies(own: LlamaConfig, group: int) -> int:
    """Return how many key heads with `group` query heads replace one of the model's key heads."""
    return -(-own.num_heads // own.num_kv_heads // group)


def inflated_tensors(own: LlamaConfig, wide: LlamaConfig, fetch: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return the source of the widened weights. `fetch` takes the names of `wide`'s layers."""
    widths = _Widths(own, wide)

    def fetch_inflated(name: str) -> Tensor:
        weight, (*parts, matrix, kind) = fetch(name), name.split(".")
        is_added = name.startswith(PREFIX) and int(parts[2]) >= own.num_layers
        if matrix in ("embed_tokens", "lm_head"):
            return _placed(weight, None, widths.padded_hidden)
        if matrix in widths.outputs:
            rows, columns = widths.outputs[matrix], widths.hidden
        elif matrix in widths.inputs:
            rows, columns = widths.padded_hidden, widths.inputs[matrix]
            rows = np.full_like(rows, -1) if is_added else rows
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

        keys = entries(np.arange(wide.num_kv_heads) // copies % own.num_kv_heads)
        middle = np.resize(np.arange(own.intermediate_size), wide.intermediate_size)
        self.outputs = {
            "q_proj": entries(np.maximum(heads, 0)),
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": middle,
            "up_proj": middle,
        }
        self.inputs = {
            "o_proj": np.maximum(entries(heads), -1),
            "down_proj": _padded(own.intermediate_size, wide.intermediate_size),
        }


def _padded(count: int, size: int) -> np.ndarray:
    return np.pad(np.arange(count), (0, size - count), constant_values=-1)


def _placed(weight: Tensor, rows: np.ndarray | None, columns: np.ndarray | None = None) -> Tensor:
    """Return these rows and columns of a weight, zeros for negative numbers; None: all."""
    for axis, places in ((1, columns), (0, rows)):
        if places is not None:
            numbers = torch.from_numpy(places).to(weight.device)
            zeros = torch.nonzero(numbers < 0).flatten()
            weight = weight.index_select(axis, numbers.clamp(min=0)).index_fill_(axis, zeros, 0)
    return weight
