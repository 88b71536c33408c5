"""The Llama family by captured forwards: one launch a pass, whatever the sessions and their trees are.

A forward runs over static buffers, in buckets of sessions, of nodes a session and of slots; each bucket is captured
once, as a CUDA graph or its stand-in (`captures`). All sessions' keys and values lie in one pool. What has no bucket,
long pieces of prompts and whatever needs more than scores, goes through the runtime that this one is made from, on the
same sessions; that is also the slow twin against which the fast path is tested. CUDA graphs: Ng et al., "Accelerating
PyTorch with CUDA Graphs", 2021. Sums depend on the bucket here; `graph_exact.py` has those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.core.errors import unknown
from outpace.core.logits import TargetOutput, tensor_of
from outpace.models.base import Part
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda.captures import MOST_PENDING, Captures, StaticInputs, pass_shapes, seen_bits
from outpace.models.llama.cuda.pool import LEAST, MOST_MOVES, SPARE, GraphSession, Pool, finite, pool_shape
from outpace.models.llama.torch.attention import KINDS, attend_batch, prepare_mask, tree_mask
from outpace.models.llama.torch.linear import padded
from outpace.models.llama.torch.rope_tables import RopeFactors
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.weights import LayerWeights, Normed
from outpace.models.options import AUTO

_FREE = 64  # rows: a pass over so many costs what one costs, for it is bound by memory


def split_by_length(counts: Sequence[int]) -> list[list[int]]:
    """The places of parts with so many nodes, by forward: all in one, unless two of them save more than half of the
    rows. A piece of a prompt beside many short trees would make each of them as long as itself."""
    buckets = [next_power_of_two(count) for count in counts]
    every = list(range(len(counts)))
    if _rows(buckets) <= _FREE:
        return [every] if counts else []
    best, least = [every], _rows(buckets) / 2
    for limit in set(buckets):
        short = [place for place in every if buckets[place] < limit]
        long = [place for place in every if buckets[place] >= limit]
        rows = sum(max(_FREE, _rows([buckets[place] for place in some])) for some in (short, long))
        if short and rows < least:
            best, least = [short, long], rows
    return best


def _rows(buckets: Sequence[int]) -> int:
    """Those of one forward over parts of these buckets."""
    return next_power_of_two(len(buckets)) * max(buckets, default=0)


MOST_NODES = 64  # a session in a captured forward; more are a prompt's
MOST_SESSIONS = 32
MOST_HEAD_ROWS = 256  # in a captured output layer
FEW_MOVES = 8

Inside = tuple[GraphSession, Part, int, np.ndarray]  # a part whose nodes have slots: nodes before it, what they see


class GraphLlama(Llama):
    """A Llama-family model whose passes are captured. One thread at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[LayerWeights],
        embedding: Tensor,
        head: Normed,
        exact: bool | None = None,
        head_ids: Tensor | None = None,
        kv_dtype: str = AUTO,
    ) -> None:
        super().__init__(config, layers, embedding, head, exact, head_ids, kv_dtype)
        self.pool = Pool(config, self._holding, self.device)
        self.attention = KINDS[0]
        self.captures = Captures(self.device.type != "cuda")
        self._hidden = torch.zeros(0, config.hidden_size, dtype=self.dtype, device=self.device)

    @property
    def num_captures(self) -> int:
        return self.captures.count

    @classmethod
    def from_tensors(
        cls, *args: Any, is_eager: bool | None = None, attention: str | None = None, **more: Any
    ) -> GraphLlama:
        """As Llama's. `is_eager`: by the stand-in for a capture, None: where the device has no graphs."""
        if attention not in (None, *KINDS):
            raise unknown("attention", attention, KINDS)
        model = super().from_tensors(*args, **more)
        assert isinstance(model, GraphLlama)
        model.attention = attention or model.attention
        if is_eager is not None:
            model.captures = Captures(is_eager)
        return model

    def shallow(self, layers: Sequence[int]) -> GraphLlama:
        chosen, config = [self._layers[number] for number in layers], self.config.of_layers(layers)
        model = type(self)(config, chosen, self._embedding, self._head, self.exact, self._head_ids, self.kv_dtype)
        model.attention, model.captures = self.attention, Captures(self.captures.is_eager)
        model.quantized = self.quantized
        return model

    def open(self, capacity: int, room: int) -> GraphSession:  # type: ignore[override]  # its own storage
        capacity = min(capacity, self.max_positions)
        self._turns.reach(min(next_power_of_two(capacity + room), self.max_positions))
        return GraphSession(capacity, room, self.pool)

    def session_bytes(self, slots: int) -> int:
        return self.stored_bytes([slots])

    def stored_bytes(self, slots: Sequence[int]) -> int:
        """Rows and slots go by powers of two, and all rows are as long as the longest."""
        rows, wide = pool_shape(slots)
        return rows * (wide + SPARE) * self.token_bytes if rows else 0

    def score(self, forest: Sequence[Part]) -> Tensor:
        """Parts that have a bucket in captured forwards, each other one in a forward of its own."""
        if any(self._skipped) or len({id(part.session) for part in forest}) < len(forest):
            return tensor_of(self.score_hidden(forest, ()).logits)
        inside = [number for number, part in enumerate(forest) if self._has_bucket(part)]
        groups = split_by_length([len(forest[number].tokens) for number in inside])
        if len(inside) == len(forest) and len(groups) == 1:
            return self._score_captured(forest)
        rows: dict[int, Tensor] = {}
        for places in groups:
            numbers = [inside[place] for place in places]
            scores = self._score_captured([forest[number] for number in numbers])
            rows.update(zip(numbers, scores.split([len(forest[number].wanted) for number in numbers]), strict=True))
        for number, part in enumerate(forest):
            if number not in rows:
                rows[number] = tensor_of(self.score_hidden([part], ()).logits)
        return torch.cat([rows[number] for number in range(len(forest))])

    @torch.inference_mode()
    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Not captured."""
        for part in forest:
            if part.keep is not None:
                part.session.keep(part.keep)
            part.session.settle()
        return super().score_hidden([part._replace(keep=None) for part in forest], layers)

    def _has_bucket(self, part: Part) -> bool:
        pending = len(part.tokens) + (part.session.pending if part.keep is None else 0)
        is_plain = part.length is None and part.steer is None and part.inputs is None
        return is_plain and len(part.tokens) <= MOST_NODES and pending <= MOST_PENDING

    @torch.inference_mode()
    def _score_captured(self, forest: Sequence[Part]) -> Tensor:
        inside = [self._enter(part) for part in forest]
        self.pool.bring_to_front([session for session, *_ in inside if session.row is not None])
        self.captures.forget_if_moved(self.pool.kv, *self._turns.tables)
        rows: list[Tensor] = [self._no_scores()] * len(forest)
        for start in range(0, len(inside), MOST_SESSIONS):
            block = range(start, start + MOST_SESSIONS)
            numbers = [n for n, (session, *_) in enumerate(inside) if session.row in block]
            if not numbers:
                continue
            self._run(start, [inside[number] for number in numbers])
            wanted = [len(forest[number].wanted) for number in numbers]
            scores = self._read(start, [inside[number] for number in numbers])
            for number, some in zip(numbers, scores.split(wanted), strict=True):
                rows[number] = some
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _enter(self, part: Part) -> Inside:
        """Commits what is kept, and makes slots for the new nodes."""
        session = part.session
        if part.keep is not None:
            session.keep(part.keep)
        before = session.pending
        return session, part, before, session.extend(part.parents)

    def _run(self, start: int, block: Sequence[Inside]) -> None:
        """The rows from `start` on through the layers; leaves hidden states [batch * nodes, hidden] in `_hidden`."""
        batch, nodes = next_power_of_two(len(block)), _nodes(block)
        slots = min(next_power_of_two(max(session.held for session, *_ in block), LEAST), self.pool.slots)
        inputs = self._inputs(("pass", batch, nodes), lambda: StaticInputs(pass_shapes(batch, nodes), self.device))
        self._hidden = self.captures.buffers("hidden", self._make_hidden)
        idle = {"slots": self.pool.padding}
        key = ("pass", start, batch, nodes, slots)
        if not self.captures.has(key):
            inputs.begin(idle)
            inputs.send()
            work = partial(self._layers_pass, start, inputs.device, slots)
            self.captures.prepare(key, work, inputs.buffer, self.pool.kv, self._hidden)
        self._move(start, batch, block)
        host = inputs.begin(idle)
        for inside in block:
            self._fill(host, inside[0].place - start, inside)
        inputs.send()
        self.captures.replay(key)

    def _fill(self, host: dict[str, np.ndarray], row: int, inside: Inside) -> None:
        session, part, before, sees = inside
        new, length = len(part.tokens), session.length
        below = np.asarray(session.pending_depths, dtype=np.int64)
        depths = below[before:]
        host["lengths"][row] = length
        host["below"][row, : len(below)] = below
        host["tokens"][row, :new] = part.tokens
        # a tree may reach past the context; what lies there is never committed
        host["positions"][row, :new] = np.minimum(length + depths, self.max_positions - 1)
        host["slots"][row, :new] = np.arange(length + before, length + before + new)
        host["depths"][row, :new] = depths
        host["bits"][row, :new] = seen_bits(sees)

    def _move(self, start: int, batch: int, block: Sequence[Inside]) -> None:
        """What the sessions' `keep` left to be moved, all of it in one captured step before the forward's."""
        moving = [(session, *session.moves) for session, *_ in block if session.moves is not None]
        if not moving:
            return
        most = max(len(source) for _, source, _ in moving)
        count = FEW_MOVES if most <= FEW_MOVES else MOST_MOVES
        shapes = {"source": (batch, count), "goal": (batch, count)}
        inputs = self._inputs(("moves", batch, count), lambda: StaticInputs(shapes, self.device))
        idle = {"source": self.pool.padding, "goal": self.pool.padding}
        key = ("moves", start, batch, count)
        if not self.captures.has(key):
            inputs.begin(idle)
            inputs.send()
            work = partial(self._moves_pass, start, inputs.device)
            self.captures.prepare(key, work, inputs.buffer, self.pool.kv)
        host = inputs.begin(idle)
        for session, source, first in moving:
            session.moves = None
            host["source"][session.place - start, : len(source)] = source
            host["goal"][session.place - start, : len(source)] = np.arange(first, first + len(source))
        inputs.send()
        self.captures.replay(key)

    def _read(self, start: int, block: Sequence[Inside]) -> Tensor:
        """Scores of the wanted nodes after `_run`, part after part: a tensor of their own. [wanted, vocab]"""
        nodes = _nodes(block)
        places = [(inside[0].place - start) * nodes + node for inside in block for node in inside[1].wanted]
        if not places:
            return self._no_scores()
        count = next_power_of_two(len(places), *self._head_counts)
        if count > MOST_HEAD_ROWS:
            return self._logits(self._hidden[to_device(places, np.int64, self.device)])
        inputs = self._inputs(("head", count), lambda: StaticInputs({"rows": (count,)}, self.device))
        size = count, self.vocab_size
        logits: Tensor = self.captures.buffers(
            ("logits", *size), lambda: self._embedding.new_zeros(size, dtype=self.score_dtype)
        )
        key = ("head", *size)
        inputs.begin({})["rows"][: len(places)] = places
        inputs.send()
        self.captures.prepare(
            key, partial(self._head_pass, inputs.device["rows"], logits), inputs.buffer, self._hidden, logits
        )
        self.captures.replay(key)
        return logits[: len(places), : self.vocab_size].clone()

    def _layers_pass(self, start: int, given: dict[str, Tensor], slots: int) -> None:
        """Captured: tokens to hidden states."""
        x = self._embedded(padded(given["tokens"].flatten(), self.row_counts))
        turns = self._turns(padded(given["positions"].flatten(), self.row_counts))
        masks = {window: self._mask(given, slots, window) for window in self._windows}
        for number in range(len(self._layers)):
            x = self._mix_batch(number, start, x, turns, given["slots"], masks[self.config.window(number)])
            x = self._feed(number, x, ())
        self._hidden[: len(x)].copy_(x)

    def _mask(self, given: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        mask = tree_mask(given["bits"], given["lengths"], given["depths"], given["below"], slots, window)
        split_by_length, dtype = self.config.num_heads // self.config.num_kv_heads, self._attention[0].dtype
        return prepare_mask(mask, split_by_length, dtype, self.attention)

    def _mix_batch(self, number: int, start: int, x: Tensor, turns: RopeFactors, slots: Tensor, mask: Tensor) -> Tensor:
        """A layer's attention, for all sessions at once. `slots` [batch, nodes]: where new keys and values go."""
        heads, (batch, nodes) = self.config.num_heads, slots.shape
        mixed = self._turned(number, x, turns)[: batch * nodes]
        new = mixed[:, heads:].unflatten(0, (batch, nodes)).unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
        kv = self.pool.kv[number][:, start : start + batch]  # [2, batch, kv_heads, slots, width]
        new = self._holding.encode(finite(new))
        kv.scatter_(3, slots[None, :, None, :, None].expand_as(new), new)
        held = self._holding.decode(kv[:, :, :, : mask.shape[-1]])
        return self._add_mixed(number, self._attend_all(number, mixed[:, :heads], held, mask), x)

    def _attend_all(self, number: int, query: Tensor, held: Tensor, mask: Tensor) -> Tensor:
        """Mixed values for the forward's rows: [rows, heads * d]. `held`: keys and values, decoded"""
        return attend_batch(query, held[0], held[1], mask, self.attention)

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def _moves_pass(self, start: int, given: dict[str, Tensor]) -> None:
        """Captured: slots `source` of every row go to `goal`, all layers at once."""
        self.pool.move(start, given["source"], given["goal"])

    def _head_pass(self, rows: Tensor, logits: Tensor) -> None:
        """Captured: hidden states of these rows to scores."""
        logits.copy_(self._logits(self._hidden[rows]))

    def _attend(self, number: int, span: Any, mixed: Tensor, out: Tensor) -> None:
        """As Llama's, on a row of the pool."""
        heads, view = self.config.num_heads, span.views[self.config.window(number)]
        kv = self.pool.kv[number, :, span.session.row]  # [2, kv_heads, slots, width]
        kv[:, :, span.slots] = self._holding.encode(finite(mixed[:, heads:].unflatten(1, (2, -1)).permute(1, 2, 0, 3)))
        held, attention = self._holding.decode(kv[:, :, view.first : span.seen]), self._attention[number]
        if not self._holding.is_own:
            held = attention.rounded(held[:, None])[:, 0]
        attention.attend(mixed[:, :heads], held[0], held[1], view.hidden, out)

    def _inputs(self, key: tuple[Any, ...], make: Callable[[], StaticInputs]) -> StaticInputs:
        inputs: StaticInputs = self.captures.buffers(key, make)
        return inputs

    def _make_hidden(self) -> Tensor:
        return self._embedding.new_zeros(MOST_SESSIONS * MOST_NODES, self.config.hidden_size)


def _nodes(block: Sequence[Inside]) -> int:
    """The bucket of nodes a session."""
    return next_power_of_two(max(len(part.tokens) for _, part, *_ in block))
