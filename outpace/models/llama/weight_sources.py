"""Weights by name, and sources derived from others: fused matrices split, and layers added for measurements.

A source is a function from a Hugging Face weight name to a tensor, an array, or a matrix in its file's format.
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

PREFIX = "model.layers."
SILENCED = ("self_attn.o_proj.", "mlp.down_proj.")
WeightSource = Callable[[str], Any]


class BlockFormat(NamedTuple):
    """A file's format: its name, and how many values and bytes a block has."""

    name: str
    values: int
    bytes: int


Q4_1 = BlockFormat("Q4_1", 32, 20)  # the format to which floats are rounded in four bits


@dataclass(frozen=True)
class StoredMatrix:
    """The matrix `name` [rows, columns] of the file `path`, in the file's format `kind`.

    `data` uint8 [rows, bytes per row]; row i of the matrix is row order[i] of it, int32. `data` may be empty, with any
    `kind`, for a format that the kernels do not support. `values` returns float32 [rows, columns]; `forget` releases
    the memory of `data` if the file stays open.
    """

    path: Path
    name: str
    kind: str
    data: np.ndarray
    order: np.ndarray
    columns: int
    values: Callable[[], np.ndarray]
    forget: Callable[[], None]

    def zeros(self) -> StoredMatrix:
        """Return a matrix of the same size whose blocks, and so their scales, are all zero bytes."""
        shape = len(self.order), self.columns
        return replace(self, data=np.zeros_like(self.data), values=lambda: np.zeros(shape, np.float32))


def split_fused(config: LlamaConfig, fetch: WeightSource) -> WeightSource:
    """Return a source with Llama's weight names for a checkpoint that fuses matrices, as those of Phi-3 do.

    The parts are rows of the fused matrix; those of queries and keys are reordered for the rotation.
    """
    if not config.fused:
        return fetch
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    middle = config.intermediate_size
    order = phi.head_order(config.head_dim, config.rotary_dim)
    queries = (np.arange(0, query_width, config.head_dim)[:, None] + order).reshape(-1)
    parts: dict[str, tuple[str, np.ndarray]] = {
        "self_attn.q_proj": (phi.QKV, queries),
        "self_attn.k_proj": (phi.QKV, queries[:kv_width] + query_width),
        "self_attn.v_proj": (phi.QKV, np.arange(kv_width) + query_width + kv_width),
        "mlp.gate_proj": (phi.GATE_UP, np.arange(middle)),
        "mlp.up_proj": (phi.GATE_UP, np.arange(middle) + middle),
    }

    last = local()  # .fused: the matrix that this thread read last, by name, for its other parts

    def part_of(name: str) -> Any:
        layer, _, rest = name.removeprefix(PREFIX).partition(".")
        fused, rows = parts.get(rest.removesuffix(".weight"), ("", None))
        if rows is None:
            last.fused = {}
            return fetch(name)
        fused_name = f"{PREFIX}{layer}.{fused}.weight"
        if fused_name not in getattr(last, "fused", {}):
            last.fused = {fused_name: fetch(fused_name)}
        matrix = last.fused[fused_name]
        if isinstance(matrix, StoredMatrix):
            return replace(matrix, order=matrix.order[rows], values=lambda: matrix.values()[rows])
        return matrix[rows]

    return part_of


def inflated(config: LlamaConfig, fetch: WeightSource, factor: int) -> tuple[LlamaConfig, WeightSource]:
    """Return the config and weights of a model that costs `factor` times as much and writes the same text.

    It replaces a large model in measurements. The added layers, to the nearest number, are copies of the model's
    own layers with zero output projections, so they add nothing to the residual, but a pass reads, computes and stores
    as much as that many real layers would. The model's own layers come first; the output layer counts and stays one.
    UserError for a factor outside 1 to 256.
    """
    check_whole("inflate", factor, 1, MOST_INFLATED)
    own = config.num_layers
    sources = [*range(own), *(number % own for number in range(added_layers(config, factor)))]

    def fetch_inflated(name: str) -> Any:
        source = source_of(name, own)
        weight = fetch(source)
        if source == name:
            return weight
        is_silenced = name.removeprefix(PREFIX).partition(".")[2].startswith(SILENCED)
        if isinstance(weight, StoredMatrix):
            return weight.zeros() if is_silenced else weight
        if isinstance(weight, np.ndarray):
            return np.zeros_like(weight) if is_silenced else weight.copy()
        # a copy: a weight that two layers shared would be read from memory once
        return torch.zeros_like(weight) if is_silenced else weight.clone()

    return config.of_layers(sources), fetch_inflated


def source_of(name: str, own: int) -> str:
    """Return the weight, of a model with `own` layers, that a weight of the inflated model is made from."""
    number, _, part = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{int(number) % own}.{part}" if name.startswith(PREFIX) else name


def added_layers(config: LlamaConfig, factor: int) -> int:
    """Return how many more layers make a pass read `factor` times as many weights."""
    sizes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    layers = sum(size for name, size in sizes.items() if name.startswith(PREFIX))
    total = layers + config.vocab_size * config.hidden_size  # of the embedding, a pass reads only some rows
    return round((factor - 1) * total * config.num_layers / layers)
