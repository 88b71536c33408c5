"""Our own runtime for the Llama family: token trees of many sessions through one forward, static keys and values.

Exact mode (the default for float32 on a CPU): a row's bits depend on its token, prefix and ancestors alone. Rows are
padded to the bucket that `linear.row_bucket` found, everything between the products is row-wise, attention is
`ExactAttention`. So plain decoding, a tree, a batch and a fresh prefill write the same text, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.attention import ExactAttention, FastAttention
from outpace.models.base import Part, Session, row_numbers
from outpace.models.config import LlamaConfig
from outpace.models.linear import LARGEST, row_bucket
from outpace.models.llama_weights import Layer, load_layer, rotary, unfold_head


class LlamaSession(Session):
    """Keys and values of every layer, allocated once: [layers, kv_heads, slots, head_dim]."""

    def __init__(self, capacity: int, room: int, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(capacity, room)
        shape = (2, config.num_layers, config.num_kv_heads, self.slots, config.head_dim)
        self.keys, self.values = torch.empty(shape, dtype=dtype, device=device)

    def _move(self, source: np.ndarray, start: int) -> None:
        index = torch.from_numpy(source).to(self.keys.device)
        stop = start + len(source)
        self.keys[:, :, start:stop] = self.keys[:, :, index]
        self.values[:, :, start:stop] = self.values[:, :, index]


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
        self.positions = [session.length + depth for depth in session.pending_depths[before:]]
        hidden = np.where(sees, 0.0, -np.inf)
        self.hidden = None if sees.all() else torch.from_numpy(hidden).to(device)  # [nodes, pending]


class Llama:
    """A Llama-family model. Sessions are independent; `score` is to be called by one thread at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[Layer],
        embedding: Tensor,
        head: Callable[[Tensor], Tensor],
        final_norm: Tensor,
        exact: bool | None = None,
    ) -> None:
        """`exact` None: on where the machine allows it, float32 on a CPU."""
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.device, self.dtype = embedding.device, embedding.dtype
        self._layers, self._embedding, self._head, self._final_norm = layers, embedding, head, final_norm
        self._cis = rotary(config, self.device)  # [positions, 1, head_dim / 2] complex64
        may_be_exact = self.device.type == "cpu" and self.dtype == torch.float32
        self._bucket = self._probe() if may_be_exact and exact is not False else None
        self.exact = self._bucket is not None
        self._attention: list[ExactAttention | FastAttention] = [
            ExactAttention(*layer.bounds) if self.exact else FastAttention(self.dtype) for layer in layers
        ]

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
        head = embedding if config.tie_embeddings else fetch("lm_head.weight")
        return cls(config, layers, embedding, unfold_head(head), fetch("model.norm.weight"), exact)

    def shallow(self, layers: Sequence[int]) -> Llama:
        """A model of these layers alone, sharing their weights: a draft that costs nothing to get."""
        config = replace(self.config, num_layers=len(layers))
        chosen = [self._layers[number] for number in layers]
        return Llama(config, chosen, self._embedding, self._head, self._final_norm, self.exact)

    def open(self, capacity: int, room: int) -> LlamaSession:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        dtype = self._attention[0].dtype
        return LlamaSession(min(capacity, self.max_positions), room, self.config, dtype, self.device)

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
        x = F.embedding(self._padded(tokens), self._embedding)  # [rows, hidden]
        cis = self._cis[self._padded(positions)]
        for number in range(len(self._layers)):
            x = self._forward(number, x, cis, spans)
        rows = row_numbers(forest)
        if not rows:
            return x.new_empty(0, self.vocab_size)
        wanted = x[torch.tensor(rows, device=self.device)]
        wanted = self._norm(self._padded(wanted), self._final_norm)
        return self._apply(self._head, wanted)[: len(rows), : self.vocab_size]

    def _forward(self, number: int, x: Tensor, cis: Tensor, spans: Sequence[_Span]) -> Tensor:
        """One layer: attention and MLP, each added to the residual. [rows, hidden] to [rows, hidden]"""
        layer, attention = self._layers[number], self._attention[number]
        config = self.config
        turned = (config.num_heads + config.num_kv_heads) * config.head_dim
        mixed = self._apply(layer.qkv, self._norm(x, layer.input_norm))
        query_key = mixed[:, :turned].unflatten(1, (-1, config.head_dim // 2, 2))
        query_key = torch.view_as_real(torch.view_as_complex(query_key.float()) * cis).flatten(2).to(x.dtype)
        value = mixed[:, turned:].unflatten(1, (-1, config.head_dim))
        query_key, value = attention.prepare(query_key, value)
        outputs = [self._attend(number, span, query_key, value) for span in spans]
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        x = self._apply(layer.output, self._padded(attended)).add_(x)
        gate, up = self._apply(layer.gate_up, self._norm(x, layer.post_norm)).chunk(2, dim=-1)
        return self._apply(layer.down, F.silu(gate).mul_(up)).add_(x)

    def _attend(self, number: int, span: _Span, query_key: Tensor, value: Tensor) -> Tensor:
        """Stores one session's new keys and values and mixes over what its nodes see. [nodes, heads * head_dim]"""
        heads = self.config.num_heads
        keys, values = span.session.keys[number], span.session.values[number]
        keys[:, span.slots] = query_key[span.rows, heads:].transpose(0, 1)
        values[:, span.slots] = value[span.rows].transpose(0, 1)
        query = query_key[span.rows, :heads]
        return self._attention[number].attend(query, keys[:, : span.seen], values[:, : span.seen], span.hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _padded(self, x: Tensor) -> Tensor:
        """Rows added up to a multiple of the bucket; they are computed and thrown away."""
        missing = -len(x) % (self._bucket or 1)
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x

    def _apply(self, linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The product, in calls of at most as many rows as were probed."""
        if not self.exact or len(x) <= LARGEST:
            return linear(x)
        return torch.cat([linear(piece) for piece in x.split(LARGEST)])

    def _probe(self) -> int | None:
        layer, config = self._layers[0], self.config
        attended = config.num_heads * config.head_dim
        wide = [(layer.qkv, config.hidden_size), (layer.output, attended), (layer.gate_up, config.hidden_size)]
        bucket = row_bucket([*wide, (layer.down, config.intermediate_size)])
        head = row_bucket([(self._head, config.hidden_size)], largest=32)
        return max(bucket, head) if bucket and head else None
