"""Our own runtime for the Llama family: token trees of many sessions through one forward, static keys and values.

Exact mode (the default for float32 on a CPU): a row's bits depend on its token, prefix and ancestors alone. Rows are
padded to counts that `linear.find_row_counts` found, everything between the products is row-wise, attention is
`ExactAttention`. So plain decoding, a tree, a batch and a fresh prefill write the same text, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.attention import ExactAttention, FastAttention
from outpace.models.base import Part, Session, row_numbers
from outpace.models.config import LlamaConfig
from outpace.models.linear import COUNTS, HEAD_COUNTS, Linear, find_row_counts, in_calls, padded
from outpace.models.llama_weights import Layer, load_head, load_layer, rotary


class LlamaSession(Session):
    """Keys and values of every layer, allocated once: [layers, keys then values of the kv_heads, slots, head_dim]."""

    def __init__(self, capacity: int, room: int, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(capacity, room)
        self.last_position = config.max_positions - 1
        shape = (config.num_layers, 2 * config.num_kv_heads, self.slots, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device)

    def _move(self, source: np.ndarray, start: int) -> None:
        index = torch.from_numpy(source).to(self.kv.device)
        self.kv[:, :, start : start + len(source)] = self.kv[:, :, index]

    def _copy(self, other: LlamaSession, length: int) -> None:
        self.kv[:, :, :length] = other.kv[:, :, :length]


class _Span:
    """Where one session's rows lie in the forward, and what they see."""

    def __init__(self, part: Part, first_row: int, device: torch.device) -> None:
        session = part.session
        before = session.pending
        sees = session.extend(part.parents)
        self.session = session
        self.rows = slice(first_row, first_row + len(part.tokens))
        self.slots = slice(session.length + before, session.length + session.pending)
        self.seen = session.length + session.pending
        last = session.last_position  # a tree may reach past the context; what lies there is never committed
        self.positions = [min(session.length + depth, last) for depth in session.pending_depths[before:]]
        hidden = np.where(sees, 0.0, -np.inf)
        self.hidden = None if sees.all() else torch.from_numpy(hidden).to(device)  # [nodes, pending]


class Llama:
    """A Llama-family model. Sessions are independent; `score` is to be called by one thread at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[Layer],
        embedding: Tensor,
        head: Linear,
        exact: bool | None = None,
    ) -> None:
        """`exact` None: on where the machine allows it, float32 on a CPU."""
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.device, self.dtype = embedding.device, embedding.dtype
        self._layers, self._embedding, self._head = layers, embedding, head
        self._norm_floor = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), device=self.device)
        self._cis = rotary(config, self.device)  # [positions, head_dim / 2] complex64
        may_be_exact = self.device.type == "cpu" and self.dtype == torch.float32
        probing = may_be_exact and exact is not False
        self.row_counts, self._head_counts = self._probe() if probing else ((), ())
        self.exact = bool(self.row_counts)
        if exact and not self.exact:
            raise UserError(f"exact mode is not to be had for {self.dtype} on {self.device}: float32 on a CPU has it")
        self._attention: list[ExactAttention | FastAttention] = [
            ExactAttention(layer.bounds) if self.exact else FastAttention(self.dtype) for layer in layers
        ]
        self._kv_dtype = self._attention[0].dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values a token, all layers together."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self._kv_dtype.itemsize

    @classmethod
    def from_tensors(
        cls,
        config: LlamaConfig,
        tensor: Callable[[str], Tensor],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool | None = None,
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Llama:
        """From Hugging Face weight names. `tensor(name)` gives a weight; they are laid out anew, layer by layer."""

        def fetch(name: str) -> Tensor:
            return tensor(name).to(device=device, dtype=dtype)

        layers = []
        for number in range(config.num_layers):
            layers.append(load_layer(config, number, fetch))
            progress("loading", (number + 1) / config.num_layers)
        embedding = fetch("model.embed_tokens.weight")
        return cls(config, layers, embedding, load_head(config, embedding, fetch), exact)

    def shallow(self, layers: Sequence[int]) -> Llama:
        """A model of these layers alone, sharing their weights: a draft that costs nothing to get."""
        config = replace(self.config, num_layers=len(layers))
        chosen = [self._layers[number] for number in layers]
        return Llama(config, chosen, self._embedding, self._head, self.exact)

    def open(self, capacity: int, room: int) -> LlamaSession:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        return LlamaSession(min(capacity, self.max_positions), room, self.config, self._kv_dtype, self.device)

    @torch.inference_mode()
    def score(self, forest: Sequence[Part]) -> Tensor:
        """One forward over all parts; logits of the wanted nodes, part after part. [wanted rows, vocab]"""
        for part in forest:
            if part.keep is not None:
                part.session.keep(part.keep)
        spans: list[_Span] = []
        for part in forest:
            spans.append(_Span(part, spans[-1].rows.stop if spans else 0, self.device))
        tokens = torch.tensor([token for part in forest for token in part.tokens], device=self.device)
        positions = torch.tensor([place for span in spans for place in span.positions], device=self.device)
        x = F.embedding(padded(tokens, self.row_counts), self._embedding)  # [rows, hidden]
        turn = self._turns(padded(positions, self.row_counts))
        for number in range(len(self._layers)):
            x = self._forward(number, x, turn, spans)
        rows = row_numbers(forest)
        if not rows:
            return x.new_empty(0, self.vocab_size)
        wanted = x[torch.tensor(rows, device=self.device)]
        wanted = self._norm(padded(wanted, self._head_counts))
        return in_calls(self._head, wanted, None, self._head_counts)[: len(rows), : self.vocab_size]

    def _forward(self, number: int, x: Tensor, turn: Tensor, spans: Sequence[_Span]) -> Tensor:
        """One layer: attention and MLP, each added to the residual. [rows, hidden] to [rows, hidden]"""
        layer, attention = self._layers[number], self._attention[number]
        mixed = attention.prepare(self._apply(layer.qkv, self._norm(x)), turn)
        attended = x.new_zeros(len(x), self.config.num_heads * self.config.head_dim)
        for span in spans:
            self._attend(number, span, mixed[span.rows], attended[span.rows])
        x = self._apply(layer.output, attended, x)
        gate, up = self._apply(layer.gate_up, self._norm(x)).chunk(2, dim=-1)
        return self._apply(layer.down, F.silu(gate).mul_(up), x)

    def _attend(self, number: int, span: _Span, mixed: Tensor, out: Tensor) -> None:
        """Stores one session's new keys and values and mixes over what its nodes see, into `out`."""
        heads, groups = self.config.num_heads, self.config.num_kv_heads
        kv = span.session.kv[number]
        kv[:, span.slots] = mixed[:, heads:].transpose(0, 1)
        keys, values = kv[:groups, : span.seen], kv[groups:, : span.seen]
        self._attention[number].attend(mixed[:, :heads], keys, values, span.hidden, out)

    def _turns(self, positions: Tensor) -> Tensor:
        """Rotation of every head's pairs, values by nothing: [rows, heads + 2 kv_heads, head_dim / 2] complex."""
        config = self.config
        turn = self._cis[positions][:, None].to(self._attention[0].turn_dtype)
        turned = turn.expand(-1, config.num_heads + config.num_kv_heads, -1)
        return torch.cat([turned, torch.ones_like(turn).expand(-1, config.num_kv_heads, -1)], dim=1)

    def _norm(self, x: Tensor) -> Tensor:
        """x over sqrt(sum of squares + hidden * eps): sqrt(hidden) and the norm's weights are in the next product."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [rows, 1]
        return (x / torch.hypot(norm, self._norm_floor)).to(x.dtype)

    def _apply(self, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return in_calls(linear, x, residual, self.row_counts)

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Row counts that leave rows alone, for the layers and for the output layer."""
        layer, config = self._layers[0], self.config
        attended = config.num_heads * config.head_dim
        wide = [(layer.qkv, config.hidden_size), (layer.output, attended), (layer.gate_up, config.hidden_size)]
        counts = find_row_counts([*wide, (layer.down, config.intermediate_size)], COUNTS)
        head = find_row_counts([(self._head, config.hidden_size)], HEAD_COUNTS)
        return (counts, head) if counts and head else ((), ())
