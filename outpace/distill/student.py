"""A small model of the Llama family that can be trained: plain torch over Hugging Face weight names, packed sequences,
float32 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.gemma import ATTENTION_NORM, MLP_OUTPUT_NORM
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.phi import GATE_UP, QKV
from outpace.models.llama.config.rope import Rotation
from outpace.models.llama.torch.rope_tables import frequencies_of

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Packed:
    """Sequences side by side in rows of one length. A token sees what stands before it in its own sequence."""

    tokens: Tensor  # int64 [rows, length]
    positions: Tensor  # int64 [rows, length], from 0 in every sequence
    sequences: Tensor  # int64 [rows, length], which of the row's sequences a token belongs to
    places: Tensor  # int64 [scored]: flat places whose next token has a loss


class Student:
    """The weights of a draft in training; `ids` are the tokens that it can write, None: all of them."""

    def __init__(
        self, config: LlamaConfig, tensors: Mapping[str, Tensor], frozen: frozenset[str], ids: Tensor | None
    ) -> None:
        """`tensors` float32 by Hugging Face names; those in `frozen` are not trained."""
        self.config, self.ids, self.frozen = config, ids, frozen
        self.tensors = {
            name: value.detach().clone().requires_grad_(name not in frozen) for name, value in tensors.items()
        }
        self._rows: Tensor | None = None  # the output layer's rows, where they are not trained

    @property
    def device(self) -> torch.device:
        return self.tensors[EMBEDDING].device

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that training changes, by name."""
        return {name: value for name, value in self.tensors.items() if value.requires_grad}

    def hidden(self, batch: Packed) -> Tensor:
        """The last layer's output, normed, at the places that have a loss: [scored, hidden]."""
        rows, length = batch.tokens.shape
        config, turn_by = self.config, dict[int | None, tuple[Tensor, Tensor]]()
        for number, rotation in enumerate(config.rotations):
            cos, sin = turns(config.head_dim, rotation, batch.positions.flatten())
            turn_by[number] = (cos.view(rows, length, 1, -1), sin.view(rows, length, 1, -1))
        masks = {window: _mask(batch, window) for window in map(config.window, range(config.num_layers))}
        x = F.embedding(batch.tokens, self.tensors[EMBEDDING])  # [rows, length, hidden]
        x = x if config.embedding_scale == 1.0 else x * config.embedding_scale
        for layer in range(config.num_layers):
            turn, mask = turn_by.get(config.rotation(layer)), masks[config.window(layer)]
            x = self._layer(f"model.layers.{layer}.", x, turn, mask)
        return self._normed(x.flatten(0, 1)[batch.places], NORM)

    def logits(self, batch: Packed) -> Tensor:
        """Scores of the tokens that the draft can write: float32 [scored, ids]."""
        return F.linear(self.hidden(batch), self.head_rows()).float()

    def head_rows(self) -> Tensor:
        """The output layer's rows, of `ids` alone: [ids, hidden]."""
        if self._rows is not None:
            return self._rows
        weight = self.tensors[EMBEDDING if self.config.tie_embeddings else HEAD]
        rows = weight if self.ids is None else weight[self.ids]
        if not weight.requires_grad:
            self._rows = rows
        return rows

    def _layer(self, prefix: str, x: Tensor, turn: tuple[Tensor, Tensor] | None, mask: Tensor) -> Tensor:
        """One layer: [rows, length, hidden] to the same. `turn` None: its queries and keys know no positions."""
        config = self.config
        h = self._normed(x, prefix + "input_layernorm.weight")
        query, key, value = self._query_key_value(prefix, h)
        if config.head_norm:
            query = self._normed(query.float(), prefix + "self_attn.q_norm.weight")
            key = self._normed(key.float(), prefix + "self_attn.k_norm.weight")
        if turn is not None:
            query, key = (_rotated(part.float(), *turn) for part in (query, key))
        query, key = (part.to(value.dtype).transpose(1, 2) for part in (query, key))
        groups = config.num_heads // config.num_kv_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value.transpose(1, 2)))
        mixed = _attended(query, key, value, mask.to(query.dtype), config.attention_scale)
        mixed = self._linear(prefix + "self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        x = self._added(x, mixed, prefix + ATTENTION_NORM)
        h = self._normed(x, f"{prefix}{config.mlp_norm}.weight")
        if config.fused:
            gate, up = self._linear(prefix + GATE_UP, h).chunk(2, dim=-1)
        else:
            gate, up = (self._linear(f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        gate = F.gelu(gate, approximate="tanh") if config.activation == GELU else F.silu(gate)
        return self._added(x, self._linear(prefix + "mlp.down_proj", gate * up), prefix + MLP_OUTPUT_NORM)

    def _query_key_value(self, prefix: str, h: Tensor) -> tuple[Tensor, ...]:
        """[rows, length, heads, d] each."""
        config = self.config
        if config.fused:
            counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            return self._linear(prefix + QKV, h).unflatten(2, (-1, config.head_dim)).split(counts, 2)
        parts = (self._linear(f"{prefix}self_attn.{name}_proj", h) for name in "qkv")
        return tuple(part.unflatten(2, (-1, config.head_dim)) for part in parts)

    def _added(self, x: Tensor, branch: Tensor, norm: str) -> Tensor:
        """The residual and a sublayer's output, which is normed before where the model has norms there."""
        return x + (self._normed(branch.float(), norm + ".weight") if self.config.sandwich_norms else branch)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """RMS norm of every row, by the weights of this name. [..., hidden]"""
        weight, offset = self.tensors[name], self.config.norm_offset
        return F.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention: [rows, heads, length, d], `mask` is added to the scores. On a CPU two products and a softmax
    take half of the time of torch's fused function, forward and backward together."""
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = (query * scale) @ key.transpose(2, 3)
    return (scores.float() + mask).softmax(-1).to(value.dtype) @ value


def _mask(batch: Packed, window: int | None) -> Tensor:
    """0 where a token sees another one, of the last `window` tokens, itself included, or of all; else -inf: [rows, 1,
    length, length]."""
    length, positions = batch.tokens.shape[1], batch.positions
    sees = batch.sequences[:, :, None] == batch.sequences[:, None]
    sees &= torch.ones(length, length, dtype=torch.bool, device=sees.device).tril()
    if window is not None:
        sees &= positions[:, :, None] - positions[:, None] < window
    return torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)[:, None]


def turns(head_dim: int, rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotary embedding, times its scaling's gain, for the entries of a head that turn: [rows] to
    [rows, 1, d / 2] each."""
    alone = rotation._replace(dim=0)
    angles = positions[:, None, None] * frequencies_of(rotation.dim or head_dim, alone).to(positions.device)
    return angles.cos() * alone.gain, angles.sin() * alone.gain


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of what turns of every head against each other, the first entries; cos and sin [..., pairs]."""
    turning, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
