"""The Llama family by native kernels on a CPU: int8 weights or a file's own formats, int8 activations, always exact.

One call runs a forward pass. A row's bits depend on its token, prefix and ancestors only, by construction: sums within
a group are integer sums, and everything else has one fixed order. Every instruction set and any number of threads give
the same bits. int8 weights, a file's own weights and float32 weights are three different targets with their own texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.arrays import kernels, num_cores
from outpace.core.errors import UserError, unknown
from outpace.core.logits import SparseLogits, TargetOutput, TopK, tensor_of
from outpace.core.machine import free_bytes
from outpace.models.base import Capability, Model, Part, ReducedOutput, Session, check_forest
from outpace.models.llama.config.draft_vocab import num_first_tokens
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.recurrence import READ_TOGETHER, USUAL_NODES
from outpace.models.llama.config.rope import BLOCK, Rotation
from outpace.models.llama.native.binding import NativeOptions, check_supported, read_formats
from outpace.models.llama.native.weights import (
    PANEL,
    EmbeddingAndHead,
    Fetch,
    Packing,
    build_layer,
    native_heads,
    padded_width,
)
from outpace.models.llama.weight_sources import StoredMatrix, split_fused
from outpace.models.options import INT8, NATIVE_KV

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.models.llama.kept_tokens import KeptTokens
    from outpace.models.llama.native.experts import LayerExperts

DEFAULT = NativeOptions()
EXPERT_SHARE = 0.75  # of the memory that is free once the other weights are loaded: the most that experts take

NativeRows = tuple[Any, int, int, int, bytes]
"""A session's store, its numbers of committed, pending and new nodes, and a mask: a byte for each new node and each
pending node that it may see."""


class Forest:
    """A forward pass in the form that the kernels take. Creating it applies each part's `keep` and reserves its slots.

    `extras`: arguments beyond tokens and positions, {} if no part needs any. `best`: the number of top tokens to return
    for each logit row; 0 if the parts ask for different numbers, -1 if there are no logit rows.
    """

    def __init__(self, parts: Sequence[Part], last_position: int, mlp_width: int) -> None:
        self.sessions: list[NativeRows] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.logit_rows: list[int] = []
        self.hidden_rows: list[int] = []
        self.extras: dict[str, Any] = {}
        self.best = -1
        for part in parts:
            if part.keep is not None:
                part.session.keep(part.keep)
            if part.logit_rows:
                self.best = part.best if self.best in (-1, part.best) else 0
            first = len(self.tokens)
            self.logit_rows += [first + node for node in part.logit_rows]
            if part.hidden_rows:
                self.hidden_rows += [first + node for node in part.hidden_rows]
            self.tokens += part.tokens
            session = part.session
            length, before = session.length, session.pending
            visible, depths = session.extend_bytes(part.parents), session.depths_from(before)
            start = length if part.length is None else part.length
            # a tree may extend past the context; those nodes are never committed
            self.positions += [min(start + depth, last_position) for depth in depths]
            self._add_spans(part, (session.store, length, before, len(part.tokens), visible), mlp_width)

    def arrays(self, rope_table: np.ndarray) -> tuple[Any, ...]:
        """Return the arguments of the kernels' `forward`: sessions, tokens, the rows' rotations, and logit rows.

        `rope_table` [positions, pairs, 2].
        """
        sessions = [
            (store, length, before, count, np.ndarray((count, before + count), bool, visible))
            for store, length, before, count, visible in self.sessions
        ]
        tokens, logit_rows = np.array(self.tokens, np.int32), np.array(self.logit_rows, np.int32)
        return sessions, tokens, rope_table.take(self.positions, 0), logit_rows

    def request_hidden(self, layers: Sequence[int], width: int) -> np.ndarray:
        """Request the hidden states after these numbers of layers; return the buffer for them.

        float32 [layers, hidden rows, width]
        """
        hidden = np.empty((len(layers), len(self.hidden_rows), width), np.float32)
        self.extras |= {"hidden_rows": np.array(self.hidden_rows, np.int32), "layers": np.array(layers, np.int32)}
        self.extras["hidden"] = hidden
        return hidden

    def _add_spans(self, part: Part, rows: NativeRows, mlp_width: int) -> None:
        """Add a part's rows as one span, or as a span for each node if their MLPs have different biases."""
        store, length, before, count, visible = rows
        bias = None if part.mlp_bias is None else host_floats(part.mlp_bias)
        bias = bias if bias is None else np.pad(bias, [*[(0, 0)] * (bias.ndim - 1), (0, mlp_width - bias.shape[-1])])
        inputs = None if part.inputs is None else host_floats(part.inputs)
        spans = [(0, count, visible)]
        if bias is not None and bias.ndim == 3:
            firsts = [node * (before + count) for node in range(count)]
            spans = [(node, 1, visible[first : first + before + node + 1]) for node, first in enumerate(firsts)]
        for node, size, sees in spans:
            number = len(self.sessions)
            self.sessions.append((store, length, before + node, size, sees))
            if part.length is not None:
                self._add("position_gaps", number, part.session.length - part.length)
            if inputs is not None:
                self._add("inputs", number, inputs[node : node + size])
            if bias is not None:
                self._add("mlp_bias", number, bias if bias.ndim == 2 else bias[node])

    def _add(self, name: str, number: int, value: Any) -> None:
        self.extras.setdefault(name, {})[number] = value


def native_recurrence(kernels: Any, config: LlamaConfig) -> dict[str, Any]:
    """Return the kernels' argument for the sizes of recurrent layers; {} without such layers."""
    sizes, layers = config.recurrence, config.num_recurrent_layers
    if sizes is None or not layers:
        return {}
    heads = (sizes.key_heads, sizes.value_heads, sizes.key_depth, sizes.value_depth, sizes.is_tiled)
    return {"recurrence": kernels.Recurrence(layers, sizes.filter_length, sizes.channels, *heads)}


def load_layer(
    packing: Packing, config: LlamaConfig, number: int, fetch: Fetch, kv_dtype: str = "float32"
) -> tuple[Any, LayerExperts | None]:
    """Build the kernels' layer `number` from Hugging Face weight names, and its experts if it has some."""
    if not config.has_experts(number):
        return build_layer(packing, config, number, fetch, None, kv_dtype), None
    from outpace.models.llama.native.experts import load_experts  # for mixtures of experts only

    assert config.experts is not None
    experts = load_experts(packing, config.experts, f"model.layers.{number}.mlp.", fetch)
    return build_layer(packing, config, number, fetch, experts.packed, kv_dtype), experts


def host_floats(values: Tensor | np.ndarray) -> np.ndarray:
    """Return a contiguous float32 array on the host."""
    host = values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()
    return np.ascontiguousarray(host, np.float32)


class NativeSession(Session):
    """Stores keys and values in the kernels' store, which has addresses for the whole context and grows in place."""

    def __init__(self, capacity: int, max_pending: int, model: NativeLlama) -> None:
        super().__init__(capacity, max_pending)
        self.config, self._model = model.config, model
        slots = model.max_positions + max_pending
        self.store = model.kernels.Store(model.stored_heads, slots, 0, **model.recurrence)
        self.is_recurrent = bool(model.recurrence)

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        super().keep(path, live)
        if self.is_recurrent:
            self.store.keep(list(path), list(live))

    def trim(self, exact: bool = False) -> None:
        super().trim(exact)
        if self.is_recurrent:
            self.store.trim_states()

    def _save_state(self) -> np.ndarray:
        self._model.model_for_thread().fold(self.store)
        saved = np.empty(self.store.state_size, np.float32)
        self.store.save_state(saved)
        return saved

    def _load_state(self, saved: np.ndarray | None) -> None:
        self.store.load_state(saved)

    def read(self, length: int) -> np.ndarray:
        """Return the first `length` slots, float32: of each layer that stores them [keys then values, kv_heads,
        slots, head_dim], flattened."""
        found = []
        for place, layer in enumerate(self.config.stored_layers):
            sizes = self.config.of_layer(layer)
            found.append(np.empty((2, sizes.num_kv_heads, length, sizes.head_dim), np.float32))
            self.store.read(place, length, found[-1])
        return np.concatenate([one.reshape(-1) for one in found])

    def _resize(self, slots: int) -> None:
        self.store.resize(slots)

    def _move(self, source: Sequence[int], start: int) -> None:
        self.store.move(source, start)

    def _copy(self, other: NativeSession, length: int) -> None:
        self.store.copy(other.store, length)


class NativeRopeTable:
    """A growing table of cosines and sines of position times frequency, times the scaling's gain.

    `table` float32 [positions, pairs of all rotations, (cosine, sine)], each number rounded once and equal on every
    machine: angles are float32 products, as in the reference, and their cosines and sines are computed in float64,
    because libraries differ in the last bit of float32 ones. They do not depend on the table's size.
    """

    def __init__(self, head_dims: Sequence[int], rotations: Sequence[Rotation]) -> None:
        pairs = [*zip(head_dims, rotations, strict=True)]
        self._frequencies = np.concatenate([_frequencies(head_dim, rotation) for head_dim, rotation in pairs])
        self._gains = np.concatenate([rotation.gains(head_dim) for head_dim, rotation in pairs])[:, None]
        self.table = np.empty((0, len(self._frequencies), 2), np.float32)

    def grow_to(self, positions: int) -> None:
        """Grow the table to at least `positions` positions; one thread at a time."""
        while positions > len(self.table):
            block = np.arange(len(self.table), len(self.table) + BLOCK, dtype=np.float32)
            angles = np.outer(block, self._frequencies).astype(np.float64)
            pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
            self.table = np.concatenate([self.table, pairs * self._gains])


def _frequencies(head_dim: int, rotation: Rotation) -> np.ndarray:
    """Return the angle of each pair per position: float32 [head_dim / 2]"""
    theta, scaling, rotated = rotation.theta, rotation.scaling, rotation.dim or head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = np.float32(1) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = scaling.stretched(frequencies, theta) if scaling else frequencies
    return np.concatenate([frequencies, np.zeros((head_dim - rotated) // 2, np.float32)])


class NativeLlama(Model):
    """A Llama-family model. Sessions are independent; concurrent calls of `score` wait for one another."""

    exact = True
    device = "cpu"
    precision = INT8
    usual_kv = NATIVE_KV  # the type of keys and values that a profile does not name
    capabilities = frozenset(Capability)  # without recurrent layers

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[Any],
        ends: EmbeddingAndHead,
        options: NativeOptions,
        experts: Sequence[LayerExperts] = (),
    ) -> None:
        """`layers` and `experts`: what `load_layer` returns: every layer, and the experts that some have."""
        self.kernels = kernels
        sets = self.kernels.instruction_sets()
        if options.instruction_set not in ("", *sets):
            raise unknown("instruction_set", options.instruction_set, sets)
        self.config, self.options = config, options
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.draft_window, self.num_layers = config.draft_window, config.num_layers
        self._layers, self.ends, self._experts, self._distinct_experts = layers, ends, experts, 0.0
        self._expert_bytes = 0
        if experts:
            from outpace.models.llama.native.experts import divide_memory  # for mixtures of experts only

            self._expert_bytes = divide_memory(experts, int(free_bytes("cpu") * EXPERT_SHARE))
        self.rope_table = NativeRopeTable(config.rotated_dims, config.rotations)
        self.kv_dtype = options.kv_dtype
        self._state_bytes = config.state_bytes
        self.recurrence = native_recurrence(self.kernels, config)
        if self.recurrence:  # states cannot leave out committed tokens
            self.capabilities = self.capabilities - {Capability.LENGTH}
            self.chunk = READ_TOGETHER
        if config.experts or config.scales_layers:
            self.capabilities = self.capabilities - {Capability.MLP_BIAS}
        if config.scales_layers:  # and may share keys: a layer is whole
            self.capabilities = self.capabilities - {Capability.SKIP_SUBLAYERS}
        if config.embedding_width:  # of tokens
            self.capabilities = self.capabilities - {Capability.INPUTS}
        self.heads = native_heads(self.kernels, config, self.kv_dtype)
        self.stored_heads = [
            native_heads(self.kernels, config.of_layer(number), self.kv_dtype, number)
            for number in config.stored_layers
        ]
        self._mlp_width = padded_width(self.kernels, max(config.widths or [config.intermediate_size]))
        self._threads = options.threads or num_cores()
        self._models = {self._threads: self._with_threads(self._threads)}
        self._share = threading.local()  # .threads: number of threads for the passes of a thread that leaves cores idle
        self._storing: Any = None  # a kernels' model that only stores keys and values
        self._skipped: np.ndarray | None = None  # bool [layers, (attention, MLP)]
        self.kept_tokens: KeptTokens | None = None  # of an output layer that is reduced while the model runs

    def _with_threads(self, threads: int, layers: Sequence[Any] | None = None) -> Any:
        """Create a kernels' model with this number of threads; all of them share the weights. `layers`: by default its
        own."""
        config, ends = self.config, self.ends
        return self.kernels.Model(
            self.heads,
            config.hidden_size,
            self._mlp_width,
            config.rms_norm_eps,
            list(self._layers if layers is None else layers),
            ends.embedding,
            ends.norm,
            ends.head,
            self.options.instruction_set,
            threads,
            rotations=len(config.rotations),
            embedding_scale=config.embedding_scale,
            gelu=config.activation == GELU,
            gate_limit=config.experts.limit if config.experts else 0.0,
            logit_cap=config.logit_cap,
            embeddings=ends.by_layer,
            **self.recurrence,
        )

    def limit_threads(self, max_threads: int | None = None, leave: int = 0) -> None:
        threads = max(
            1, min(self._threads, max_threads or self._threads, num_cores() - leave if leave else self._threads)
        )
        if threads not in self._models:
            self._models[threads] = self._with_threads(threads)
        self._share.threads = threads

    def model_for_thread(self) -> Any:
        """Return the kernels' model that runs this thread's passes."""
        return self._models[getattr(self._share, "threads", self._threads)]

    @property
    def token_bytes(self) -> int:
        return self.config.token_bytes(self.kv_dtype)

    @property
    def state_bytes(self) -> int:
        return self._state_bytes

    def session_bytes(self, slots: int) -> int:
        """Return the bytes that a session with `slots` slots takes, in whole pages."""
        places = {"places": USUAL_NODES} if self.recurrence else {}
        total: int = self.kernels.Store.bytes_of(self.stored_heads, slots, **self.recurrence, **places)
        return total

    @property
    def weight_bytes(self) -> int:
        by_layer = self.ends.by_layer.bytes if self.ends.by_layer else 0  # what it projects: rows of the table are few
        return sum(layer.bytes for layer in self._layers) + by_layer + self.output_bytes

    @property
    def distinct_experts(self) -> float:
        return self._distinct_experts

    @property
    def last_weight_bytes(self) -> int:
        """Bytes of weights that the last pass read: more than `weight_bytes` if its rows chose different experts."""
        experts = self.config.experts
        more = self._distinct_experts - experts.chosen if experts and self._distinct_experts else 0.0
        return self.weight_bytes + int(more * sum(one.packed.expert_bytes for one in self._experts))

    @property
    def promised_bytes(self) -> int:
        return max(
            0, self._expert_bytes - sum(one.packed.num_packed * one.packed.expert_bytes for one in self._experts)
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of the output layer that a pass reads."""
        head, kept = self.ends.head, self.kept_tokens
        return int(head.bytes * len(kept.kept.ids) / head.outputs) if kept else int(head.bytes)

    @property
    def arithmetic(self) -> int:
        """Version of the kernels' arithmetic; logits have other bits with another one."""
        number: int = self.kernels.ARITHMETIC
        return number

    @property
    def instruction_set(self) -> str:
        name: str = self._models[self._threads].instruction_set
        return name

    @classmethod
    def from_tensors(
        cls,
        config: LlamaConfig,
        tensor: Callable[[str], Tensor | np.ndarray | StoredMatrix],
        *,
        options: NativeOptions = DEFAULT,
        head_ids: np.ndarray | Tensor | None = None,
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> NativeLlama:
        """Build a model from `tensor(name)`, which takes Hugging Face weight names.

        Float matrices are rounded to int8, layer by layer; a file's own formats are kept as `options.weights` says.
        `head_ids` int64 [rows]: keep only these tokens' rows of the output layer; all other tokens score -inf.
        """
        check_supported(kernels, config)
        threads = options.threads or num_cores()
        packing = Packing(kernels, threads)
        fetch = Fetch(split_fused(config, tensor), read_formats(kernels), options.weights)
        with ThreadPoolExecutor(threads) as pool:
            try:
                ends = pool.submit(EmbeddingAndHead.load, packing, config, fetch, head_ids)
                loaded = pool.map(
                    partial(load_layer, packing, config, fetch=fetch, kv_dtype=options.kv_dtype),
                    range(config.num_layers),
                )
                layers, experts = [], []
                for number, (layer, found) in enumerate(loaded, 1):
                    layers.append(layer)
                    experts += [found] if found else []
                    progress("loading", number / config.num_layers)
                model = cls(config, layers, ends.result(), options, experts)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        model.precision, model.notice = fetch.precision, fetch.notice
        return model

    def open(self, capacity: int, max_pending: int) -> NativeSession:
        capacity = min(capacity, self.max_positions)
        self.rope_table.grow_to(min(capacity + max_pending, self.max_positions))
        return NativeSession(capacity, max_pending, self)

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        rows = np.empty((len(tokens), self.config.hidden_size), np.float32)
        self.ends.embedding.read(np.array(tokens, np.int32), rows)
        return rows

    def limit_window(self, tokens: int) -> None:
        for layer in self._layers:
            layer.window = min(layer.window or tokens, tokens)

    def store_inputs(self, parts: Sequence[Part]) -> None:
        """Store the keys and values of the parts' inputs in every layer, and compute nothing else."""
        if self._storing is None:
            self._storing = self._with_threads(self._threads, [layer.to_kv_only() for layer in self._layers])
        forest, none = self._forest(parts), np.empty((0, self._storing.outputs), np.float32)
        self._storing.forward(*forest.arrays(self.rope_table.table), none, **forest.extras)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        check_forest(self, forest)
        return self._forward(self._forest(forest))

    def _score(self, forest: Sequence[Part]) -> Tensor:
        return tensor_of(self._forward(self._forest(forest)).to_dense())

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Return logits, and hidden states in float32: [layers, hidden rows, hidden]"""
        check_forest(self, forest)
        logits, hidden = self.score_sparse_hidden(forest, layers)
        return TargetOutput(logits.to_dense(), hidden, logits.best)

    def score_sparse_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[SparseLogits, np.ndarray]:
        """Return sparse logits and hidden states, as `score_hidden` does."""
        rows = self._forest(forest)
        hidden = rows.request_hidden(layers, self.config.hidden_size)
        return self._forward(rows), hidden

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> NativeLlama:
        other = copy(self)
        skipped = np.zeros((self.num_layers, 2), bool) if self._skipped is None else self._skipped.copy()
        skipped[list(attention), 0] = skipped[list(mlp), 1] = True
        other._skipped = skipped
        return other

    @property
    def reduced_output(self) -> ReducedOutput | None:
        if self.kept_tokens is None:
            return None
        first, (count, _) = self.kept_tokens.first, self._known(self.kept_tokens.kept.ids)
        return ReducedOutput(first, count - first, self.vocab_size, self.output_bytes / self.weight_bytes)

    def reduce_output(self, tokens: int | None) -> None:
        head, kept = self.ends.head, self.ends.kept
        share = head.bytes / self.weight_bytes
        first = num_first_tokens(tokens, head.outputs, None if kept is None else len(kept), share)
        if first is not None:
            from outpace.models.llama.kept_tokens import KeptTokens

            self.kept_tokens = KeptTokens(first, head.outputs, PANEL)

    def project(self, hidden: Tensor | np.ndarray) -> SparseLogits:
        model = self.model_for_thread()
        out = np.empty((len(hidden), model.outputs), np.float32)
        model.project(host_floats(hidden), out)
        return self._sparse(out, self.output_vocab())

    def _forest(self, parts: Sequence[Part]) -> Forest:
        forest = Forest(parts, self.max_positions - 1, self._mlp_width)
        if self._skipped is not None:
            forest.extras["skipped"] = self._skipped
        return forest

    def _forward(self, forest: Forest) -> SparseLogits:
        model, table = self.model_for_thread(), self.rope_table.table
        ids, columns, panels = self.ends.kept, model.outputs, None
        if self.kept_tokens is not None:
            self.kept_tokens.read(forest.tokens)
            panels, ids = self.kept_tokens.kept
            columns = len(panels) * PANEL
        out, vocab = np.empty((len(forest.logit_rows), columns), np.float32), self._known(ids)
        if forest.extras:
            self._run(model, model.forward, *forest.arrays(table), out, **forest.extras, panels=panels)
            return self._sparse(out, vocab, self._best(out, vocab) if forest.best == 1 else ())
        rows = (forest.sessions, forest.tokens, forest.positions, table, forest.logit_rows)
        best = self._run(model, model.score, *rows, out, forest.best, *vocab, panels)
        return self._sparse(out, vocab, best)

    def _run(self, model: Any, call: Callable[..., Any], *args: Any, **extras: Any) -> Any:
        """Run a pass of a kernels' model. UserError if experts that it packed are damaged."""
        if not self._experts:
            return call(*args, **extras)
        try:
            result = call(*args, **extras)
        except ValueError as error:
            if self._experts[0].path is None or not str(error).startswith("expert "):
                raise
            raise UserError(f"{self._experts[0].path} is damaged: {error}") from error
        self._distinct_experts = model.mean_experts
        return result

    @staticmethod
    def _best(out: np.ndarray, vocab: tuple[int, np.ndarray | None]) -> list[TopK]:
        """Return each row's best token, as the kernels' `score` does."""
        count, ids = vocab
        places = out[:, :count].argmax(1)
        tokens = places if ids is None else ids[places]
        is_valid = ~np.isnan(out[range(len(out)), places])
        return [([token], []) if valid else ([], []) for token, valid in zip(tokens.tolist(), is_valid, strict=True)]

    def output_vocab(self) -> tuple[int, np.ndarray | None]:
        """Return the number of output rows that are tokens of `vocab_size`, and their ids if the rows are reduced."""
        return self._known(self.ends.kept)

    def _known(self, ids: np.ndarray | None) -> tuple[int, np.ndarray | None]:
        """Return the number of these rising ids (None: all) that are tokens of `vocab_size`, and the ids.

        `vocab_size` may be smaller than the output layer: another model of the pair may know fewer tokens.
        """
        if ids is None:
            return self.vocab_size, None
        if ids[-1] >= self.vocab_size:
            ids = ids[: np.searchsorted(ids, self.vocab_size)]
        return len(ids), ids

    def _sparse(self, out: np.ndarray, vocab: tuple[int, np.ndarray | None], best: Sequence[TopK] = ()) -> SparseLogits:
        """Wrap the output layer's logits of the known tokens."""
        count, ids = vocab
        return SparseLogits(out if count == out.shape[1] else out[:, :count], ids, self.vocab_size, best)
