"""The Llama family by torch: token trees of many sessions in one forward pass, keys and values stored per session.

In exact mode (the default for float32 and bfloat16 on a CPU), a row's bits depend on its token, prefix and ancestors
only: rows are padded to counts that `linear.find_row_counts` found, everything between the products is row-wise, and
attention is `ExactAttention`. Plain decoding, a tree, a batch and a fresh prefill then give the same text, bit for bit.

Layers with a sliding window read only the last tokens, but a session stores all of them: there is no ring buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, TargetOutput
from outpace.models.base import Capability, Model, Part, ReducedOutput, hidden_row_numbers, row_numbers
from outpace.models.llama.config import gemma4
from outpace.models.llama.config.draft_vocab import checked_ids, num_first_tokens
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.config.recurrence import READ_TOGETHER, USUAL_NODES
from outpace.models.llama.torch.attention import ExactAttention, FastAttention, SessionRows, WindowView, capped
from outpace.models.llama.torch.experts import ROUTER, ExpertWeights
from outpace.models.llama.torch.linear import (
    COUNTS,
    HEAD_COUNTS,
    Linear,
    apply_in_chunks,
    can_pack,
    find_row_counts,
    pad_rows,
)
from outpace.models.llama.torch.recurrent import RecurrentPass, gate, halved_sum, norm_heads, silu
from outpace.models.llama.torch.rope_tables import RopeFactors, RopeTables
from outpace.models.llama.torch.session import KVFormat, LlamaSession
from outpace.models.llama.torch.weights import (
    LayerWeights,
    Normed,
    TokenEmbeddings,
    load_embeddings,
    load_head,
    load_layer,
)
from outpace.models.llama.weight_sources import split_fused
from outpace.models.options import AUTO

if TYPE_CHECKING:
    from typing_extensions import Self

    from outpace.models.llama.torch.reduced_head import ReducedHead


class Llama(Model):
    """A Llama-family model. Sessions are independent; call `score` from one thread at a time."""

    capabilities = frozenset(Capability)
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
        embeddings: TokenEmbeddings | None = None,
    ) -> None:
        """`exact` None: on if the machine supports it. `head_ids` [rows]: the tokens of a reduced output layer's rows;
        all other tokens score -inf. `kv_dtype`: the type of keys and values. `embeddings`: of the tokens for layers."""
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.draft_window, self.num_layers = config.draft_window, config.num_layers
        self.device, self.dtype, self.score_dtype = embedding.device, embedding.dtype, embedding.dtype
        self._layers, self.embedding, self._head, self._head_ids = layers, embedding, head, head_ids
        self._configs = [config.of_layer(layer) for layer in range(config.num_layers)]
        self._embeddings = embeddings
        self._reduced: ReducedHead | None = None  # in place of the output layer in passes
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self._norm_floor = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps), device=self.device)
        self._head_norm_floors = {
            one.head_dim: torch.tensor(math.sqrt(one.head_dim * config.rms_norm_eps), device=self.device)
            for one in self._configs
        }
        self._activation = partial(F.gelu, approximate="tanh") if config.activation == GELU else F.silu
        self._windows = set(map(config.window, range(config.num_layers)))
        self._recurrent_numbers = list(
            itertools.accumulate(map(config.is_recurrent, range(config.num_layers)), initial=0)
        )
        if config.num_recurrent_layers:
            self.capabilities = self.capabilities - {Capability.LENGTH, Capability.MLP_BIAS}
            self.chunk = READ_TOGETHER
        if config.experts or config.scales_layers:
            self.capabilities = self.capabilities - {Capability.MLP_BIAS}
        if config.scales_layers:  # and may share keys: a layer is whole
            self.capabilities = self.capabilities - {Capability.SKIP_SUBLAYERS}
        if config.embedding_width:  # of tokens
            self.capabilities = self.capabilities - {Capability.INPUTS}
        self._distinct: list[Tensor] = []  # numbers of experts that layers applied in the last pass
        self.row_counts = self._head_counts = ()  # type: tuple[int, ...]
        if exact is not False:
            self.row_counts, self._head_counts = self._probe()
        self.exact = bool(self.row_counts)
        self._wide = torch.float64 if self.exact else torch.float32  # of activations outside the MLPs
        if exact and not self.exact:
            raise UserError(f"exact mode is not available for {self.dtype} on {self.device}, {self.exact_where}")
        self._attention: list[ExactAttention | FastAttention] = [
            ExactAttention(layer.bounds, self.device, layer.sinks, config.score_cap)
            if self.exact
            else FastAttention(self.dtype, layer.sinks, config.score_cap)
            for layer in layers
        ]
        self._rope = RopeTables(config, self._attention[0].factor_dtype, self.device)
        self.kv_dtype, own = kv_dtype, self._attention[0].dtype
        self._kv_format = KVFormat(kv_dtype, own, config.head_dim)
        self._kv_formats = [KVFormat(kv_dtype, own, one.head_dim) for one in self._configs]
        self._skipped: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # attention, MLP

    @property
    def distinct_experts(self) -> float:
        return float(torch.stack(self._distinct).float().mean()) if self._distinct else 0.0

    @property
    def token_bytes(self) -> int:
        layers = self.config.stored_layers
        entries = sum(self._configs[layer].num_kv_heads * self._kv_formats[layer].width for layer in layers)
        return 2 * entries * self._kv_format.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        return self.config.state_bytes

    def session_bytes(self, slots: int) -> int:
        sizes = self.config.recurrence
        stash = 4 * USUAL_NODES * sizes.stash_size * self.config.num_recurrent_layers if sizes else 0
        return super().session_bytes(slots) + stash

    @property
    def weight_bytes(self) -> int:
        shapes = tensor_shapes(self.config)
        if not self.config.tie_embeddings:
            del shapes["model.embed_tokens.weight"]  # a pass reads only some of its rows
        shapes.pop(gemma4.TABLE, None)  # as of this
        experts = self.config.experts
        share = experts.chosen / experts.count if experts else 1.0  # a row reads the chosen ones
        total = sum(math.prod(shape) * (share if ".experts." in name else 1) for name, shape in shapes.items())
        missing = self.config.vocab_size - self._reduced.num_rows if self._reduced else 0
        return int(total - missing * self.config.hidden_size) * self.dtype.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of the output layer."""
        return self.config.vocab_size * self.config.hidden_size * self.dtype.itemsize

    @property
    def reduced_output(self) -> ReducedOutput | None:
        if self._reduced is None:
            return None
        kept, row_bytes = self._reduced.kept, self.config.hidden_size * self.dtype.itemsize
        count = int(np.searchsorted(kept.kept.ids, self.vocab_size))
        share = self._reduced.num_rows * row_bytes / self.weight_bytes
        return ReducedOutput(kept.first, count - kept.first, self.vocab_size, share)

    def reduce_output(self, tokens: int | None) -> None:
        outputs, ids = self.config.vocab_size, self._head_ids
        share = outputs * self.config.hidden_size * self.dtype.itemsize / self.weight_bytes
        first = num_first_tokens(tokens, outputs, None if ids is None else len(ids), share)
        if first is not None:
            from outpace.models.llama.torch.reduced_head import ReducedHead

            self._reduced = ReducedHead(self._head.linear, first, outputs)

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
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> Self:
        """Build a model layer by layer from `tensor(name)`, which takes Hugging Face weight names.

        `head_ids` int64 [rows]: keep only these tokens' rows of the output layer; all other tokens score -inf.
        """
        kept = None if head_ids is None else torch.from_numpy(checked_ids(head_ids, config.vocab_size)).to(device)
        tensor = split_fused(config, tensor)

        def fetch(name: str) -> Tensor:
            return tensor(name).to(device=device, dtype=torch.float32 if ROUTER in name else dtype)

        layers = []
        for number in range(config.num_layers):
            layers.append(load_layer(config, number, fetch))
            progress("loading", (number + 1) / config.num_layers)
        embedding = fetch("model.embed_tokens.weight")
        head = load_head(config, embedding, kept, fetch)
        options = {"embeddings": load_embeddings(config, fetch, tensor)} if config.embedding_width else {}
        return cls(config, layers, embedding, head, exact, kept, kv_dtype, **options)

    def open(self, capacity: int, max_pending: int) -> LlamaSession:
        capacity = min(capacity, self.max_positions)
        self._rope.grow_to(min(capacity + max_pending, self.max_positions))
        return LlamaSession(capacity, max_pending, self.config, self._kv_formats, self.device, self.exact)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self._embed(to_device(tokens, np.int64, self.device))

    def limit_window(self, tokens: int) -> None:
        windows = [min(self.config.window(layer) or tokens, tokens) for layer in range(self.num_layers)]
        self.config, self._windows = replace(self.config, windows=tuple(windows)), {*windows}

    @torch.inference_mode()
    def store_inputs(self, parts: Sequence[Part], products: Sequence[Normed]) -> None:
        """Store the keys and values of the parts' inputs in every layer, and compute nothing else.

        `products`: those of `load_keys_and_values`, one for each layer.
        """
        first = self.config.num_heads
        for part in parts:
            rows = SessionRows(part, 0, self.max_positions - 1, (), self.device)
            factors = self._rope(to_device(rows.positions, np.int64, self.device))
            inputs = rows.inputs.to(self.device, self.dtype)
            for number, product in enumerate(products):
                both, norm = self._apply_normed(product, inputs), self._layers[number].head_norm
                both = both if norm is None else self._norm_heads(number, both, norm[first:])
                turns = factors[self.config.rotation(number)][:, first:]
                self._store(number, rows, self._attention[number].prepare(both, turns))

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        other = copy(self)
        other._skipped = (self._skipped[0].union(attention), self._skipped[1].union(mlp))
        return other

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> SparseLogits:
        return SparseLogits(self._all_logits(hidden), None, self.vocab_size)

    @torch.inference_mode()
    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Return logits, and hidden states in the model's dtype: [layers, hidden rows, hidden]"""
        self._keep_read(forest)
        self._distinct = []
        sessions: list[SessionRows] = []
        for part in forest:
            first = sessions[-1].rows.stop if sessions else 0
            sessions.append(SessionRows(part, first, self.max_positions - 1, self._windows, self.device))
        tokens = to_device([token for part in forest for token in part.tokens], np.int64, self.device)
        positions = to_device([position for rows in sessions for position in rows.positions], np.int64, self.device)
        padded = pad_rows(tokens, self.row_counts)
        x = self._embed(padded)
        factors = self._rope(pad_rows(positions, self.row_counts))
        for rows in sessions:
            if rows.inputs is not None:
                x[rows.rows] = rows.inputs.to(x)
        embedded = None if self._embeddings is None else self._join_embeddings(self._embeddings, padded, x)
        shown = to_device(hidden_row_numbers(forest), np.int64, self.device) if layers else None
        hidden, config = {}, self.config
        walk = RecurrentPass(config.recurrence, sessions, self.device, self.exact) if config.recurrence else None
        for number in range(len(self._layers) + 1):
            if shown is not None and number in layers:
                hidden[number] = x[shown]
            if number < len(self._layers) and walk is not None and config.is_recurrent(number):
                x = self._recurrent_layer(number, x, walk, sessions)
            elif number < len(self._layers):
                x = self._layer(number, x, factors, sessions)
                x = self._end_layer(self._layers[number], x, None if embedded is None else embedded[:, number])
        logits = self._logits(x[to_device(row_numbers(forest), np.int64, self.device)])
        return TargetOutput(logits, torch.stack([hidden[layer] for layer in layers]) if layers else None)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input: [rows, hidden]"""
        x = F.embedding(tokens, self.embedding)
        x = x if self.config.embedding_scale == 1.0 else x.mul_(self._embedding_scale)
        if not self.config.takes_features:
            return x
        self._embedded = x  # for the first layer, whose residual starts from the inputs in place of these zeros
        return torch.zeros_like(x)

    def _layer(self, number: int, x: Tensor, factors: RopeFactors, sessions: Sequence[SessionRows]) -> Tensor:
        """Apply one layer: attention and MLP, each added to the residual. [rows, hidden] to [rows, hidden]"""
        if number not in self._skipped[0]:
            product = self._qkv_product(number, x)
            qkv = self._heads(number, product, factors)
            attended = x.new_zeros(len(x), self.config.num_heads * self._configs[number].head_dim)
            for rows in sessions:
                self._attend(number, rows, qkv[rows.rows], attended[rows.rows])
            if self.config.output_gate:
                attended = gate(attended, product[:, -attended.shape[1] :])
            x = self._add_attention(number, attended, x)
        return x if number in self._skipped[1] else self._mlp(number, x, sessions)

    def _join_embeddings(self, embeddings: TokenEmbeddings, tokens: Tensor, x: Tensor) -> Tensor:
        """Compute the tokens' embeddings for all layers from the first state: [rows, layers, width]"""
        width = len(embeddings.norm)
        product = self._apply(embeddings.projection, x).unflatten(1, (-1, width)).to(self._wide) * x.shape[1] ** -0.5
        squares = halved_sum(product.square(), -1)[..., None]
        normed = product * (squares + width * self.config.rms_norm_eps).rsqrt() * embeddings.norm
        return ((normed + embeddings.rows(tokens) * math.sqrt(width)) * math.sqrt(0.5)).to(x.dtype)

    def _end_layer(self, layer: LayerWeights, x: Tensor, embedded: Tensor | None) -> Tensor:
        """Add the layer's own embeddings of the tokens, [rows, width], and scale the state."""
        if layer.embedding is not None and embedded is not None:
            inner = self._activation(self._apply(layer.embedding.gate, x).to(self._wide)) * embedded
            x = self._add(layer.embedding.output, layer.embedding.norm, inner.to(x.dtype), x)
        return x if layer.scale is None else x * layer.scale

    def _recurrent_layer(self, number: int, x: Tensor, walk: RecurrentPass, sessions: Sequence[SessionRows]) -> Tensor:
        """Apply a layer with a recurrent state, and its MLP: [rows, hidden] to [rows, hidden]"""
        if number not in self._skipped[0]:
            count, place, weights = walk.num_rows, self._recurrent_numbers[number], self._layers[number].recurrent
            assert weights is not None
            inputs = self._qkv_product(number, x)[:count].float()
            if walk.sizes.is_delta_net:
                width = walk.sizes.value_width
                out = norm_heads(walk.delta_net(place, inputs[:, :-width], weights), weights, self.config.rms_norm_eps)
                out = out.flatten(1) * silu(inputs[:, -width:])
            else:
                out = walk.convolution(place, inputs, weights)
            x = self._add_attention(number, F.pad(out, (0, 0, 0, len(x) - count)).to(x.dtype), x)
        return x if number in self._skipped[1] else self._mlp(number, x, sessions)

    def _add_attention(self, number: int, attended: Tensor, x: Tensor) -> Tensor:
        """Add the output projection of a layer's heads, [rows, heads * head_dim], to the residual."""
        return self._add(self._layers[number].output, self._layers[number].output_norm, attended, x)

    def _add(self, linear: Linear, norm: Tensor | None, inner: Tensor, x: Tensor) -> Tensor:
        """Add a product to the residual, after its own norm if there is one."""
        return self._apply(linear, inner, x) if norm is None else x + self._norm(self._apply(linear, inner), norm)

    def _qkv(self, number: int, x: Tensor, factors: RopeFactors) -> Tensor:
        """Compute a layer's queries, keys and values, normed and rotated: [rows, heads + 2 kv_heads, head_dim]"""
        return self._heads(number, self._qkv_product(number, x), factors)

    def _heads(self, number: int, product: Tensor, factors: RopeFactors) -> Tensor:
        """Norm and rotate the heads of a layer's input product, which may have gates after them."""
        layer, config = self._layers[number], self._configs[number]
        heads = config.num_heads + (2 * config.num_kv_heads if config.stores(number) else 0)
        qkv = product[:, : heads * config.head_dim]
        qkv = qkv if layer.head_norm is None else self._norm_heads(number, qkv, layer.head_norm)
        return self._attention[number].prepare(qkv, factors[self.config.rotation(number)][:, :heads])

    def _qkv_product(self, number: int, x: Tensor) -> Tensor:
        layer, config = self._layers[number].qkv, self.config
        if number or (config.norms_features and not config.takes_features):
            return self._apply_normed(layer, x)
        if not config.takes_features:
            return self._apply(layer.linear, x)
        both = torch.cat([self._norm(self._embedded, None), self._norm(x, None) if config.norms_features else x], -1)
        return self._apply(layer.linear, both if layer.norm is None else (both * layer.norm).to(x.dtype))

    def _mlp(self, number: int, x: Tensor, sessions: Sequence[SessionRows] = ()) -> Tensor:
        layer = self._layers[number]
        if layer.experts is not None:
            return self._mix_experts(layer, layer.experts, x, sessions[-1].rows.stop)
        assert layer.down is not None
        gate, up = self._apply_normed(layer.gate_up, x).chunk(2, dim=-1)
        for rows in sessions:
            if rows.mlp_bias is not None:
                up[rows.rows] += rows.mlp_bias[..., number, :].to(up)
        return self._add(layer.down, layer.down_norm, self._activation(gate).mul_(up), x)

    def _mix_experts(self, layer: LayerWeights, experts: ExpertWeights, x: Tensor, count: int) -> Tensor:
        """Add the mixture of experts of the first `count` rows, those without padding, to the residual."""
        wide = self._wide
        logits, normed = self._apply_normed(layer.gate_up, x.float()), self._norm(x, experts.norm)
        total, ids = experts.apply(logits[:count], normed, self.row_counts, wide)
        self._distinct.append((ids.flatten().sort().values.diff() != 0).sum() + 1)
        total = experts.add_shared(total, normed, self.row_counts, wide)
        total = F.pad(total, (0, 0, 0, len(x) - count)).to(x.dtype)
        if (beside := layer.beside) is not None and layer.down_norm is not None:
            gate, up = self._apply_normed(beside.gate_up, x).chunk(2, dim=-1)
            dense = self._norm(self._apply(beside.down, self._activation(gate).mul_(up)), beside.mlp_norm)
            total = self._norm(dense + self._norm(total, beside.experts_norm), layer.down_norm)
        return x + total

    def _attend(self, number: int, rows: SessionRows, qkv: Tensor, out: Tensor) -> None:
        """Store one session's new keys and values, and write the attention of its nodes to `out`."""
        heads, view, source = self.config.num_heads, self._view(number, rows), self.config.kv_layer(number)
        kv = self._store(number, rows, qkv[:, heads:]) if source == number else rows.session.kv[source]
        keys, values = self._decode(source, kv[:, :, view.first : rows.used])
        self._attention[number].attend(qkv[:, :heads], keys, values, view.mask, out)

    def _store(self, number: int, rows: SessionRows, new: Tensor) -> Tensor:
        """Store keys and values of new nodes [rows, 2 kv_heads, head_dim] in one layer, and return all of its slots."""
        kv = rows.session.kv[number]  # [2, kv_heads, slots, width]
        kv[:, :, rows.slots] = self._encode(number, new.unflatten(1, (2, -1)).permute(1, 2, 0, 3))
        return kv

    def _view(self, number: int, rows: SessionRows) -> WindowView:
        """Return what a session's rows see in a layer."""
        view, count = rows.views[self.config.window(number)], rows.rows.stop - rows.rows.start
        if not self.config.is_causal(number):
            return view
        later = torch.full((count, count), -torch.inf, dtype=torch.float64, device=self.device).triu(1)
        mask = later.new_zeros(count, count) if view.mask is None else view.mask.clone()
        mask[:, -count:] += later
        return view._replace(mask=mask)

    def _encode(self, number: int, new: Tensor) -> Tensor:
        return self._kv_formats[number].encode(new)

    def _decode(self, number: int, stored: Tensor) -> Tensor:
        """Decode a layer's keys and values [2, .., kv_heads, slots, width]; in exact mode they are on their grids."""
        decoded = self._kv_formats[number].decode(stored)
        return decoded if self._kv_format.is_own else self._attention[number].round_stored(decoded)

    def _keep_read(self, forest: Sequence[Part]) -> None:
        """Add the tokens of a pass to a reduced output layer."""
        if self._reduced is not None:
            self._reduced.read([token for part in forest for token in part.tokens])

    def _logits(self, x: Tensor) -> Tensor:
        """Compute the logits of a pass from the last layer's rows: [rows, vocab]"""
        if self._reduced is None:
            return self._all_logits(x)
        return self._logits_by(self._reduced.linear, self._reduced.ids, x)

    def _all_logits(self, x: Tensor) -> Tensor:
        """Compute logits with the whole output layer."""
        return self._logits_by(self._head.linear, self._head_ids, x)

    def _logits_by(self, linear: Linear, ids: Tensor | None, x: Tensor) -> Tensor:
        """Compute logits by an output layer whose rows are these tokens; one with the vocabulary's size is of none."""
        if not len(x):
            return self._no_logits()
        logits = self._head_product(linear, self._norm_output(pad_rows(x, self._head_counts)))[: len(x)]
        if self.config.logit_cap:
            logits = capped(logits.double(), self.config.logit_cap).to(logits.dtype)
        if ids is not None:
            wide = logits.new_full((len(x), self.config.vocab_size + 1), -math.inf)
            logits = wide.scatter_(1, ids.expand(len(x), -1), logits)
        return logits[:, : self.vocab_size]

    def _norm_output(self, x: Tensor) -> Tensor:
        """Apply the final norm, if there is one."""
        return self._norm(x, self._head.norm) if self.config.norms_output else x

    def _no_logits(self) -> Tensor:
        return self.embedding.new_empty(0, self.vocab_size, dtype=self.score_dtype)

    def _head_product(self, linear: Linear, normed: Tensor) -> Tensor:
        """Apply an output layer: [rows, its tokens]"""
        return apply_in_chunks(linear, normed, None, self._head_counts)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Divide x by sqrt(sum of squares + hidden * eps) and multiply by `weight`, which includes sqrt(hidden).

        None: both are folded into the next product.
        """
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [rows, 1]
        normed = x / torch.hypot(norm, self._norm_floor)
        return normed if weight is None else (normed * weight).to(x.dtype)

    def _norm_heads(self, number: int, qkv: Tensor, weight: Tensor) -> Tensor:
        """Norm queries and keys, and values if these are normed, head by head. [rows, (heads + 2 kv_heads) *
        head_dim]"""
        config = self._configs[number]
        heads = qkv.unflatten(1, (-1, config.head_dim))
        norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=torch.float32)  # [rows, heads.., 1]
        divisor = torch.hypot(norm, self._head_norm_floors[config.head_dim])
        if config.joint_norm:
            for heads_of in (slice(config.num_heads), slice(config.num_heads, config.num_heads + config.num_kv_heads)):
                divisor[:, heads_of] = halved_sum(divisor[:, heads_of].square(), 1).sqrt()[:, None]
        if not config.norms_values:
            divisor[:, -config.num_kv_heads :].fill_(1)  # not `= 1`, which a capture takes for a copy from the host
        return (heads / divisor * weight).flatten(1).to(qkv.dtype)

    def _apply_normed(self, normed: Normed, x: Tensor) -> Tensor:
        return self._apply(normed.linear, self._norm(x, normed.norm))

    def _apply(self, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return apply_in_chunks(linear, x, residual, self.row_counts)

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find row counts for the layers and for the output layer; both are empty if exact mode is not available."""
        if not can_pack(self.device, self.dtype):
            return (), ()
        hidden = self.config.hidden_size
        counts = find_row_counts(self._linears(), COUNTS, self.dtype)
        head = find_row_counts([(self._head.linear, hidden)], HEAD_COUNTS, self.dtype)
        return (counts, head) if counts and head else ((), ())

    def _linears(self) -> list[tuple[Linear, int]]:
        """Return a layer's products as a pass calls them, with their input widths: of the first layer of each kind."""
        layers = range(self.config.num_layers)
        config = self.config
        kinds = [(config.is_recurrent(n), config.has_experts(n), config.stores(n), self._configs[n]) for n in layers]
        return [one for kind in {*kinds} for one in self._linears_of(kinds.index(kind))]

    def _linears_of(self, number: int) -> list[tuple[Linear, int]]:
        layer, hidden, config = self._layers[number], self.config.hidden_size, self._configs[number]

        def with_residual(linear: Linear) -> Linear:
            """Add to a residual: that is another kernel on a CPU."""
            return lambda x, residual=None: linear(x, x.new_ones(len(x), hidden))

        sizes, mixed = config.recurrence, config.num_heads * config.head_dim
        if sizes and config.is_recurrent(number):
            mixed = sizes.value_width or sizes.channels
        gate_up, wide = layer.gate_up.linear, [(layer.output, mixed)]
        if layer.down is not None:
            wide.append((layer.down, config.intermediate_size))
        if layer.beside is not None:
            wide += [(layer.beside.gate_up.linear, hidden), (layer.beside.down, config.intermediate_size)]
        if layer.embedding is not None and self._embeddings is not None:
            wide += [(layer.embedding.gate, hidden), (layer.embedding.output, config.embedding_width)]
            wide.append((self._embeddings.projection, hidden))
        if not config.sandwich_norms:
            wide = [(with_residual(linear), inputs) for linear, inputs in wide]
        if layer.experts is not None:
            return [
                (layer.qkv.linear, hidden),
                (lambda x, residual=None: gate_up(x.float()), hidden),
                *wide,
                *layer.experts.linears(hidden),
            ]
        return [(layer.qkv.linear, hidden), (gate_up, hidden), *wide]
