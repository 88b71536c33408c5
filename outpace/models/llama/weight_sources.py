"""Weights by name, and sources derived from others: fused matrices split, and layers chosen.

A source is a function from a Hugging Face weight name to a tensor, an array, or a matrix in its file's format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.models.llama.config import phi
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.recurrence import INPUTS

PREFIX = "model.layers."
TensorGetter = Callable[[str], Any]
FLOATS = ("F32", "F16", "BF16")  # a file's formats without blocks


class StoredSize(NamedTuple):
    """The format and size in bytes of a tensor in its file."""

    kind: str
    bytes: int


class BlockFormat(NamedTuple):
    """A file's format: its name, and how many values and bytes a block has."""

    name: str
    values: int
    bytes: int


Q4_1 = BlockFormat("Q4_1", 32, 20)  # the format to which floats are rounded in four bits


@dataclass(frozen=True)
class StoredMatrix:
    """The matrix `name` [rows, columns] of the file `path`, in the file's format `kind`.

    `data` uint8 [rows, bytes per row]; row i of the matrix is row order[i] of it, int32, or zeros if order[i] is -1.
    `data` may be empty, with any `kind`, for a format that the kernels do not support. `values` returns float32 [rows,
    columns]; `forget` releases the memory of `data` if the file stays open.
    """

    path: Path
    name: str
    kind: str
    data: np.ndarray
    order: np.ndarray
    columns: int
    values: Callable[[], np.ndarray]
    forget: Callable[[], None]


def split_fused(config: LlamaConfig, fetch: TensorGetter) -> TensorGetter:
    """Return a source with Llama's weight names for a checkpoint that fuses matrices, as Phi-3's and Qwen3-Next's do.

    The parts are rows of the fused matrix; those of queries and keys are reordered for the rotation. The rows of
    `self_attn.output_gate` come from the matrix of the queries.
    """
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    middle = config.intermediate_size
    order = phi.head_order(config.head_dim, config.rotary_dim)
    queries = (np.arange(0, query_width, config.head_dim)[:, None] + order).reshape(-1)
    parts: dict[str, tuple[str, np.ndarray]] = {}
    if config.fused:
        parts = {
            "self_attn.q_proj": (phi.QKV, queries),
            "self_attn.k_proj": (phi.QKV, queries[:kv_width] + query_width),
            "self_attn.v_proj": (phi.QKV, np.arange(kv_width) + query_width + kv_width),
            "mlp.gate_proj": (phi.GATE_UP, np.arange(middle)),
            "mlp.up_proj": (phi.GATE_UP, np.arange(middle) + middle),
        }
    elif config.output_gate:  # the rows of a head are its query, then its gate
        heads = np.arange(0, 2 * query_width, 2 * config.head_dim)[:, None]
        parts = {
            "self_attn.q_proj": ("self_attn.q_proj", (heads + order).reshape(-1)),
            "self_attn.output_gate": (
                "self_attn.q_proj",
                (heads + config.head_dim + np.arange(config.head_dim)).reshape(-1),
            ),
            "self_attn.k_proj": ("self_attn.k_proj", queries[:kv_width]),
            "self_attn.q_norm": ("self_attn.q_norm", order),
            "self_attn.k_norm": ("self_attn.k_norm", order),
        }
    if config.recurrence:
        for name, (fused, rows) in config.recurrence.fused_rows().items():
            parts[INPUTS + name] = INPUTS + fused, rows
    if not parts:
        return fetch

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


def source_of(name: str, layers: Sequence[int]) -> str:
    """Return the whole model's name for a weight of a model that has only these layers."""
    number, _, part = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{layers[int(number)]}.{part}" if name.startswith(PREFIX) else name


def parse_layers(text: str, total: int) -> list[int]:
    """Parse numbers and ranges of layers, as in 0-24,26-29; UserError unless they rise and are less than `total`."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        ends = []
    is_valid = all(len(pair) < 3 and pair[0] <= pair[-1] < total for pair in ends)
    numbers = [layer for pair in ends if is_valid for layer in range(pair[0], pair[-1] + 1)]
    if not numbers or numbers != sorted(set(numbers)):
        allowed = f"numbers from 0 to {total - 1} in rising order, as in 0,{total - 1} or 0-{total - 1}"
        raise UserError(f"layers is {text!r:.100}, it must be {allowed}")
    return numbers
