"""Recurrent layers by torch: gated delta nets (arXiv:2412.06464) and short convolutions, over token trees.

A session has one state for each layer, after its committed tokens. A pass reads it, walks each tree from level to level
with the states of one level, and stashes for each node what the state needs to take the node in. The next pass folds
the kept nodes in, in their order and by the operations of the walk, so the state has the bits of one-by-one decoding.

Sums are halved by elementwise additions, and exponentials are computed in float64: then no bit depends on the number of
rows, on threads or on the places of rows. Without exact mode, long chains are computed by matrix products instead, up
to `READ_TOGETHER` nodes at once (arXiv:2406.06484), and folded by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.models.llama.config.recurrence import READ_TOGETHER, USUAL_NODES, Recurrence

if TYPE_CHECKING:
    from outpace.models.llama.torch.attention import SessionRows

LENGTH_FLOOR = 1e-6  # added to the squares of a query or key
MIN_CHAIN = 16  # nodes from which on a chain is computed by matrix products
_DECAY_FLOOR = 1e-38  # its logarithm is finite


@dataclass(frozen=True)
class RecurrentWeights:
    """A recurrent layer's numbers besides its matrices; those after the filter are of a delta net only.

    `filter` float32 [filter_length, channels], the earliest token's first. `rates` and `time_bias` float64 [value
    heads]: a decay is exp(rate * softplus(input + bias)). `norm` float32 [value_depth], of each head's output.
    """

    filter: Tensor
    rates: Tensor | None = None
    time_bias: Tensor | None = None
    norm: Tensor | None = None


class Snapshot(NamedTuple):
    """The state of all recurrent layers after some committed tokens."""

    heads: Tensor  # [layers, value heads, key_depth, value_depth]
    history: Tensor  # [layers, filter_length - 1, channels]: the last rows before the filter


class RecurrentMemory:
    """What a session keeps for its recurrent layers: their state, and the stash of pending and of kept nodes."""

    def __init__(self, sizes: Recurrence, num_layers: int, device: torch.device, is_exact: bool) -> None:
        self.sizes, self._device, self._layers, self._is_exact = sizes, device, num_layers, is_exact
        self.rows: list[int] = []  # the row of each pending node in the stash
        self.folds: list[int] = []  # rows of kept nodes that the state has not taken in yet, in their order
        self.stash = torch.empty(num_layers, 0, sizes.stash_size, device=device)
        self.load(None)

    def load(self, saved: Snapshot | None) -> None:
        """Start from a snapshot, or from the beginning of a text; pending nodes are dropped."""
        self.rows, self.folds, sizes = [], [], self.sizes
        if saved is None:
            heads = (self._layers, sizes.value_heads, sizes.key_depth, sizes.value_depth)
            history = (self._layers, sizes.filter_length - 1, sizes.channels)
            saved = Snapshot(torch.zeros(heads, device=self._device), torch.zeros(history, device=self._device))
        self.heads, self.history = saved

    def save(self) -> Snapshot:
        """Return the state after all committed tokens. It is never written: a fold makes another one."""
        self.fold()
        return Snapshot(self.heads, self.history)

    def add(self, count: int) -> None:
        """Reserve rows of the stash for new pending nodes; kept ones leave it first."""
        self.fold()
        used = {*self.rows}
        self.rows += itertools.islice((row for row in itertools.count() if row not in used), count)
        if (needed := max(self.rows, default=-1) + 1) > self.stash.shape[1]:
            self.stash = F.pad(self.stash, (0, 0, 0, needed - self.stash.shape[1]))

    def keep(self, path: Sequence[int], live: Sequence[int]) -> None:
        """Let the next fold take in the nodes of `path`; only `live` nodes stay pending, renumbered from 0."""
        self.folds += [self.rows[node] for node in path]
        self.rows = [self.rows[node] for node in live]

    def trim(self) -> None:
        """Free the stash if nothing is pending."""
        self.fold()
        if not self.rows:
            self.stash = self.stash[:, :0].clone()

    @torch.inference_mode()
    def fold(self) -> None:
        """Take the kept nodes into the state."""
        if not self.folds:
            return
        sizes = self.sizes
        last = self.stash[:, self.folds[1 - sizes.filter_length :], : sizes.channels]
        self.history = torch.cat([self.history, last], 1)[:, last.shape[1] :]
        key_heads = [sizes.key_head(head) for head in range(sizes.value_heads)]
        joins = not self._is_exact and len(self.folds) >= MIN_CHAIN
        for rows in ([self.folds] if joins else [[row] for row in self.folds]) if sizes.is_delta_net else ():
            _, decays, keys, deltas = split_stash(self.stash[:, rows], sizes)
            if joins:
                self.heads = advanced_by_chain(self.heads, decays, keys[:, :, key_heads], deltas)
            else:
                self.heads = advanced(self.heads * decays[:, 0, :, None, None], keys[:, 0, key_heads], deltas[:, 0])
        self.folds = []
        if not self.rows and self.stash.shape[1] > USUAL_NODES:
            self.stash = self.stash[:, :USUAL_NODES].clone()


def split_stash(nodes: Tensor, sizes: Recurrence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split stashed nodes [.., stash_size]: rows before the filter, decays [.., value heads], keys [.., key heads,
    key_depth] and deltas [.., value heads, value_depth]."""
    parts = (sizes.channels, sizes.value_heads, sizes.key_width, sizes.value_width)
    rows, decays, keys, deltas = nodes.split(parts, -1)
    return rows, decays, keys.unflatten(-1, (sizes.key_heads, -1)), deltas.unflatten(-1, (sizes.value_heads, -1))


def advanced(decayed: Tensor, key: Tensor, delta: Tensor) -> Tensor:
    """Add a node to a decayed state: [.., key_depth, value_depth]. Not one fused operation, whose rounding depends on
    the device."""
    return decayed.add_(key[..., :, None] * delta[..., None, :])


def log_decays(decays: Tensor) -> Tensor:
    """Add up the logarithms of decays along a chain: [.., nodes, heads] to float64 [.., heads, nodes]"""
    return decays.double().clamp_min(_DECAY_FLOOR).log().cumsum(-2).mT


def advanced_by_chain(states: Tensor, decays: Tensor, keys: Tensor, deltas: Tensor) -> Tensor:
    """Decay states [.., value heads, key_depth, value_depth] and add a chain's nodes by one product.

    `decays` [.., nodes, value heads]; `keys` and `deltas` [.., nodes, value heads, depth].
    """
    logs = log_decays(decays)
    later = (logs[..., -1:] - logs).exp().float()  # how much of each node's addition is left
    added = (keys.transpose(-3, -2) * later[..., None]).mT @ deltas.transpose(-3, -2)
    return states * logs[..., -1].exp().float()[..., None, None] + added


def halved_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension by adding its second half to its first, again and again."""
    while (size := x.shape[dim]) > 1:
        pairs = x.narrow(dim, 0, size // 2) + x.narrow(dim, size // 2, size // 2)
        x = torch.cat([pairs, x.narrow(dim, size - 1, 1)], dim) if size % 2 else pairs
    return x.squeeze(dim)


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x) in float64, rounded to float32."""
    wide = x.double()
    return wide.mul_(wide.sigmoid()).float()


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply by the sigmoid of gates, computed in float64: in x's dtype"""
    return (x.double() * gates.double().sigmoid()).to(x.dtype)


class Level(NamedTuple):
    """One level of a walk. `nodes` index the pass's rows, then its stashed nodes; `above`: the places of their parents
    in the level before, or of their sessions; None: as they are. `new`: the places of the pass's own rows `new_rows`;
    None if all are."""

    nodes: Tensor
    above: Tensor | None
    new: Tensor | None
    new_rows: Tensor


Node = tuple[int, int]  # the number of a session, and its pending node


class RecurrentPass:
    """How a forward pass walks its sessions' trees; the same for all layers. Creating it folds the kept nodes."""

    def __init__(self, sizes: Recurrence, parts: Sequence[SessionRows], device: torch.device, is_exact: bool) -> None:
        self.sizes = sizes
        self._key_heads = [sizes.key_head(head) for head in range(sizes.value_heads)]
        sessions = list(dict.fromkeys(part.session for part in parts))
        self._memories: list[RecurrentMemory] = [session.memory for session in sessions]
        rows: dict[Node, int] = {}  # of the pass's nodes
        paths: dict[Node, list[int]] = {}  # of the pass's nodes, their ancestors and themselves
        for part in parts:
            number = sessions.index(part.session)
            for place, seen in enumerate(part.visible):
                own = number, part.before + place
                rows[own], paths[own] = part.rows.start + place, np.flatnonzero(seen).tolist()
        parents: dict[Node, Node | None] = {}  # of all nodes that the walk needs
        for (number, node), path in paths.items():
            parents[number, node] = (number, path[-2]) if len(path) > 1 else None
            for depth, ancestor in enumerate(path):
                if (number, ancestor) in rows:
                    break
                parents[number, ancestor] = (number, path[depth - 1]) if depth else None
        places, self._old = dict[Node, int](), list[list[int]]()
        starts, start = list[int](), len(rows)  # in the filter's table: rows, then each session's history and old nodes
        for number, memory in enumerate(self._memories):
            memory.fold()
            old = sorted(node for node in parents if node[0] == number and node not in rows)
            places |= {node: len(rows) + len(places) + place for place, node in enumerate(old)}
            self._old.append([memory.rows[node] for _, node in old])
            starts.append(start)
            start += sizes.filter_length - 1 + len(old)
        stashed = [
            [(memory.rows[node], row) for (at, node), row in rows.items() if at == number]
            for number, memory in enumerate(self._memories)
        ]
        self._own = [([place for place, _ in pairs], [row for _, row in pairs]) for pairs in stashed]
        self.num_rows = len(rows)
        taps = [self._taps_of(number, path, rows, places, starts[number]) for (number, _), path in paths.items()]
        self._taps = to_device(taps, np.int64, device)
        self._chains: dict[int, slice] = {}  # rows of the sessions without a walk
        for part in () if is_exact else parts:
            count, depths = len(part.visible), part.session.pending_depths
            if count >= MIN_CHAIN and count == len(depths) == depths[-1] + 1:  # all that is pending
                self._chains[sessions.index(part.session)] = part.rows
        walked = {node: parent for node, parent in parents.items() if node[0] not in self._chains}
        self._levels = list(_levels(walked, rows, places, len(sessions), device)) if sizes.is_delta_net else []

    def _taps_of(
        self, number: int, path: Sequence[int], rows: dict[Node, int], places: dict[Node, int], start: int
    ) -> list[int]:
        """Return where the filter's table holds a node's rows, the earliest first."""
        length, before = self.sizes.filter_length, len(rows) + sum(map(len, self._old[:number]))
        history = range(start, start + length - 1)
        last = [
            row if (row := rows.get((number, node))) is not None else history.stop + places[number, node] - before
            for node in path[-length:]
        ]
        return [*history[len(last) - 1 :], *last]

    def filtered(self, layer: int, rows: Tensor, weights: RecurrentWeights) -> Tensor:
        """Apply the filter to rows [nodes, channels] along their branches; float32."""
        table = [rows]
        for memory, old in zip(self._memories, self._old, strict=True):
            table += [memory.history[layer], memory.stash[layer, old, : self.sizes.channels]]
        taken = torch.cat(table)
        total = taken[self._taps[:, 0]] * weights.filter[0]
        for tap in range(1, self.sizes.filter_length):
            total = total + taken[self._taps[:, tap]] * weights.filter[tap]
        return total

    def put(self, layer: int, *parts: Tensor) -> None:
        """Stash the pass's nodes: [nodes, stash_size] in parts."""
        stashed = torch.cat([part.flatten(1) for part in parts], 1)
        for memory, (places, rows) in zip(self._memories, self._own, strict=True):
            memory.stash[layer, places] = stashed[rows]

    def delta_net(self, layer: int, inputs: Tensor, weights: RecurrentWeights) -> Tensor:
        """Compute the heads' outputs [nodes, value heads, value_depth] from rows of channels, then one beta and one
        alpha of each value head."""
        sizes = self.sizes
        rows, beta, alpha = inputs.split((sizes.channels, sizes.value_heads, sizes.value_heads), 1)
        mixed = silu(self.filtered(layer, rows, weights))
        query, key, value = mixed.split((sizes.key_width, sizes.key_width, sizes.value_width), 1)
        query = _unit(query.unflatten(1, (sizes.key_heads, -1))) * sizes.key_depth**-0.5
        key, value = _unit(key.unflatten(1, (sizes.key_heads, -1))), value.unflatten(1, (sizes.value_heads, -1))
        assert weights.rates is not None
        assert weights.time_bias is not None
        decay = (F.softplus(alpha.double() + weights.time_bias) * weights.rates).exp().float()
        out, delta = self._walk(layer, query, key, value, decay, beta.double().sigmoid().float())
        self.put(layer, rows, decay, key, delta)
        return out

    def convolution(self, layer: int, inputs: Tensor, weights: RecurrentWeights) -> Tensor:
        """Compute a short convolution [nodes, channels] from the gates of its inputs, those of its outputs, and its
        inputs, [nodes, 3 channels]."""
        before, after, rows = inputs.chunk(3, 1)
        rows = before * rows
        self.put(layer, rows)
        return self.filtered(layer, rows, weights) * after

    def _walk(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Walk the trees; return the outputs and the deltas, [nodes, value heads, value_depth] each."""
        stashed = [memory.stash[layer, old] for memory, old in zip(self._memories, self._old, strict=True)]
        _, old_decays, old_keys, old_deltas = split_stash(torch.cat(stashed), self.sizes)
        decays, keys = torch.cat([decay, old_decays]), torch.cat([key, old_keys])[:, self._key_heads]
        deltas, out = torch.cat([torch.empty_like(value), old_deltas]), torch.empty_like(value)
        query, heads = query[:, self._key_heads], [memory.heads[layer] for memory in self._memories]
        states = torch.stack(heads) if len(heads) > 1 else heads[0][None]  # [nodes, value heads, key and value depth]
        for level in self._levels:
            states = (states if level.above is None else states[level.above]) * decays[level.nodes][..., None, None]
            new, rows = level.new, level.new_rows
            found = _read(states if new is None else states[new], keys[rows])
            deltas[rows] = (value[rows] - found) * beta[rows][..., None]
            states = advanced(states, keys[level.nodes], deltas[level.nodes])
            out[rows] = _read(states if new is None else states[new], query[rows])
        for number, chain in self._chains.items():
            given = (part[chain].split(READ_TOGETHER) for part in (query, keys, value, decay, beta))
            state, start = heads[number], chain.start
            for parts in zip(*given, strict=True):
                place = slice(start, start := start + len(parts[0]))
                out[place], deltas[place] = _read_chain(state, *parts)
                if start < chain.stop:
                    state = advanced_by_chain(state, parts[3], parts[1], deltas[place])
        return out, deltas[: len(value)]


def _levels(
    parents: dict[Node, Node | None],
    rows: dict[Node, int],
    old: dict[Node, int],
    num_sessions: int,
    device: torch.device,
) -> Iterator[Level]:
    """Yield the levels of the walk of these nodes. `rows` and `old`: the indices of the pass's and of stashed nodes."""
    walks: list[list[Node]] = []
    depths: dict[Node | None, int] = {None: -1}
    for node in sorted(parents):  # parents first
        depths[node] = depth = depths[parents[node]] + 1
        walks += [[]] * (depth + 1 - len(walks))
        walks[depth] = [*walks[depth], node]
    places: dict[Node, int] = {}
    for walk in walks:
        above = [node[0] if (parent := parents[node]) is None else places[parent] for node in walk]
        new = [place for place, node in enumerate(walk) if node in rows]
        indices = [[rows[node] if node in rows else old[node] for node in walk], above, new]
        nodes, chosen, new_places = (to_device(one, np.int64, device) for one in indices)
        is_same, is_new = above == list(range(len(places) or num_sessions)), len(new) == len(walk)
        yield Level(
            nodes,
            None if is_same else chosen,
            None if is_new else new_places,
            nodes if is_new else nodes[new_places],
        )
        places = {node: place for place, node in enumerate(walk)}


def _unit(heads: Tensor) -> Tensor:
    """Divide heads [.., depth] by their lengths."""
    return heads / (halved_sum(heads * heads, -1) + LENGTH_FLOOR).sqrt()[..., None]


def _read(states: Tensor, vectors: Tensor) -> Tensor:
    """Multiply states [.., key_depth, value_depth] by vectors [.., key_depth]."""
    return halved_sum(states * vectors[..., None], -2)


def _read_chain(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and deltas of a chain, [nodes, value heads, value_depth] each, from the state before it.

    A delta reads what the earlier ones add: all are the solution of one triangular system.
    """
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))  # [value heads, nodes, depth]
    logs, strength = log_decays(decay), beta.mT[..., None]
    between = (logs[..., None] - logs[:, None]).tril_().exp_().tril_().float()  # what of column's node is left at row's
    left = logs.exp().float()[..., None]
    wanted = strength * (value - left * (key @ state))
    system = strength * (key @ key.mT) * between  # its diagonal is taken for ones
    deltas = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = left * (query @ state) + (query @ key.mT * between) @ deltas
    return out.transpose(0, 1), deltas.transpose(0, 1)


def norm_heads(x: Tensor, weights: RecurrentWeights, epsilon: float) -> Tensor:
    """Norm heads [.., value_depth]."""
    assert weights.norm is not None
    return x / (halved_sum(x * x, -1) / x.shape[-1] + epsilon).sqrt()[..., None] * weights.norm
