"""The kernels' recurrent layers in numpy: gated delta nets and short convolutions, and what a session keeps for them.

The kernels walk a tree and reuse states; here each row's state is made anew from the committed one. Both take the same
nodes in by the same operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace_kernels.emulated_matrices import Matrix
from outpace_kernels.emulated_numbers import (
    GROUP,
    LANES,
    F,
    exponential,
    fma,
    groups_of,
    inverse_rms,
    sigmoid,
    silu,
    sum_lanes,
)

SERIES = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1)
LENGTH_FLOOR = F(1e-6)


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a model's recurrent layers; those of heads are 0 for short convolutions."""

    layers: int = 0
    filter_length: int = 0
    channels: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_depth: int = 0
    value_depth: int = 0
    tiled: bool = False

    def __post_init__(self) -> None:
        """Find the key head of each value head."""
        heads = np.arange(self.value_heads)
        keys = heads % self.key_heads if self.tiled else heads // max(self.value_heads // max(self.key_heads, 1), 1)
        object.__setattr__(self, "key_of", keys)

    @property
    def head_groups(self) -> int:
        return -(-self.value_depth // GROUP)

    @property
    def state_size(self) -> int:
        """Number of floats of one layer's state."""
        heads = self.value_heads * self.key_depth * self.value_depth
        return heads + (self.filter_length - 1) * self.channels

    @property
    def stash_size(self) -> int:
        """Number of floats that a node stashes in one layer."""
        heads = -(-self.value_heads // LANES) * LANES + self.key_heads * self.key_depth
        return self.channels + heads + self.value_heads * self.value_depth


@dataclass
class RecurrentWeights:
    """A recurrent layer's weights besides those that all layers have; see `outpace_kernels.Layer.recurrent`."""

    filters: np.ndarray
    strengths: Matrix | None = None
    rates: Sequence[float] = ()
    time_bias: Sequence[float] = ()
    norm: Sequence[float] = ()


@dataclass
class State:
    """One layer's state: of the heads [value heads, key_depth, value_depth], and the last rows before the filter."""

    heads: np.ndarray
    history: np.ndarray

    def with_node(self, node: Node) -> State:
        """Return the state with a node taken in."""
        heads = self.heads
        if len(heads):
            decayed = heads * node.decay[:, None, None]
            heads = fma(node.key[:, :, None], node.delta[:, None, :], decayed)
        return State(heads, np.concatenate([self.history, node.row[None]])[1:])


@dataclass
class Node:
    """What a node stashes in one layer: its row before the filter; each value head's decay, key and delta."""

    row: np.ndarray
    decay: np.ndarray = field(default_factory=lambda: np.zeros(0, F))
    key: np.ndarray = field(default_factory=lambda: np.zeros(0, F))
    delta: np.ndarray = field(default_factory=lambda: np.zeros(0, F))


class States:
    """A session's states of all recurrent layers."""

    def __init__(self, sizes: Recurrence) -> None:
        self.sizes = sizes
        self.load(None)

    def load(self, saved: np.ndarray | None) -> None:
        """Start from a saved state or from zeros."""
        sizes = self.sizes
        flat = np.zeros((sizes.layers, sizes.state_size), F) if saved is None else saved.reshape(sizes.layers, -1)
        columns = sizes.value_depth // LANES
        size = sizes.value_heads * sizes.key_depth * sizes.value_depth
        self.layers = []
        for one in flat.copy():
            heads = one[:size].reshape(sizes.value_heads, columns, sizes.key_depth, LANES).swapaxes(1, 2)
            heads = heads.reshape(sizes.value_heads, sizes.key_depth, -1) if size else heads
            self.layers.append(State(heads, one[size:].reshape(-1, sizes.channels)))
        self.pending: list[dict[int, Node]] = []  # of each node, by layer
        self.folds: list[dict[int, Node]] = []

    def save(self) -> np.ndarray:
        """Return all states, flat; heads as [value_depth / 16, key_depth, 16]."""
        parts = []
        for one in self.layers:
            heads = one.heads.reshape(*one.heads.shape[:2], -1, LANES).swapaxes(1, 2) if one.heads.size else one.heads
            parts += [heads.reshape(-1), one.history.reshape(-1)]
        return np.concatenate(parts)

    def keep(self, path: Sequence[int], live: Sequence[int]) -> None:
        """Accept the nodes of a path; only `live` ones stay pending."""
        self.folds += [self.pending[node] for node in path]
        self.pending = [self.pending[node] for node in live]

    def fold(self) -> None:
        """Take the accepted nodes in."""
        for node in self.folds:
            self.layers = [state.with_node(node[number]) for number, state in enumerate(self.layers)]
        self.folds = []


def softplus(x: np.ndarray) -> np.ndarray:
    """Return log(1 + e^x) = max(x, 0) + 2 artanh(z), z = t / (2 + t), t = e^-|x|."""
    t = exponential(np.abs(x) * F(-1))
    z = t / (F(2) + t)
    p = np.full_like(x, F(1 / 15))
    for factor in SERIES:
        p = fma(p, z * z, F(factor))
    return fma(z * F(2), p, np.maximum(x, F(0)))


def compute_row(
    sizes: Recurrence, weights: RecurrentWeights, mixed: np.ndarray, state: State, epsilon: float
) -> tuple[np.ndarray, Node]:
    """Compute a row from its inputs and its parent's state: the output matrix's inputs, and what the node stashes."""
    channels, width = sizes.channels, sizes.key_heads * sizes.key_depth
    row = mixed[:channels] if sizes.value_heads else mixed[:channels] * mixed[2 * channels : 3 * channels]
    total = np.zeros(channels, F)
    for tap, rows in zip(weights.filters, [*state.history, row], strict=True):
        total = fma(tap, rows, total)
    if not sizes.value_heads:
        return total * mixed[channels : 2 * channels], Node(row)
    query, key, value = np.split(silu(total), [width, 2 * width])
    scale = F(1) / np.sqrt(F(sizes.key_depth))
    query = _unit(query.reshape(sizes.key_heads, -1), scale)
    key = _unit(key.reshape(sizes.key_heads, -1), F(1))
    match = _dot(key, query)[sizes.key_of, None]  # type: ignore[attr-defined]
    query, key = query[sizes.key_of], key[sizes.key_of]  # type: ignore[attr-defined]
    value = value.reshape(sizes.value_heads, -1)
    gates, strengths, steps = np.split(mixed[channels:], [value.size, value.size + sizes.value_heads])
    decay = exponential(softplus(steps + np.array(weights.time_bias, F)) * np.array(weights.rates, F))
    by_key, by_query = np.zeros_like(value), np.zeros_like(value)
    for entry in range(sizes.key_depth):
        by_key = fma(key[:, entry, None], state.heads[:, entry], by_key)
        by_query = fma(query[:, entry, None], state.heads[:, entry], by_query)
    delta = fma(by_key, -decay[:, None], value) * sigmoid(strengths)[:, None]
    out = fma(match, delta, by_query * decay[:, None])
    gates = silu(gates.reshape(out.shape))
    out = out * inverse_rms(out, epsilon) * np.array(weights.norm, F) * gates
    return groups_of(out).reshape(-1), Node(row, decay, key, delta)


def _unit(heads: np.ndarray, scale: np.float32) -> np.ndarray:
    """Divide heads by their lengths, times `scale`."""
    factor = F(1) / np.sqrt(sum_lanes(heads, squared=True) + LENGTH_FLOOR) * scale
    return heads * factor[:, None]


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply heads entry by entry and sum the products in the order of `sum_lanes`."""
    total = np.zeros((len(a), LANES), F)
    for x, y in zip(groups_of(a, LANES).swapaxes(0, 1), groups_of(b, LANES).swapaxes(0, 1), strict=True):
        total = fma(x, y, total)
    return sum_lanes(total)
