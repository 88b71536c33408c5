"""Our own runtime for the Llama family: token trees of many sessions through one forward, static keys and values.

Exact mode (the default for float32 and bfloat16 on a CPU): a row's bits depend on its token, prefix and ancestors
alone. Rows are padded to counts that `linear.find_row_counts` found, everything between the products is row-wise,
attention is `ExactAttention`. So plain decoding, a tree, a batch and a fresh prefill write the same text, bit for bit.

Layers with a sliding window read the last tokens only, but a session keeps all of them: there is no ring buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, TargetOutput, tensor_of
from outpace.models.base import Capability, Model, Part, row_numbers, shown_numbers
from outpace.models.llama.config.draft_vocab import checked_ids
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.torch.attention import ExactAttention, FastAttention, SessionRows
from outpace.models.llama.torch.linear import (
    COUNTS,
    HEAD_COUNTS,
    Linear,
    can_pack,
    find_row_counts,
    in_calls,
    pack,
    packer,
    padded,
)
from outpace.models.llama.torch.rope_tables import RopeFactors, RopeTables
from outpace.models.llama.torch.session import KVFormat, LlamaSession
from outpace.models.llama.torch.weights import LayerWeights, Normed, load_head, load_layer
from outpace.models.llama.weight_sources import split_fused
from outpace.models.options import AUTO


class Llama(Model):
    """A Llama-family model. Sessions are independent; `score` is to be called by one thread at a time."""

    extras = frozenset(Capability)
    quantized: str | None = None  # what its matrices are held in, where that is not its dtype
    exact_where = "only for float32, for bfloat16 where this CPU's products keep a row's bits, or with graphs"

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
        """`exact` None: on where the machine allows it, float32 and bfloat16 on a CPU. `head_ids` [rows]: the tokens
        of the output layer's rows, where it holds some only; all others score -inf. `kv_dtype`: of keys and values."""
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.draft_window, self.num_layers = config.draft_window, config.num_layers
        self.device, self.dtype, self.score_dtype = embedding.device, embedding.dtype, embedding.dtype
        self._layers, self._embedding, self._head, self._head_ids = layers, embedding, head, head_ids
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self._norm_floor = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), device=self.device)
        self._head_norm_floor = torch.tensor(math.sqrt(config.head_dim * config.rms_norm_eps), device=self.device)
        self._gate = partial(F.gelu, approximate="tanh") if config.activation == GELU else F.silu
        self._windows = set(map(config.window, range(config.num_layers)))
        self.row_counts = self._head_counts = ()  # type: tuple[int, ...]
        if exact is not False:
            self.row_counts, self._head_counts = self._probe()
        self.exact = bool(self.row_counts)
        if exact and not self.exact:
            raise UserError(f"exact mode is not available for {self.dtype} on {self.device}, {self.exact_where}")
        self._attention: list[ExactAttention | FastAttention] = [
            ExactAttention(layer.bounds, self.device) if self.exact else FastAttention(self.dtype) for layer in layers
        ]
        self._turns = RopeTables(config, self._attention[0].turn_dtype, self.device)
        self.kv_dtype, self._holding = kv_dtype, KVFormat(kv_dtype, self._attention[0].dtype, config.head_dim)
        self._skipped: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # attention, MLP

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values a token, all layers together."""
        return self.config.kv_entries // self.config.head_dim * self._holding.width * self._holding.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        shapes = tensor_shapes(self.config)
        if not self.config.tie_embeddings:
            del shapes["model.embed_tokens.weight"]  # one row of it is read, not all
        return sum(map(math.prod, shapes.values())) * (1 if self.quantized else self.dtype.itemsize)

    @property
    def precision(self) -> str:
        return self.quantized or super().precision

    @classmethod
    def from_tensors(
        cls,
        config: LlamaConfig,
        tensor: Callable[[str], Tensor],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool | None = None,
        head_ids: np.ndarray | Tensor | None = None,
        kv_dtype: str = AUTO,
        quantized: str | None = None,
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Llama:
        """From Hugging Face weight names. `tensor(name)` gives a weight; they are laid out anew, layer by layer.

        `head_ids` int64 [rows]: only these tokens' rows of the output layer are held, all other tokens score -inf.
        `quantized`: its matrices are held in int8 or fp8, by torchao.
        """
        lay = packer(quantized) if quantized else pack
        held = None if head_ids is None else torch.from_numpy(checked_ids(head_ids, config.vocab_size)).to(device)

        tensor = split_fused(config, tensor)

        def fetch(name: str) -> Tensor:
            return tensor(name).to(device=device, dtype=dtype)

        layers = []
        for number in range(config.num_layers):
            layers.append(load_layer(config, number, fetch, lay))
            progress("loading", (number + 1) / config.num_layers)
        embedding = fetch("model.embed_tokens.weight")
        head = load_head(config, embedding, held, fetch, lay)
        model = cls(config, layers, embedding, head, False if quantized else exact, held, kv_dtype)
        model.quantized = quantized
        return model

    def shallow(self, layers: Sequence[int]) -> Llama:
        """A model of these layers alone, sharing their weights: a draft that costs nothing to get."""
        chosen = [self._layers[number] for number in layers]
        config, ends = self.config.of_layers(layers), (self._embedding, self._head)
        model = Llama(config, chosen, *ends, self.exact, self._head_ids, self.kv_dtype)
        model.quantized = self.quantized
        return model

    def open(self, capacity: int, room: int) -> LlamaSession:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        capacity = min(capacity, self.max_positions)
        self._turns.reach(min(capacity + room, self.max_positions))
        return LlamaSession(capacity, room, self.config, self._holding, self.device)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Llama:
        other = copy(self)
        other._skipped = (self._skipped[0].union(attention), self._skipped[1].union(mlp))
        return other

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> SparseLogits:
        return SparseLogits(self._logits(hidden), None, self.vocab_size)

    def score(self, forest: Sequence[Part]) -> Tensor:
        """One forward over all parts; logits of the wanted nodes, part after part. [wanted rows, vocab]"""
        return tensor_of(self.score_hidden(forest, ()).logits)

    @torch.inference_mode()
    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """As `score`, with hidden states in the model's dtype. [layers, shown rows, hidden]"""
        for part in forest:
            if part.keep is not None:
                part.session.keep(part.keep)
        spans: list[SessionRows] = []
        for part in forest:
            first, last = spans[-1].rows.stop if spans else 0, self.max_positions - 1
            spans.append(SessionRows(part, first, last, self._windows, self.device))
        tokens = to_device([token for part in forest for token in part.tokens], np.int64, self.device)
        positions = to_device([place for span in spans for place in span.positions], np.int64, self.device)
        x = self._embedded(padded(tokens, self.row_counts))
        turns = self._turns(padded(positions, self.row_counts))
        for span in spans:
            if span.inputs is not None:
                x[span.rows] = span.inputs.to(x)
        shown = to_device(shown_numbers(forest), np.int64, self.device) if layers else None
        taps = {}
        for number in range(len(self._layers) + 1):
            if shown is not None and number in layers:
                taps[number] = x[shown]
            if number < len(self._layers):
                x = self._forward(number, x, turns, spans)
        logits = self._logits(x[to_device(row_numbers(forest), np.int64, self.device)])
        return TargetOutput(logits, torch.stack([taps[layer] for layer in layers]) if layers else None)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """What goes into the first layer. [rows, hidden]"""
        x = F.embedding(tokens, self._embedding)
        return x if self.config.embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def _forward(self, number: int, x: Tensor, turns: RopeFactors, spans: Sequence[SessionRows]) -> Tensor:
        """One layer: attention and MLP, each added to the residual. [rows, hidden] to [rows, hidden]"""
        if number not in self._skipped[0]:
            x = self._mix(number, x, turns, spans)
        return x if number in self._skipped[1] else self._feed(number, x, spans)

    def _mix(self, number: int, x: Tensor, turns: RopeFactors, spans: Sequence[SessionRows]) -> Tensor:
        """A layer's attention."""
        mixed = self._turned(number, x, turns)
        attended = x.new_zeros(len(x), self.config.num_heads * self.config.head_dim)
        for span in spans:
            self._attend(number, span, mixed[span.rows], attended[span.rows])
        return self._add_mixed(number, attended, x)

    def _add_mixed(self, number: int, attended: Tensor, x: Tensor) -> Tensor:
        """The residual and what a layer's heads give, [rows, heads * head_dim]."""
        return self._add(self._layers[number].output, self._layers[number].output_norm, attended, x)

    def _add(self, linear: Linear, norm: Tensor | None, inner: Tensor, x: Tensor) -> Tensor:
        """The residual and a product, which is normed before where there is a norm for it."""
        return self._apply(linear, inner, x) if norm is None else x + self._norm(self._apply(linear, inner), norm)

    def _turned(self, number: int, x: Tensor, turns: RopeFactors) -> Tensor:
        """A layer's queries, keys and values, normed and turned. [rows, heads + 2 kv_heads, head_dim]"""
        layer = self._layers[number]
        mixed = self._apply_normed(layer.qkv, x)
        mixed = mixed if layer.head_norm is None else self._norm_heads(mixed, layer.head_norm)
        return self._attention[number].prepare(mixed, turns[self.config.rotation(number)])

    def _feed(self, number: int, x: Tensor, spans: Sequence[SessionRows]) -> Tensor:
        """A layer's MLP."""
        layer = self._layers[number]
        gate, up = self._apply_normed(layer.gate_up, x).chunk(2, dim=-1)
        for span in spans:
            if span.steer is not None:
                up[span.rows] += span.steer[number].to(up)
        return self._add(layer.down, layer.down_norm, self._gate(gate).mul_(up), x)

    def _attend(self, number: int, span: SessionRows, mixed: Tensor, out: Tensor) -> None:
        """Stores one session's new keys and values and mixes over what its nodes see, into `out`."""
        heads, groups = self.config.num_heads, self.config.num_kv_heads
        kv, view, attention = span.session.kv[number], span.views[self.config.window(number)], self._attention[number]
        kv[:, span.slots] = self._holding.encode(mixed[:, heads:]).transpose(0, 1)
        held = kv[:, view.first : span.seen]
        if not self._holding.is_own:
            held = attention.rounded(self._holding.decode(held))
        attention.attend(mixed[:, :heads], held[:groups], held[groups:], view.hidden, out)

    def _logits(self, x: Tensor) -> Tensor:
        """The last layer's rows to scores: [rows, vocab]"""
        if not len(x):
            return self._no_scores()
        logits = self._scored(self._norm(padded(x, self._head_counts), self._head.norm))[: len(x)]
        if self._head_ids is not None:
            wide = logits.new_full((len(x), self.config.vocab_size), -math.inf)
            logits = wide.scatter_(1, self._head_ids.expand(len(x), -1), logits)
        return logits[:, : self.vocab_size]

    def _no_scores(self) -> Tensor:
        return self._embedding.new_empty(0, self.vocab_size, dtype=self.score_dtype)

    def _scored(self, normed: Tensor) -> Tensor:
        """The output layer's product. [rows, kept tokens]"""
        return in_calls(self._head.linear, normed, None, self._head_counts)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x over sqrt(sum of squares + hidden * eps), times `weight`, which brings sqrt(hidden); where it is None, both
        are in the next product."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [rows, 1]
        normed = x / torch.hypot(norm, self._norm_floor)
        return normed if weight is None else (normed * weight).to(x.dtype)

    def _norm_heads(self, mixed: Tensor, weight: Tensor) -> Tensor:
        """Queries and keys, head by head, as `_norm` does it; values stay. [rows, (heads + 2 kv_heads) * head_dim]"""
        heads = mixed.unflatten(1, (-1, self.config.head_dim))
        norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=torch.float32)  # [rows, heads.., 1]
        divisor = torch.hypot(norm, self._head_norm_floor)
        divisor[:, -self.config.num_kv_heads :].fill_(1)  # not `= 1`, which a capture takes for a copy from the host
        return (heads / divisor * weight).flatten(1).to(mixed.dtype)

    def _apply_normed(self, normed: Normed, x: Tensor) -> Tensor:
        return self._apply(normed.linear, self._norm(x, normed.norm))

    def _apply(self, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return in_calls(linear, x, residual, self.row_counts)

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Row counts that leave rows alone, for the layers and for the output layer; none where exact mode is not to
        be had."""
        if not can_pack(self.device, self.dtype):
            return (), ()
        layer, hidden, config = self._layers[0], self.config.hidden_size, self.config

        def added(linear: Linear) -> Linear:
            """As the forward calls it, with a residual: that is another kernel."""
            return lambda x, residual=None: linear(x, x.new_ones(len(x), hidden))

        narrow = [(layer.qkv.linear, hidden), (layer.gate_up.linear, hidden)]
        wide = [(layer.output, config.num_heads * config.head_dim), (layer.down, config.intermediate_size)]
        if not config.sandwich_norms:
            wide = [(added(linear), inputs) for linear, inputs in wide]
        linears = [*narrow, *wide]
        counts = find_row_counts(linears, COUNTS, self.dtype)
        head = find_row_counts([(self._head.linear, hidden)], HEAD_COUNTS, self.dtype)
        return (counts, head) if counts and head else ((), ())
