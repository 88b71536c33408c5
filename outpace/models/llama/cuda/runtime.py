"""The Llama family by captured passes: one launch per pass, whatever the sessions and their trees.

A pass runs over static buffers, in buckets of sessions, nodes per session and slots. Each bucket is captured once, as a
CUDA graph or its stand-in (`captures`). All sessions' keys and values are in one pool. What has no bucket, such as long
chunks of prompts and vectors in place of tokens, runs in one pass of the torch runtime on the same sessions; that is
also the slow path against which the fast one is tested. CUDA graphs: Ng et al., "Accelerating PyTorch with CUDA
Graphs", 2021.

Sums depend on the bucket, except in exact mode (`ExactGraphLlama`). There every product takes `FIXED` rows, padded or
in chunks, and so do the norms, whose kernels a GPU also chooses by shape; each start checks on the device that a row's
place does not matter. Attention's numbers are on grids in float64, where sums are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.core.logits import TargetOutput, tensor_of
from outpace.models.base import Part, chain
from outpace.models.llama.cuda.captures import MAX_PENDING, Captures, Shapes, StaticInputs, pass_shapes, visible_bits
from outpace.models.llama.cuda.pool import MAX_MOVES, MIN_SLOTS, SPARE, GraphSession, Pool, pool_shape
from outpace.models.llama.torch.attention import attend_batch, attend_batch_exactly, tree_mask
from outpace.models.llama.torch.linear import FIXED, Linear, pad_rows, rows_are_independent
from outpace.models.llama.torch.rope_tables import RopeFactors
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.weights import Normed

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_NODES = 64  # of a session's tree in a captured pass
MAX_SESSIONS = 32
MAX_ROWS = MAX_NODES * MAX_SESSIONS
MAX_READ = MAX_PENDING  # tokens of a prompt that a captured pass reads
MAX_POSITIONS = 1 << 17  # of the rotary table made in advance, because captures are lost when it grows
MAX_HEAD_ROWS = 256  # in a captured output layer
FEW_MOVES = 8
NO_STATES: Mapping[int, Tensor] = {}
_FREE_ROWS = 64  # a pass over this many rows costs what one row costs, because it is bound by memory

BatchPart = tuple[GraphSession, Part, int, np.ndarray]
"""A part whose nodes have slots: session, part, number of earlier pending nodes, and mask."""


def split_by_length(counts: Sequence[int]) -> list[list[int]]:
    """Group parts with these numbers of nodes by captured pass; return the parts' indices.

    All sessions of a pass get as many rows as its longest part. They share one pass, unless two passes save more than
    half of the rows, as with a chunk of a prompt among many short trees.
    """
    buckets = [next_power_of_two(count) for count in counts]
    everything = list(range(len(counts)))
    if _bucket_rows(buckets) <= _FREE_ROWS:
        return [everything] if counts else []
    best, fewest = [everything], _bucket_rows(buckets) / 2
    for limit in set(buckets):
        short = [place for place in everything if buckets[place] < limit]
        long = [place for place in everything if buckets[place] >= limit]
        rows = sum(max(_FREE_ROWS, _bucket_rows([buckets[place] for place in some])) for some in (short, long))
        if short and rows < fewest:
            best, fewest = [short, long], rows
    return best


def _bucket_rows(buckets: Sequence[int]) -> int:
    """Return the rows of one pass over parts in these buckets."""
    return next_power_of_two(len(buckets)) * max(buckets, default=0)


class GraphLlama(Llama):
    """A Llama-family model with captured passes, for one thread at a time."""

    attention = "matmul"  # or "fused", by our own kernels
    min_slots = MIN_SLOTS  # of a session, and of a captured pass

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pool = Pool(self.config, self._kv_format, self.device, self.min_slots)
        self.captures = Captures(self.device.type != "cuda")
        self._hidden = self.embedding.new_zeros(MAX_ROWS, self.config.hidden_size)
        self._vectors: Tensor | None = None  # of a captured pass that takes vectors: [rows, hidden]
        earlier = visible_bits(np.tri(MAX_PENDING, dtype=bool))  # for each node of a block: the nodes up to it
        self._earlier = to_device(earlier, np.int64, self.device) if any(self.config.causal_layers) else None

    @classmethod
    def from_tensors(cls, *args: Any, is_eager: bool | None = None, **options: Any) -> Self:
        """Do the same as `Llama.from_tensors`. `is_eager`: use the stand-in; None: only if the device has no graphs."""
        model = super().from_tensors(*args, **options)
        if is_eager is not None:
            model.captures = Captures(is_eager)
        return model

    def take_vectors(self) -> None:
        """Capture passes that take vectors in place of tokens, which all later passes must have."""
        self._vectors = torch.zeros_like(self._hidden)

    @property
    def num_captures(self) -> int:
        return self.captures.count

    def open(self, capacity: int, max_pending: int) -> GraphSession:  # type: ignore[override]  # its own storage
        capacity = min(capacity, self.max_positions)
        self._rope.grow_to(min(next_power_of_two(capacity + max_pending), self.max_positions))
        return GraphSession(capacity, max_pending, self.pool)

    def reduce_output(self, tokens: int | None) -> None:
        super().reduce_output(tokens)
        self.captures.forget_if_moved()  # those of the whole output layer

    def session_bytes(self, slots: int) -> int:
        return self.stored_bytes([slots])

    def stored_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes of the pool: rows and slots are powers of two, and all rows are as long as the longest."""
        rows, width = pool_shape(slots, self.min_slots)
        return rows * (width + SPARE) * self.token_bytes if rows else 0

    @torch.inference_mode()
    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Run parts that have a bucket in captured passes, and the others in one more pass."""
        self._keep_read(forest)
        if any(self._skipped) or len({id(part.session) for part in forest}) < len(forest):
            return self._score_uncaptured(forest, layers)
        groups, rest = self._captured_groups(forest)
        passes = [one for numbers in groups for one in self._score_captured(forest, numbers, layers)]
        if rest:
            passes.append((rest, self._score_uncaptured([forest[number] for number in rest], layers)))
        if len(passes) == 1 and len(passes[0][0]) == len(forest):
            return passes[0][1]
        outputs: dict[int, TargetOutput] = {}
        for numbers, output in passes:
            outputs |= zip(numbers, _split(output, [forest[number] for number in numbers]), strict=True)
        nothing = self._hidden.new_empty(len(layers), 0, self._hidden.shape[1]) if layers else None
        empty = TargetOutput(self._no_logits(), nothing)
        return _joined([outputs.get(number, empty) for number in range(len(forest))])

    def _captured_groups(self, forest: Sequence[Part]) -> tuple[list[list[int]], list[int]]:
        """Return the parts of each captured pass, and the parts without a bucket, by number."""
        trees = [number for number, part in enumerate(forest) if self._has_bucket(part, MAX_NODES)]
        counts = [len(forest[number].tokens) for number in trees]
        groups = [[trees[place] for place in places] for places in split_by_length(counts)]
        rest = sorted({*range(len(forest))}.difference(trees))
        read = [number for number in rest if self._has_bucket(forest[number], MAX_READ)]
        if read and _bucket_rows([next_power_of_two(len(forest[number].tokens)) for number in read]) <= MAX_ROWS:
            groups.append(read)
            rest = [number for number in rest if number not in read]
        return groups, rest

    def _score_uncaptured(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        for part in forest:
            part.session.apply_moves()
        return super()._score_hidden(forest, layers)

    def _has_bucket(self, part: Part, max_rows: int) -> bool:
        """Return whether a captured pass can run this part, of at most `max_rows` tokens."""
        is_plain = part.length is None and part.mlp_bias is None and (part.inputs is None) == (self._vectors is None)
        pending = len(part.tokens) + part.session.pending
        return is_plain and len(part.tokens) <= max_rows and pending <= MAX_PENDING

    def reserve_sessions(self, count: int, max_bytes: int) -> None:
        while count > 1 and self.stored_bytes([1] * count) > max_bytes:
            count //= 2
        self.pool.reserve(count, max_bytes // self.token_bytes)
        self._rope.grow_to(min(self.max_positions, MAX_POSITIONS))

    def capture_passes(self, sizes: Sequence[tuple[int, int]], layers: Sequence[int] = ()) -> None:
        if self._vectors is not None:  # a pass needs them
            return
        for batch, nodes in sorted(
            sizes, key=lambda size: -size[1]
        ):  # the longest first, because the pool moves when it grows
            if next_power_of_two(batch) * next_power_of_two(nodes) > MAX_ROWS:
                continue
            opened = [self.open(nodes, nodes) for _ in range(batch)]
            for session in opened:
                session.reserve(nodes)
            rows = range(nodes if nodes <= MAX_NODES else 1)
            self.score_hidden([chain(session, [0] * nodes, rows) for session in opened], layers)
        self._place([])
        for batch in {next_power_of_two(batch) for batch, _ in sizes}:
            for count in (FEW_MOVES, MAX_MOVES) if batch <= min(self.pool.rows, MAX_SESSIONS) else ():
                self._captured_moves(0, batch, count)

    def _score_captured(
        self, forest: Sequence[Part], numbers: Sequence[int], layers: Sequence[int]
    ) -> list[tuple[list[int], TargetOutput]]:
        """Run captured passes over the parts with these numbers; return the numbers of each pass, and its output."""
        parts: dict[int, BatchPart] = {}
        for number in numbers:
            session, before = forest[number].session, forest[number].session.pending
            parts[number] = session, forest[number], before, session.extend(forest[number].parents)
        self._place([session for session, *_ in parts.values() if session.row is not None])
        saved = {layer: self._saved_states(layer) for layer in layers}
        outputs = []
        for start in range(0, len(parts), MAX_SESSIONS):
            places = range(start, start + MAX_SESSIONS)
            own = [number for number, (session, *_) in parts.items() if session.row in places]
            if not own:
                continue
            block = [parts[number] for number in own]
            self._run(start, block, saved)
            hidden = None
            if layers:
                rows = pass_rows(start, block, [part.hidden_rows for _, part, *_ in block])
                index = to_device(rows, np.int64, self.device)
                hidden = torch.stack([saved[layer][index] for layer in layers])
            outputs.append((own, TargetOutput(self._read(start, block), hidden)))
        return outputs

    def _saved_states(self, layer: int) -> Tensor:
        """Return the buffer to which passes write the hidden states after this number of layers: [rows, hidden]"""
        if layer == self.num_layers:
            return self._hidden
        buffer: Tensor = self.captures.buffers(("states", layer), lambda: torch.zeros_like(self._hidden))
        return buffer

    def _place(self, sessions: Sequence[GraphSession]) -> None:
        """Move the sessions to the pool's first rows, and drop captures whose buffers have moved."""
        self.pool.bring_to_front(sessions)
        self.captures.forget_if_moved(self.pool.kv, *self._rope.tables)

    def _run(self, start: int, block: Sequence[BatchPart], saved: Mapping[int, Tensor]) -> None:
        """Run the rows from `start` on through the layers; write the last hidden states [batch * nodes, hidden] to
        `_hidden`, and those after each number of layers in `saved` to its buffer."""
        batch, nodes = next_power_of_two(len(block)), _bucket_nodes(block)
        if self._vectors is not None:
            rows = pass_rows(start, block, [range(len(part.tokens)) for _, part, *_ in block])
            vectors = torch.cat([part.inputs for _, part, *_ in block]).to(self.dtype)
            self._vectors.index_copy_(0, to_device(rows, np.int64, self.device), vectors)
        slots = min(next_power_of_two(max(session.used for session, *_ in block), self.min_slots), self.pool.slots)
        inputs = self._inputs(("pass", batch, nodes), pass_shapes(batch, nodes))
        self._move(start, batch, block)
        key = ("pass", start, batch, nodes, slots, tuple(sorted(saved)))
        work = partial(self._layers_pass, start, inputs.device, slots, saved)
        buffers, idle = (self.pool.kv, self._hidden, *saved.values()), {"slots": self.pool.padding}
        host = self.captures.begin(key, inputs, work, *buffers, idle=idle)
        self._fill(host, start, block)
        inputs.send()
        self.captures.replay(key)

    def _fill(self, host: dict[str, np.ndarray], start: int, block: Sequence[BatchPart]) -> None:
        """Write the inputs of all parts, each in one assignment."""
        tokens, depths, places, lengths, slots = list[int](), list[int](), list[int](), list[int](), list[int]()
        count, width = sum([len(part.tokens) for _, part, *_ in block]), host["tokens"].shape[1]
        seen = np.zeros((count, MAX_PENDING), bool)
        for session, part, before, visible in block:
            row, new, below, length = session.place - start, len(part.tokens), session.pending_depths, session.length
            host["lengths"][row], host["below"][row, : len(below)] = length, below
            seen[len(tokens) : len(tokens) + new, : visible.shape[1]] = visible
            tokens += part.tokens
            depths += below[before:]
            places += range(row * width, row * width + new)
            lengths += [length] * new
            slots += range(length + before, length + before + new)
        # A tree may extend past the context; those nodes are never committed.
        positions = np.minimum(np.add(lengths, depths), self.max_positions - 1)
        columns: dict[str, Any] = {"tokens": tokens, "depths": depths, "positions": positions, "slots": slots}
        for name, values in columns.items():
            np.put(host[name], places, values)
        host["bits"].reshape(-1, host["bits"].shape[-1])[places] = visible_bits(seen)

    def _move(self, start: int, batch: int, block: Sequence[BatchPart]) -> None:
        """Perform the sessions' deferred moves, all in one captured step before the pass."""
        moving = [(session, *session.moves) for session, *_ in block if session.moves is not None]
        if not moving:
            return
        max_rows = max(len(source) for _, source, _ in moving)
        key, inputs, host = self._captured_moves(start, batch, FEW_MOVES if max_rows <= FEW_MOVES else MAX_MOVES)
        for session, source, first in moving:
            session.moves = None
            host["source"][session.place - start, : len(source)] = source
            host["target"][session.place - start, : len(source)] = np.arange(first, first + len(source))
        inputs.send()
        self.captures.replay(key)

    @torch.inference_mode()
    def _captured_moves(
        self, start: int, batch: int, count: int
    ) -> tuple[Hashable, StaticInputs, dict[str, np.ndarray]]:
        """Return the key, the inputs and the host's arrays of a step that moves at most `count` slots of each row,
        captured now if it was not before."""
        inputs = self._inputs(("moves", batch, count), dict.fromkeys(("source", "target"), (batch, count)))
        key, idle = ("moves", start, batch, count), dict.fromkeys(("source", "target"), self.pool.padding)
        work = partial(self.pool.move, start, inputs.device["source"], inputs.device["target"])
        return key, inputs, self.captures.begin(key, inputs, work, self.pool.kv, idle=idle)

    def _read(self, start: int, block: Sequence[BatchPart]) -> Tensor:
        """Return a new tensor of logits after `_run`, part after part: [logit rows, vocab]"""
        places = pass_rows(start, block, [part.logit_rows for _, part, *_ in block])
        if not places:
            return self._no_logits()
        count = next_power_of_two(len(places), *self._head_counts)
        if count > MAX_HEAD_ROWS:
            return self._logits(self._hidden[to_device(places, np.int64, self.device)])
        inputs, key = self._inputs(("head", count), {"rows": (count,)}), ("head", count, self.vocab_size)
        logits: Tensor = self.captures.buffers(
            ("logits", count, self.vocab_size),
            lambda: self.embedding.new_zeros(count, self.vocab_size, dtype=self.score_dtype),
        )
        work = partial(self._head_pass, inputs.device["rows"], logits)
        self.captures.begin(key, inputs, work, self._hidden, logits)["rows"][: len(places)] = places
        inputs.send()
        self.captures.replay(key)
        return logits[: len(places)].clone()

    def _layers_pass(
        self, start: int, inputs: dict[str, Tensor], slots: int, saved: Mapping[int, Tensor] = NO_STATES
    ) -> None:
        """Captured: compute hidden states from tokens. `saved`: buffers for those after some numbers of layers."""
        x = self._embed_pass(pad_rows(inputs["tokens"].flatten(), self.row_counts))
        factors = self._rope(pad_rows(inputs["positions"].flatten(), self.row_counts))
        masks = self._masks(inputs, slots)
        for number in range(len(self._layers)):
            save_states(saved, number, x)
            x = self._mlp(number, self._attention_batch(number, start, x, factors, inputs["slots"], masks[number]))
        self._hidden[: len(x)].copy_(x)

    def _embed_pass(self, tokens: Tensor) -> Tensor:
        """Captured: return the first layer's input: [rows, hidden]"""
        embedded = self._embed(tokens)
        return embedded if self._vectors is None else self._vectors[: len(tokens)].clone()

    def _masks(self, inputs: dict[str, Tensor], slots: int) -> list[Tensor]:
        """Captured: return the mask of each layer."""
        found = {(window, False): self._mask(inputs, slots, window) for window in self._windows}
        if self._earlier is not None:
            earlier = {**inputs, "bits": inputs["bits"] & self._earlier[: inputs["bits"].shape[1]]}
            found |= {(window, True): self._mask(earlier, slots, window) for window in self._windows}
        numbers = range(len(self._layers))
        return [found[self.config.window(number), self.config.is_causal(number)] for number in numbers]

    def _mask(self, inputs: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        return tree_mask(inputs["bits"], inputs["lengths"], inputs["depths"], inputs["below"], slots, window)

    def _attention_batch(
        self, number: int, start: int, x: Tensor, factors: RopeFactors, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """Add a layer's attention for all sessions at once. `slots` [batch, nodes]: slots of new keys and values."""
        heads, (batch, nodes) = self.config.num_heads, slots.shape
        qkv = self._qkv(number, x, factors)[: batch * nodes]
        new = qkv[:, heads:].unflatten(0, (batch, nodes)).unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
        kv = self.pool.kv[number][:, start : start + batch]  # [2, batch, kv_heads, slots, width]
        new = self._encode(number, new)
        kv.scatter_(3, slots[None, :, None, :, None].expand_as(new), new)
        stored = self._decode(number, kv[:, :, :, : mask.shape[-1]])
        return self._add_attention(number, self._attend_batch(qkv[:, :heads], stored, mask), x)

    def _attend_batch(self, query: Tensor, stored: Tensor, mask: Tensor) -> Tensor:
        """Attend for the pass's rows over decoded keys and values: [rows, heads * d]"""
        return attend_batch(query, stored[0], stored[1], mask)

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def _head_pass(self, rows: Tensor, logits: Tensor) -> None:
        """Captured: compute logits from the hidden states of these rows."""
        logits.copy_(self._logits(self._hidden[rows]))

    def _encode(self, number: int, new: Tensor) -> Tensor:
        """Encode finite numbers only.

        Hidden slots are multiplied by 0, which keeps nan: a request whose numbers overflow must not spoil the request
        that gets its row next.
        """
        return self._kv_format.encode(torch.nan_to_num(new))

    def _inputs(self, key: tuple[Any, ...], shapes: Shapes) -> StaticInputs:
        inputs: StaticInputs = self.captures.buffers(key, lambda: StaticInputs(shapes, self.device))
        return inputs


class ExactGraphLlama(GraphLlama):
    """Captured passes in exact mode: a row's bits depend on its token, prefix and ancestors only. Keys and values are
    float64, unless they are stored in fewer bits."""

    exact_where = f"whose products of {FIXED} rows give a row other bits at another place"

    def _mask(self, inputs: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        """Return True for hidden slots."""
        return super()._mask(inputs, slots, window) < 0

    def _attend_batch(self, query: Tensor, stored: Tensor, mask: Tensor) -> Tensor:
        return pad_rows(attend_batch_exactly(query, stored[0], stored[1], mask).to(self.dtype), (FIXED,))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm(piece, weight) for piece in x.split(FIXED)])

    def _norm_heads(self, number: int, qkv: Tensor, weight: Tensor) -> Tensor:
        pieces = qkv.split(FIXED)
        return torch.cat([super(ExactGraphLlama, self)._norm_heads(number, piece, weight) for piece in pieces])

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        def with_norm(normed: Normed) -> Linear:
            return lambda x, residual=None: normed.linear(self._norm(x, normed.norm), residual)

        layer = self._layers[0]
        normed = [(with_norm(one), self.config.hidden_size) for one in (layer.qkv, layer.gate_up, self._head)]
        alike = rows_are_independent([*normed, *self._linears()[2:]], FIXED, self.dtype, self.device)
        return ((FIXED,), (FIXED,)) if alike else ((), ())


def save_states(saved: Mapping[int, Tensor], layer: int, x: Tensor) -> None:
    """Copy the hidden states after this number of layers to their buffer, if there is one."""
    if layer in saved:
        saved[layer][: len(x)].copy_(x)


def _split(output: TargetOutput, parts: Sequence[Part]) -> list[TargetOutput]:
    """Return the output of each part of a pass."""
    logits = tensor_of(output.logits).split([len(part.logit_rows) for part in parts])
    hidden: Sequence[Tensor | None] = [None] * len(parts)
    if output.hidden is not None:
        hidden = tensor_of(output.hidden).split([len(part.hidden_rows) for part in parts], dim=1)
    return [TargetOutput(*pair) for pair in zip(logits, hidden, strict=True)]


def _joined(outputs: Sequence[TargetOutput]) -> TargetOutput:
    """Concatenate the outputs of parts."""
    if len(outputs) == 1:
        return outputs[0]
    hidden = [tensor_of(output.hidden) for output in outputs if output.hidden is not None]
    return TargetOutput(
        torch.cat([tensor_of(output.logits) for output in outputs]), torch.cat(hidden, 1) if hidden else None
    )


def pass_rows(start: int, block: Sequence[BatchPart], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the places in the pass of these rows of its parts, part after part."""
    nodes = _bucket_nodes(block)
    firsts = [(session.place - start) * nodes for session, *_ in block]
    return [first + node for first, own in zip(firsts, rows, strict=True) for node in own]


def _bucket_nodes(block: Sequence[BatchPart]) -> int:
    return next_power_of_two(max(len(part.tokens) for _, part, *_ in block))
