"""The Llama family by native kernels on a CPU: weights in int8 or as a file has them, int8 activations, one call a
forward, always exact.

A row's bits depend on its token, prefix and ancestors alone, by construction: integer sums within a group, one fixed
order of everything else. The same bits come from every instruction set and any number of threads. int8 weights are
another target than a file's own or float32 ones: the texts of the three differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.errors import unknown
from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits, TargetOutput, TopK
from outpace.models.base import Capability, Model, Part, Session, check_forest, shown_numbers, unsupported
from outpace.models.llama.config.footprint import held_as, token_bytes
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.native.binding import (
    INSTALL,
    NativeOptions,
    check_supported,
    constants_of,
    load_kernels,
    read_formats,
    usable_cores,
)
from outpace.models.llama.native.pair import NativePair
from outpace.models.llama.native.rope_tables import NativeRopeTable
from outpace.models.llama.native.weights import EmbeddingAndHead, Fetch, Packing, load_layer, middle_size
from outpace.models.llama.weight_sources import StoredMatrix, split_fused
from outpace.models.options import INT8, NATIVE_KV

if TYPE_CHECKING:
    from torch import Tensor


Span = tuple[Any, int, int, int, bytes]
"""A session's store, its committed tokens, those that are pending, the new ones, and which of these each of them sees:
a byte each, 1 or 0."""


class Forest:
    """Reserves the slots of all parts. `more`: what the kernels are told beside tokens and positions; {} for those who
    ask for nothing else. `best`: so many best tokens all ask for of each wanted row; below 1: none."""

    def __init__(self, parts: Sequence[Part], last_position: int, middle: int) -> None:
        """`middle`: the MLP's width in the kernels, whole groups."""
        self.spans: list[Span] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        self.more: dict[str, Any] = {}
        self.best = -1
        self._last_position = last_position
        for number, part in enumerate(parts):
            if part.keep is not None:
                part.session.keep(part.keep)
            if part.length is not None or part.inputs is not None or part.steer is not None:
                self._add_more(number, part, middle)
            if part.wanted:
                self.best = part.best if self.best in (-1, part.best) else 0
            first = len(self.tokens)
            self.wanted += [first + node for node in part.wanted] if first else part.wanted
            self.tokens += part.tokens
            self._add_span(part)

    def arrays(self, turns: np.ndarray) -> tuple[Any, ...]:
        """Spans, tokens, what each row turns by, of `turns` [positions, pairs, 2], and wanted rows: as the kernels take
        them from those who ask for more than scores."""
        spans = [
            (store, length, before, count, np.ndarray((count, before + count), bool, sees))
            for store, length, before, count, sees in self.spans
        ]
        tokens, wanted = np.array(self.tokens, np.int32), np.array(self.wanted, np.int32)
        return spans, tokens, turns.take(self.positions, 0), wanted

    def show(self, rows: Sequence[int], layers: Sequence[int], width: int) -> np.ndarray:
        """Asks for hidden states of these rows after so many layers each; where they will be, float32 [layers, rows,
        width]."""
        hidden = np.empty((len(layers), len(rows), width), np.float32)
        self.more |= {"shown": np.array(rows, np.int32), "layers": np.array(layers, np.int32), "hidden": hidden}
        return hidden

    def _add_more(self, number: int, part: Part, middle: int) -> None:
        """What a part has beside its tokens."""
        if part.length is not None:
            self._add("gaps", number, part.session.length - part.length)
        if part.inputs is not None:
            self._add("inputs", number, array_of(part.inputs))
        if part.steer is not None:
            steer = array_of(part.steer)
            self._add("steer", number, np.pad(steer, [(0, 0), (0, middle - steer.shape[1])]))

    def _add(self, name: str, number: int, value: Any) -> None:
        self.more.setdefault(name, {})[number] = value

    def _add_span(self, part: Part) -> None:
        """Reserves a part's slots: where its rows lie, what they see, and their positions."""
        session = part.session
        depths, length = session.pending_depths, session.length
        before = len(depths)
        sees = session.add(part.parents)
        start, last = length if part.length is None else part.length, self._last_position
        for node in range(before, len(depths)):  # a tree may reach past the context; that is never committed
            self.positions.append(min(start + depths[node], last))
        self.spans.append((session.store, length, before, len(part.tokens), sees))


def array_of(values: Tensor | np.ndarray) -> np.ndarray:
    """float32 on the host, row by row in memory."""
    host = values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()
    return np.ascontiguousarray(host, np.float32)


DEFAULT = NativeOptions()


class NativeSession(Session):
    """Keys and values of every layer in the kernels' store, which has addresses for a text as long as the context and
    grows in place."""

    def __init__(self, capacity: int, room: int, model: NativeLlama) -> None:
        super().__init__(capacity, room)
        self.config = model.config
        self.store = model.kernels.Store(model.heads, model.config.num_layers, model.max_positions + room, 0)

    def read(self, length: int) -> np.ndarray:
        """What the first `length` slots hold, float32 [layers, keys then values, kv_heads, slots, head_dim]."""
        out = np.empty((self.config.num_layers, 2, self.config.num_kv_heads, length, self.config.head_dim), np.float32)
        for layer, place in enumerate(out):
            self.store.read(layer, length, place)
        return out

    def advance_to(self, length: int) -> None:
        """So many tokens are committed by now, as the kernels have told; nothing is pending."""
        self.length = length
        self._drop_pending()

    def _resize(self, slots: int) -> None:
        self.store.resize(slots)

    def _move(self, source: Sequence[int], start: int) -> None:
        self.store.move(source, start)

    def _copy(self, other: NativeSession, length: int) -> None:
        self.store.copy(other.store, length)


class NativeLlama(Model):
    """A Llama-family model. Sessions are independent; concurrent calls of `score` wait for one another."""

    exact = True
    device = "cpu"
    precision = INT8
    usual_kv = NATIVE_KV  # what a profile does not name
    extras = frozenset(Capability)

    def __init__(
        self, config: LlamaConfig, layers: Sequence[Any], ends: EmbeddingAndHead, options: NativeOptions
    ) -> None:
        """`layers`: as `native_weights.load_layer` gives them."""
        self.kernels = load_kernels()
        sets = self.kernels.instruction_sets()
        if options.instruction_set not in ("", *sets):
            raise unknown("instruction_set", options.instruction_set, sets)
        self.config, self.options = config, options
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.draft_window = config.draft_window
        self.num_layers = config.num_layers
        self._layers, self._ends = layers, ends
        self.turns = NativeRopeTable(config.head_dim, config.rotations)
        self.kv_dtype = options.kv_dtype
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        scale = {"scale": config.query_scale} if config.query_scale else {}  # of which older kernels know nothing
        self.heads = self.kernels.Heads(*sizes, held_as(self.kernels, self.kv_dtype), config.rms_norm_eps, **scale)
        self._threads = options.threads or usable_cores()
        self._model = self._with(self._threads)
        self._teams = {self._threads: self._model}
        self._share = threading.local()  # .threads: of the passes of a thread that leaves cores to others
        self._skipped: np.ndarray | None = None  # bool [layers, attention then MLP]
        self._last_held = -1 if ends.held is None else int(ends.held[-1])
        self._middle = middle_size(self.kernels, config)
        self._takes_lists = hasattr(self.kernels.Model, "score")  # kernels that were built before do not
        if not hasattr(self.kernels.Model, "project"):
            self.extras, self.lacks = frozenset(), f"these kernels were built before they could: {INSTALL}"

    def _with(self, threads: int) -> Any:
        """The kernels' model with so many threads; it shares the weights with all others."""
        config, ends = self.config, self._ends
        return self.kernels.Model(
            self.heads,
            config.hidden_size,
            middle_size(self.kernels, config),
            config.rms_norm_eps,
            list(self._layers),
            ends.embedding,
            ends.norm,
            ends.head,
            self.options.instruction_set,
            threads,
            **constants_of(config),
        )

    def limit_threads(self, most: int | None = None, leave: int = 0) -> None:
        threads = max(1, min(self._threads, most or self._threads, usable_cores() - leave if leave else self._threads))
        if threads not in self._teams:
            self._teams[threads] = self._with(threads)
        self._share.threads = threads

    def team(self) -> Any:
        """The kernels' model by which this thread's passes run."""
        return self._teams[getattr(self._share, "threads", self._threads)]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values a token, all layers together."""
        return token_bytes(self.config, self.kv_dtype)

    def session_bytes(self, slots: int) -> int:
        """Bytes that a session of so many slots takes: whole pages."""
        total: int = self.kernels.Store.bytes_of(self.heads, self.config.num_layers, slots)
        return total

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        total: int = sum(layer.bytes for layer in self._layers) + self._ends.head.bytes
        return total

    @property
    def arithmetic(self) -> int:
        """The number of the kernels' arithmetic: with another one scores have other bits."""
        return getattr(self.kernels, "ARITHMETIC", 1)  # kernels of before do not tell

    @property
    def instruction_set(self) -> str:
        """The one that runs."""
        name: str = self._model.instruction_set
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
        """From Hugging Face weight names. `tensor(name)` gives a weight. What comes in float is rounded to int8, layer
        by layer; what comes as a file has it is held as `options.weights` says.

        `head_ids` int64 [rows]: only these tokens' rows of the output layer are held, all other tokens score -inf.
        """
        kernels = load_kernels()
        check_supported(kernels, config)
        threads = options.threads or usable_cores()
        packing = Packing(kernels, threads)
        fetch = Fetch(split_fused(config, tensor), read_formats(kernels), options.weights)
        with ThreadPoolExecutor(threads) as pool:
            try:
                ends = pool.submit(EmbeddingAndHead.load, packing, config, fetch, head_ids)
                found = pool.map(lambda number: load_layer(packing, config, number, fetch), range(config.num_layers))
                layers = []
                for number, layer in enumerate(found, 1):
                    layers.append(layer)
                    progress("loading", number / config.num_layers)
                model = cls(config, layers, ends.result(), options)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        model.precision, model.notice = fetch.precision, fetch.notice
        return model

    def shallow(self, layers: Sequence[int]) -> NativeLlama:
        """A model of these layers alone, sharing their weights: a draft that costs nothing to get."""
        chosen = [self._layers[number] for number in layers]
        made = NativeLlama(self.config.of_layers(layers), chosen, self._ends, self.options)
        made.precision = self.precision
        return made

    def open(self, capacity: int, room: int) -> NativeSession:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        capacity = min(capacity, self.max_positions)
        self.turns.reach(min(capacity + room, self.max_positions))
        return NativeSession(capacity, room, self)

    def score(self, forest: Sequence[Part]) -> Tensor:
        """One forward over all parts; logits of the wanted nodes, part after part. [wanted rows, vocab]"""
        return self.score_held(forest).wide()

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """As `score`, of those tokens alone that the output layer has rows for."""
        return self._forward(self._forest(forest))

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """As `score`, with hidden states in float32. [layers, shown rows, hidden]"""
        self._need(Capability.HIDDEN)
        rows = self._forest(forest)
        hidden = rows.show(shown_numbers(forest), layers, self.config.hidden_size)
        held = self._forward(rows)
        return TargetOutput(held.values if held.ids is None else held.wide(), torch.from_numpy(hidden))

    def without(self, attention: Collection[int], mlp: Collection[int]) -> NativeLlama:
        self._need(Capability.WITHOUT)
        other = copy(self)
        skipped = np.zeros((self.num_layers, 2), bool) if self._skipped is None else self._skipped.copy()
        skipped[list(attention), 0] = skipped[list(mlp), 1] = True
        other._skipped = skipped
        return other

    def pair_with(self, draft: Any) -> NativePair | None:
        if type(self) is not NativeLlama or type(draft) is not NativeLlama or not hasattr(self.kernels, "Noise"):
            return None
        return NativePair(self, draft) if self._skipped is None and draft._skipped is None else None

    def project(self, hidden: Tensor | np.ndarray) -> SparseLogits:
        self._need(Capability.PROJECT)
        model = self.team()
        out = np.empty((len(hidden), model.outputs), np.float32)
        model.project(array_of(hidden), out)
        return self._held(out, self.known())

    def _need(self, extra: Capability) -> None:
        if extra not in self.extras:
            raise unsupported(self, extra)

    def _forest(self, parts: Sequence[Part]) -> Forest:
        check_forest(self, parts)
        forest = Forest(parts, self.max_positions - 1, self._middle)
        if self._skipped is not None:
            forest.more["skipped"] = self._skipped
        return forest

    def _forward(self, forest: Forest) -> SparseLogits:
        model, turns = self.team(), self.turns.table
        out = np.empty((len(forest.wanted), model.outputs), np.float32)
        known = self.known()
        if forest.more or not self._takes_lists:
            model.forward(*forest.arrays(turns), out, **forest.more)
            return self._held(out, known)
        rows = (forest.spans, forest.tokens, forest.positions, turns, forest.wanted)
        return self._held(out, known, model.score(*rows, out, forest.best, *known))

    def known(self) -> tuple[int, np.ndarray | None]:
        """How many outputs of the output layer are known tokens, and which; another model may know fewer."""
        ids, vocab = self._ends.held, self.vocab_size
        if ids is None:
            return vocab, None
        if self._last_held >= vocab:
            ids = ids[: np.searchsorted(ids, vocab)]
        return len(ids), ids

    def _held(self, out: np.ndarray, known: tuple[int, np.ndarray | None], best: Sequence[TopK] = ()) -> SparseLogits:
        """The output layer's scores of the tokens that are known."""
        count, ids = known
        return SparseLogits(out if count == out.shape[1] else out[:, :count], ids, self.vocab_size, best)
