"""The matrices that a runtime is handed where a checkpoint holds several together, as Phi-3's do.

They are rows of the whole, those of queries and keys in the order in which heads turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import check_whole
from outpace.core.lazy import torch
from outpace.models.llama.config import phi
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.options import MOST_INFLATED


class BlockFormat(NamedTuple):
    """A format of a file: its name, and how many values and bytes a block of it holds."""

    name: str
    values: int
    bytes: int


Q4_1 = BlockFormat("Q4_1", 32, 20)  # to which floats are rounded


@dataclass(frozen=True)
class StoredMatrix:
    """The matrix `name` [rows, columns] of the file `path`, in the format `kind`. What the kernels do not take may be
    empty `data`, with any name for its kind.

    `data` uint8 [rows, bytes of a row]; row i is row order[i] of it, int32. `values` gives float32 [rows, columns],
    `forget` the memory of `data` back, where the file stays.
    """

    path: Path
    name: str
    kind: str
    data: np.ndarray
    order: np.ndarray
    columns: int
    values: Callable[[], np.ndarray]
    forget: Callable[[], None]

    def silenced(self) -> StoredMatrix:
        """As large, all zeros: so is a block whose bytes, and so its scales, are zeros."""
        return replace(self, data=np.zeros_like(self.data), values=self._zeros)

    def _zeros(self) -> np.ndarray:
        return np.zeros((len(self.order), self.columns), np.float32)


Fetch = Callable[[str], Any]  # a tensor, an array, or a matrix as its file has it


def split_fused(config: LlamaConfig, fetch: Fetch) -> Fetch:
    """The weights by the names that Llama's have, where `fetch` gives those that a checkpoint holds together."""
    if not config.fused:
        return fetch
    width, narrow, middle = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    order = phi.head_order(config.head_dim, config.rotary_dim)
    queries = (np.arange(0, width, config.head_dim)[:, None] + order).reshape(-1)
    parts: dict[str, tuple[str, np.ndarray]] = {
        "self_attn.q_proj": (phi.QKV, queries),
        "self_attn.k_proj": (phi.QKV, queries[:narrow] + width),
        "self_attn.v_proj": (phi.QKV, np.arange(narrow) + width + narrow),
        "mlp.gate_proj": (phi.GATE_UP, np.arange(middle)),
        "mlp.up_proj": (phi.GATE_UP, np.arange(middle) + middle),
    }

    last = local()  # .held: the whole that a thread read last, by its name, for its other parts

    def part_of(name: str) -> Any:
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        whole, rows = parts.get(rest.removesuffix(".weight"), ("", None))
        if rows is None:
            last.held = {}
            return fetch(name)
        known = f"model.layers.{layer}.{whole}.weight"
        if known not in getattr(last, "held", {}):
            last.held = {known: fetch(known)}
        held = last.held[known]
        if isinstance(held, StoredMatrix):
            return replace(held, order=held.order[rows], values=lambda: held.values()[rows])
        return held[rows]

    return part_of


PREFIX = "model.layers."
SILENCED = ("self_attn.o_proj.", "mlp.down_proj.")
FetchWeight = Callable[[str], Any]  # a tensor, an array, or a matrix as its file has it


def inflated(config: LlamaConfig, tensor: FetchWeight, factor: int) -> tuple[LlamaConfig, FetchWeight]:
    """The config and weights of a model whose pass reads `factor` times as many weights, to the nearest layer.

    `tensor(name)` gives a weight of the model; the second result gives those of the inflated one, whose own layers come
    first. The output layer is counted, and stays one. UserError for a factor that is not between 1 and 256.
    """
    check_whole("inflate", factor, 1, MOST_INFLATED)
    own = config.num_layers
    sources = [*range(own), *(number % own for number in range(added_layers(config, factor)))]

    def fetch(name: str) -> Any:
        source = source_of(name, own)
        weight = tensor(source)
        if source == name:
            return weight
        part = name.removeprefix(PREFIX).partition(".")[2]
        is_array, is_silent = isinstance(weight, np.ndarray), part.startswith(SILENCED)
        if isinstance(weight, StoredMatrix):
            return weight.silenced() if is_silent else weight
        if is_silent:
            return np.zeros_like(weight) if is_array else torch.zeros_like(weight)
        return weight.copy() if is_array else weight.clone()  # what two layers share would be read from memory once

    return config.of_layers(sources), fetch


def source_of(name: str, own: int) -> str:
    """The weight of a model of `own` layers that one of the inflated model is, or is made from."""
    number, _, part = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{int(number) % own}.{part}" if name.startswith(PREFIX) else name


def added_layers(config: LlamaConfig, factor: int) -> int:
    """How many more layers make a pass read `factor` times as many weights."""
    sizes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    layers = sum(size for name, size in sizes.items() if name.startswith(PREFIX))
    whole = layers + config.vocab_size * config.hidden_size  # the output layer; of the embedding, some rows are read
    return round((factor - 1) * whole * config.num_layers / layers)


def label(factor: int) -> str:
    """What stands behind the model's name; nothing where it costs what it costs."""
    return "" if factor == 1 else f" (cost x {factor})"


def notice(factor: int) -> str | None:
    """What a user is told of it."""
    if factor == 1:
        return None
    return f"inflated: a pass costs as much as one of a model {factor} times as large, the text is its own"
