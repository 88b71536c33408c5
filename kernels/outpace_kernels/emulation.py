"""The kernels' arithmetic in numpy: slow and readable, with the same bits as the kernels.

It has the kernels' names and signatures, so a model can be built from it in their place. emulated_numbers.py has the
operations, emulated_matrices.py the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from outpace_kernels.emulated_experts import Experts as Experts
from outpace_kernels.emulated_formats import FLOATS as FLOATS
from outpace_kernels.emulated_formats import FORMATS as FILE_FORMATS
from outpace_kernels.emulated_formats import round_to_q4_1 as round_to_q4_1
from outpace_kernels.emulated_matrices import Matrix as Matrix
from outpace_kernels.emulated_matrices import WeightArena as WeightArena
from outpace_kernels.emulated_matrices import read_rows
from outpace_kernels.emulated_numbers import ARITHMETIC as ARITHMETIC
from outpace_kernels.emulated_numbers import GROUP as GROUP
from outpace_kernels.emulated_numbers import KV_DTYPES as KV_DTYPES
from outpace_kernels.emulated_numbers import (
    LANES,
    PANEL,
    SCALED,
    F,
    as_bytes,
    capped,
    clamped_gate,
    exponential,
    fma,
    gelu,
    groups_of,
    inverse_rms,
    sigmoid,
    silu,
)
from outpace_kernels.emulated_numbers import MAX_DEPTH as MAX_DEPTH
from outpace_kernels.emulated_numbers import MAX_USED_EXPERTS as MAX_USED_EXPERTS
from outpace_kernels.emulated_numbers import sum_lanes as sum_lanes
from outpace_kernels.emulated_recurrence import Recurrence as Recurrence
from outpace_kernels.emulated_recurrence import RecurrentWeights, States, compute_row

FORMATS = {name: form.inputs for name, form in FILE_FORMATS.items()}


def instruction_sets() -> list[str]:
    """Return a stand-in for the kernels' list."""
    return ["emulation"]


@dataclass
class Layer:
    """One layer's weights, with the kernels' signature."""

    attention_norm: np.ndarray
    mlp_norm: np.ndarray
    qkv: Matrix
    output: Matrix
    gate_up: Matrix | None
    down: Matrix | None
    query_norm: Sequence[float] = field(default_factory=list)
    key_norm: Sequence[float] = field(default_factory=list)
    rotates: bool = True
    rotation: int = 0
    window: int = 0
    attention_output_norm: Sequence[float] = field(default_factory=list)
    mlp_output_norm: Sequence[float] = field(default_factory=list)
    token_norm: Sequence[float] = field(default_factory=list)
    experts: Experts | None = None
    sinks: Sequence[float] = field(default_factory=list)
    heads: Heads | None = None
    keys_of: int = -1
    branch_norms: BranchNorms | None = None
    embedding: EmbeddingBranch | None = None
    scale: float = 1.0
    is_causal: bool = False
    recurrent_weights: RecurrentWeights | None = None

    @classmethod
    def recurrent(
        cls,
        attention_norm: np.ndarray,
        mlp_norm: np.ndarray,
        input: Matrix,
        output: Matrix,
        gate_up: Matrix | None,
        down: Matrix | None,
        filters: np.ndarray,
        strengths: Matrix | None = None,
        experts: Experts | None = None,
        **numbers: Sequence[float],
    ) -> Layer:
        """Return a layer with a delta net or, without rates, a short convolution."""
        weights = RecurrentWeights(filters, strengths, **numbers)
        norms = attention_norm, mlp_norm
        return cls(*norms, input, output, gate_up, down, experts=experts, recurrent_weights=weights)

    def to_kv_only(self) -> Layer:
        """Return a layer that stores the keys and values of states that are normed already, and does nothing else."""
        return replace(self, attention_norm=np.zeros(0, F), output=None)  # type: ignore[arg-type]


@dataclass
class Heads:
    """Sizes of attention."""

    queries: int
    keys: int
    depth: int
    kv_dtype: str
    epsilon: float
    scale: float = 0.0  # of attention scores; 0: 1 / sqrt(depth)
    gated: bool = False
    cap: float = 0.0  # scores become cap tanh(score / cap); 0: they stay
    projected: int = 2  # besides queries: keys and values, 1: keys, which are the values, or 0: neither
    norms_values: bool = False


NO_RECURRENCE = Recurrence()


class Store:
    """Keys and values of each layer [2, kv_heads, slots, depth], and recurrent states."""

    def __init__(
        self, heads: Sequence[Heads], capacity: int, slots: int = -1, recurrence: Recurrence = NO_RECURRENCE
    ) -> None:
        self.kv_dtype, self.states = heads[0].kv_dtype, States(recurrence)
        self.data = [np.zeros((2, one.keys, capacity if slots < 0 else slots, one.depth), F) for one in heads]

    @staticmethod
    def bytes_of(heads: Sequence[Heads], slots: int, recurrence: Recurrence = NO_RECURRENCE, places: int = 0) -> int:
        """Return the bytes of `slots` slots, of the states, and of what `places` nodes stash."""
        total = recurrence.layers * (recurrence.state_size + places * recurrence.stash_size) * 4
        for one in heads:
            scales = -(-one.depth // SCALED) * 2 if one.kv_dtype == "int8" else 0
            total += 2 * one.keys * slots * (one.depth * KV_DTYPES[one.kv_dtype] + scales)
        return total

    def resize(self, slots: int) -> None:
        """Add or drop slots at the end."""
        for layer, data in enumerate(self.data):
            kept = data[..., :slots, :]
            more = np.zeros((*kept.shape[:2], slots - kept.shape[2], kept.shape[3]), F)
            self.data[layer] = np.concatenate([kept, more], axis=2)

    def put(self, layer: int, slot: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store one slot of one layer: [kv_heads, depth] twice."""
        both = np.stack([keys, values])
        if self.kv_dtype == "float16":
            both = both.clip(-65504, 65504).astype(np.float16)
        self.data[layer][:, :, slot] = as_bytes(both) if self.kv_dtype == "int8" else both

    def move(self, source: Sequence[int], start: int) -> None:
        """Move slots `source` to start, start + 1, ..."""
        for data in self.data:
            data[..., start : start + len(source), :] = data[..., source, :]

    def copy(self, other: Store, count: int) -> None:
        """Copy the first `count` slots of another store."""
        for data, others in zip(self.data, other.data, strict=True):
            data[..., :count, :] = others[..., :count, :]

    def keep(self, path: Sequence[int], live: Sequence[int]) -> None:
        """Commit pending nodes of the recurrent states."""
        self.states.keep(path, live)

    def trim_states(self) -> None:
        """Free unused memory."""

    @property
    def state_size(self) -> int:
        return len(self.states.save())

    def save_state(self, out: np.ndarray) -> None:
        """Copy the recurrent states."""
        out[:] = self.states.save()

    def load_state(self, saved: np.ndarray | None) -> None:
        """Continue from saved states."""
        self.states.load(saved)

    def read(self, layer: int, count: int, out: np.ndarray) -> None:
        """Return one layer's first `count` slots."""
        out[:] = self.data[layer][:, :, :count]


@dataclass
class BranchNorms:
    """Norms of a layer that adds an MLP and experts."""

    router: Sequence[float]
    mlp_output: Sequence[float]
    experts: Sequence[float]
    experts_output: Sequence[float]


@dataclass
class EmbeddingBranch:
    """What adds a token's embedding for its layer."""

    gate: Matrix
    output: Matrix
    norm: Sequence[float]


class TokenEmbeddings:
    """An embedding of each token for every layer."""

    def __init__(self, name: str, table: np.ndarray, columns: int, projection: Matrix, norm: Sequence[float]) -> None:
        self._name, self._table, self._columns = name, table, columns
        self.projection, self.norm, self.bytes = projection, np.array(norm, F), 0

    def join(self, x: np.ndarray, tokens: np.ndarray, epsilon: float) -> np.ndarray:
        """Return the embeddings of all layers: [rows, layers, size]"""
        size = len(self.norm)
        rows = read_rows(self._name, self._table[tokens], self._columns).reshape(len(x), -1, size)
        made = self.projection(x).reshape(rows.shape) * (F(1) / np.sqrt(F(x.shape[1])))
        made = made * inverse_rms(made, epsilon) * self.norm
        return (made + rows * np.sqrt(F(size))) * F(0.70710678)


class Model:
    """A model with the kernels' signature; `instruction_set` and `threads` have no effect."""

    instruction_set = instruction_sets()[0]

    def __init__(
        self,
        heads: Heads,
        hidden: int,
        middle: int,
        epsilon: float,
        layers: Sequence[Layer],
        embedding: Matrix,
        norm: np.ndarray,
        head: Matrix,
        instruction_set: str,
        threads: int,
        rotations: int = 1,
        embedding_scale: float = 1.0,
        gelu: bool = False,
        recurrence: Recurrence = NO_RECURRENCE,
        gate_limit: float = 0.0,
        logit_cap: float = 0.0,
        embeddings: TokenEmbeddings | None = None,
    ) -> None:
        self.recurrence, self.gate_limit, self.logit_cap = recurrence, F(gate_limit), F(logit_cap)
        kinds = [layer.recurrent_weights is not None for layer in layers]
        own = [layer.keys_of < 0 for layer in layers]
        self.numbers = [  # among layers of its kind, of the layer whose keys it reads
            sum(o and k == kind for o, k in zip(own[:at], kinds, strict=False))
            for at, kind in ((n if own[n] else layers[n].keys_of, kind) for n, kind in enumerate(kinds))
        ]
        depths = {layer.rotation: (layer.heads or heads).depth for layer in layers if layer.rotates}
        self.rope_ends = np.cumsum([0, *(depths.get(one, heads.depth) // 2 for one in range(rotations))])
        self.embedding_scale, self.is_gelu, self.embeddings = F(embedding_scale), gelu, embeddings
        self.heads, self.epsilon, self.layers = heads, epsilon, layers
        self.embedding, self.norm, self.head, self.outputs = embedding, norm, head, head.outputs

    def forward(
        self,
        spans: Sequence[Any],
        tokens: np.ndarray,
        rope_rows: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        skipped: np.ndarray | None = None,
        hidden_rows: Sequence[int] = (),
        layers: Sequence[int] = (),
        hidden: np.ndarray | None = None,
        position_gaps: Mapping[int, int] = {},
        inputs: Mapping[int, np.ndarray] = {},
        mlp_bias: Mapping[int, np.ndarray] = {},
        panels: np.ndarray | None = None,
    ) -> None:
        """Compute logits of the wanted rows; see `outpace_kernels.Model.forward`."""
        x = np.empty((len(tokens), self.embedding.inputs), F)
        self.embedding.read(tokens, x)
        x *= self.embedding_scale
        rows = _rows_of(spans)
        embedded = x.copy()
        for store, _, pending, count, _ in spans:
            store.states.fold()
            store.states.pending[pending:] = [{} for _ in range(count)]
        for number, vectors in inputs.items():
            x[rows[number]] = vectors
        joined = self.embeddings and self.embeddings.join(x, np.asarray(tokens), self.epsilon)
        for number in range(len(self.layers) + 1):
            for place in np.flatnonzero(np.asarray(layers) == number):
                hidden[place] = x[hidden_rows]  # type: ignore[index]
            if number < len(self.layers):
                passes = (False, False) if skipped is None else skipped[number]
                x = x if passes[0] else self._run_attention(number, x, rope_rows, spans, position_gaps, embedded)
                x = (
                    x
                    if passes[1] or not self.layers[number].output
                    else self._run_mlp(number, x, [(rows[n], by[number]) for n, by in mlp_bias.items()])
                )
                x = x if joined is None else self._add_embedding(self.layers[number], x, joined[:, number])
        if len(wanted):
            logits = self._logits(x[wanted])
            every = range(-(-logits.shape[1] // PANEL))
            for place, panel in enumerate(every if panels is None else panels):
                of_panel = logits[:, panel * PANEL : (panel + 1) * PANEL]
                scores[:, place * PANEL : place * PANEL + of_panel.shape[1]] = of_panel

    def score(
        self,
        spans: Sequence[Any],
        tokens: Sequence[int],
        positions: Sequence[int],
        rope_table: np.ndarray,
        wanted: Sequence[int],
        scores: np.ndarray,
        count: int,
        num_logits: int,
        token_ids: np.ndarray | None = None,
        panels: np.ndarray | None = None,
    ) -> list[Any]:
        """Do the same as `forward` for lists and masks in bytes; unlike the kernels, rank no tokens."""
        masks = [
            (*numbers, np.frombuffer(sees, bool).reshape(numbers[3], numbers[2] + numbers[3]))
            for *numbers, sees in spans
        ]
        rows = masks, np.array(tokens, np.int32), rope_table[list(positions)], np.array(wanted, np.int32)
        self.forward(*rows, scores, panels=panels)
        return []

    def project(self, hidden: np.ndarray, scores: np.ndarray) -> None:
        """Compute logits of hidden states."""
        scores[:] = self._logits(hidden)

    def _logits(self, x: np.ndarray) -> np.ndarray:
        logits = self.head(self._normed(x, self.norm))
        return capped(logits, self.logit_cap) if self.logit_cap else logits

    def _run_attention(
        self,
        number: int,
        x: np.ndarray,
        rope_rows: np.ndarray,
        spans: Sequence[Any],
        position_gaps: Mapping[int, int],
        embedded: np.ndarray,
    ) -> np.ndarray:
        """Run a layer's attention."""
        layer, normed = self.layers[number], self._normed(x, self.layers[number].attention_norm)
        if layer.recurrent_weights:
            return x + layer.output(self._recur(number, normed, spans))
        if len(layer.token_norm):
            tokens = self._normed(embedded, np.array(layer.token_norm, F))
            normed = np.concatenate([_whole_groups(tokens), _whole_groups(normed)], axis=1)
        mixed = layer.qkv(normed)
        attended = self._attend(number, mixed, rope_rows, spans, position_gaps)
        return self._added(x, layer.output(attended), layer.attention_output_norm) if layer.output else x

    def _recur(self, number: int, normed: np.ndarray, spans: Sequence[Any]) -> np.ndarray:
        """Return the inputs of a recurrent layer's output matrix."""
        layer, weights, place = self.layers[number], self.layers[number].recurrent_weights, self.numbers[number]
        assert weights is not None
        mixed = layer.qkv(normed)
        if weights.strengths:
            shared = max(layer.qkv.shared, weights.strengths.shared)  # both read the same rounded inputs
            mixed = np.concatenate([layer.qkv(normed, shared), weights.strengths(normed, shared)], axis=1)
        out = []
        for store, _, pending, count, sees in spans:
            for node in range(count):
                state = store.states.layers[place]
                for other in np.flatnonzero(sees[node])[:-1]:
                    state = state.with_node(store.states.pending[other][place])
                row, stashed = compute_row(self.recurrence, weights, mixed[len(out)], state, self.epsilon)
                store.states.pending[pending + node][place] = stashed
                out.append(row)
        return np.stack(out)

    def fold(self, store: Store) -> None:
        """Take the accepted nodes of a session into its recurrent states."""
        store.states.fold()

    def _run_mlp(self, number: int, x: np.ndarray, mlp_bias: Sequence[tuple[slice, np.ndarray]]) -> np.ndarray:
        """Run a layer's MLP."""
        layer = self.layers[number]
        normed = self._normed(x, layer.mlp_norm)
        if layer.experts:
            shared = (layer.gate_up, layer.down) if layer.gate_up and layer.down else None
            if layer.branch_norms:
                return self._run_branches(layer, x, normed)
            return self._added(x, layer.experts.apply(normed, self._gated, shared), layer.mlp_output_norm)
        assert layer.gate_up
        assert layer.down
        both = layer.gate_up(normed).reshape(len(x), -1, 2, LANES)
        for rows, added in mlp_bias:
            both[rows, :, 1] = both[rows, :, 1] + added.reshape(-1, LANES)
        branch, scale = layer.down(self._gated(both).reshape(len(x), -1)), F(1) if layer.embedding else F(layer.scale)
        return self._added(x, branch, layer.mlp_output_norm) * scale

    def _run_branches(self, layer: Layer, x: np.ndarray, normed: np.ndarray) -> np.ndarray:
        """Run an MLP and the experts besides it."""
        norms, both = layer.branch_norms, layer.gate_up(normed).reshape(len(x), -1, 2, LANES)  # type: ignore[misc]
        assert norms
        assert layer.down
        assert layer.experts
        dense = layer.down(self._gated(both).reshape(len(x), -1))
        routed, inputs = (self._normed(x, np.array(norm, F)) for norm in (norms.router, norms.experts))
        mixture = layer.experts.apply(inputs, self._gated, None, routed)
        branch = self._added(self._normed(dense, np.array(norms.mlp_output, F)), mixture, norms.experts_output)
        return self._added(x, branch, layer.mlp_output_norm) * (F(1) if layer.embedding else F(layer.scale))

    def _add_embedding(self, layer: Layer, x: np.ndarray, embedded: np.ndarray) -> np.ndarray:
        """Add the tokens' embeddings for a layer."""
        assert layer.embedding
        branch = layer.embedding.output((gelu if self.is_gelu else silu)(layer.embedding.gate(x)) * embedded)
        return self._added(x, branch, layer.embedding.norm) * F(layer.scale)

    @property
    def mean_experts(self) -> float:
        """Mean number of experts that a layer applied in the last pass."""
        return float(np.mean([layer.experts.num_distinct for layer in self.layers if layer.experts]))

    def _gated(self, both: np.ndarray) -> np.ndarray:
        """Join gates and ups [rows, groups, 2, LANES]."""
        gate, up = both[:, :, 0], both[:, :, 1]
        if self.gate_limit:
            return clamped_gate(gate, up, self.gate_limit)
        gated: np.ndarray = (gelu if self.is_gelu else silu)(gate) * up
        return gated

    def _added(self, x: np.ndarray, branch: np.ndarray, norm: Sequence[float]) -> np.ndarray:
        """Add a sublayer's output to the residual, normalized first if there is a norm for it."""
        return x + (self._normed(branch, np.array(norm, F)) if len(norm) else branch)

    def _normed(self, x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        return x * inverse_rms(x, self.epsilon) * norm if len(norm) else x

    def _attend(
        self,
        number: int,
        mixed: np.ndarray,
        rope_rows: np.ndarray,
        spans: Sequence[Any],
        position_gaps: Mapping[int, int],
    ) -> np.ndarray:
        """Return every row's heads, each padded to whole groups: [rows, heads * padded depth]."""
        layer, slot_layer = self.layers[number], self.numbers[number]
        heads = layer.heads or self.heads
        parts = mixed.reshape(len(mixed), -1, heads.depth)
        ends = np.cumsum([heads.queries, *([heads.keys] * heads.projected)])
        queries, *both, gates = np.split(parts, ends, axis=1)
        keys, values = both[0] if both else queries[:, :0], both[-1] if both else queries[:, :0]
        values = values * inverse_rms(values, heads.epsilon) if heads.norms_values and both else values
        angles = rope_rows.reshape(len(rope_rows), -1, 2)
        angles = angles[:, self.rope_ends[layer.rotation] : self.rope_ends[layer.rotation + 1]]
        angles = angles if layer.rotates else np.broadcast_to(np.array([1, 0], F), angles.shape)
        scale = F(heads.scale) if heads.scale else F(1) / np.sqrt(F(heads.depth))
        norms = layer.query_norm, layer.key_norm
        if len(layer.query_norm) > heads.depth:  # all heads are normed as one vector
            both = zip((queries, keys), norms, strict=True)
            queries, keys = (
                (x * inverse_rms(x.reshape(len(x), -1), heads.epsilon)[..., None])
                * np.array(norm, F).reshape(x.shape[1:])
                for x, norm in both
            )
            norms = (), ()
        queries, keys = (self._rotate(x, norm, angles, heads) for x, norm in zip((queries, keys), norms, strict=True))
        queries = queries * scale
        out, row = [], 0
        for place, (store, committed, pending, count, sees) in enumerate(spans):
            there = range(committed - position_gaps.get(place, 0))
            for node in range(count if heads.projected else 0):
                store.put(slot_layer, committed + pending + node, keys[row + node], values[row + node])
            for node in range(count):
                slots = np.array([*there, *(committed + np.flatnonzero(sees[node]))])
                own = np.searchsorted(slots, committed + pending + node) + 1
                first = max(own - layer.window, 0) if layer.window else 0
                slots = slots[first : own if layer.is_causal else None]
                out.append(self._mix(queries[row + node], *store.data[slot_layer][:, :, slots], layer.sinks, heads))
            row += count
        results = np.stack(out) * sigmoid(gates) if heads.gated else np.stack(out)
        return groups_of(results).reshape(len(mixed), -1)

    def _rotate(self, x: np.ndarray, norm: Sequence[float], rope_rows: np.ndarray, heads: Heads) -> np.ndarray:
        """Normalize heads [rows, heads, depth] if there is a norm and rotate their pairs (i, i + depth / 2)."""
        if len(norm):
            x = x * inverse_rms(x, heads.epsilon) * np.array(norm, F)
        first, second = np.split(x, 2, axis=-1)
        cosine, sine = rope_rows[:, None, :, 0], rope_rows[:, None, :, 1]
        return np.concatenate([fma(first, cosine, -(second * sine)), fma(first, sine, second * cosine)], axis=-1)

    def _mix(
        self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, sinks: Sequence[float], heads: Heads
    ) -> np.ndarray:
        """Return softmax(queries keys) values of one row, adding position after position: [heads, depth]."""
        group = heads.queries // heads.keys
        keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)  # [heads, positions, depth]
        scores = np.zeros(keys.shape[:2], F)
        for entry in range(heads.depth):
            scores = fma(queries[:, entry, None], keys[:, :, entry], scores)
        scores = capped(scores, F(heads.cap)) if heads.cap else scores
        top = scores.max(axis=-1, keepdims=True)
        sink = np.array(sinks, F)[:, None] if len(sinks) else None  # scores without values
        top = top if sink is None else np.maximum(top, sink)
        weights = exponential(scores - top)
        sums = sum_lanes(weights) + (F(0) if sink is None else exponential(sink - top)[:, 0])
        total = np.zeros_like(queries)
        for position in range(keys.shape[1]):
            total = fma(weights[:, position, None], values[:, position], total)
        return total * (F(1) / sums)[:, None]


def _whole_groups(x: np.ndarray) -> np.ndarray:
    """Pad rows with zeros to whole groups."""
    return np.pad(x, [(0, 0), (0, -x.shape[1] % GROUP)])


def _rows_of(spans: Sequence[Any]) -> list[slice]:
    """Yield each span's rows."""
    ends = np.cumsum([0, *(count for _, _, _, count, _ in spans)]).tolist()
    return [slice(first, end) for first, end in pairwise(ends)]
