"""Lays the weights of a layer out for the runtime: fused, interleaved for rotation, packed, norms folded in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.llama.config import gemma
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.torch.linear import Linear, Pack, pack

Fetch = Callable[[str], Tensor]


class Normed(NamedTuple):
    """A product whose input is normed first. `norm` [inputs] is the norm's weight times sqrt(inputs).

    In float32 it is folded into the product, and None here; half precisions keep the stored weights as they are,
    because folding would round them once more.
    """

    linear: Linear
    norm: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights. `qkv` gives queries, keys and values side by side; rotation pairs lie next to each other.

    `head_norm` [heads + 2 kv_heads, head_dim]: the weights of queries' and keys' own norms times sqrt(head_dim), 1 for
    values; None where heads are not normed. `bounds` [heads + 2 kv_heads, 2]: for any input, the largest norm of each
    head's queries and keys once they have turned, the largest entry of each value head; the second column is 1 for
    value heads. `output_norm`, `down_norm` [hidden]: the weights times sqrt(hidden) of norms behind attention and MLP.
    """

    qkv: Normed
    output: Linear
    gate_up: Normed
    down: Linear
    head_norm: Tensor | None
    bounds: Tensor
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None


def load_layer(config: LlamaConfig, number: int, fetch: Fetch, pack: Pack = pack) -> LayerWeights:
    """Layer `number` from Hugging Face weight names; `pack` lays its matrices out."""
    prefix = f"model.layers.{number}."
    input_norm, mlp_norm = (_norm(config, fetch, prefix + name) for name in ("input_layernorm", config.mlp_norm))
    weight, bias = _fused_qkv(config, prefix + "self_attn.", fetch)
    head_norm = _head_norm(config, prefix + "self_attn.", fetch) if config.head_norm else None

    def output_norm(name: str) -> Tensor | None:
        return _scaled(_norm(config, fetch, prefix + name)) if config.sandwich_norms else None

    def linear(name: str, has_bias: bool) -> Linear:
        return pack(fetch(f"{prefix}{name}.weight"), fetch(f"{prefix}{name}.bias") if has_bias else None)

    return LayerWeights(
        qkv=_normed(weight, bias, input_norm, pack),
        output=linear("self_attn.o_proj", config.output_bias),
        gate_up=_gate_up(config, prefix + "mlp.", mlp_norm, fetch, pack),
        down=linear("mlp.down_proj", config.mlp_bias),
        head_norm=head_norm,
        bounds=_bounds(config, number, _folded(weight, input_norm), bias, head_norm) * _slack(weight.dtype),
        output_norm=output_norm(gemma.ATTENTION_NORM),
        down_norm=output_norm(gemma.MLP_OUTPUT_NORM),
    )


def load_head(config: LlamaConfig, embedding: Tensor, rows: Tensor | None, fetch: Fetch, pack: Pack = pack) -> Normed:
    """The final norm and the output layer, which may be the embedding; of it only `rows` [kept], if given."""
    weight = embedding if config.tie_embeddings else fetch("lm_head.weight")
    return _normed(weight if rows is None else weight[rows], None, _norm(config, fetch, "model.norm"), pack)


def _norm(config: LlamaConfig, fetch: Fetch, name: str) -> Tensor:
    """A norm's weights; float32 where they are stored less a number."""
    weight = fetch(name + ".weight")
    return weight.float() + config.norm_offset if config.norm_offset else weight


def _normed(weight: Tensor, bias: Tensor | None, norm: Tensor, pack: Pack) -> Normed:
    if weight.dtype == torch.float32:
        return Normed(pack(_folded(weight, norm), bias), None)
    return Normed(pack(weight, bias), _scaled(norm))


def _folded(weight: Tensor, norm: Tensor) -> Tensor:
    """W for an input of norm 1 at most, where the model has W for that input times sqrt(inputs) and `norm`. float32"""
    return weight.float() * _scaled(norm)


def _scaled(norm: Tensor) -> Tensor:
    return norm.float() * math.sqrt(len(norm))


def _fused_qkv(config: LlamaConfig, prefix: str, fetch: Fetch) -> tuple[Tensor, Tensor | None]:
    def fused(kind: str) -> Tensor:
        query, key = (_interleave(fetch(f"{prefix}{name}_proj.{kind}"), config.head_dim) for name in "qk")
        return torch.cat([query, key, fetch(f"{prefix}v_proj.{kind}")])

    return fused("weight"), fused("bias") if config.attention_bias else None


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (i, i + d/2) of every head, which rotate together, become neighbours; dot products are unchanged."""
    split = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, halves, pairs, ...]
    return split.transpose(1, 2).flatten(0, 2)


def _head_norm(config: LlamaConfig, prefix: str, fetch: Fetch) -> Tensor:
    counts = {"q": config.num_heads, "k": config.num_kv_heads}
    rows = [
        _scaled(_interleave(_norm(config, fetch, f"{prefix}{name}_norm"), config.head_dim)).expand(count, -1)
        for name, count in counts.items()
    ]
    return torch.cat([*rows, torch.ones_like(rows[1])])


def _gate_up(config: LlamaConfig, prefix: str, norm: Tensor, fetch: Fetch, pack: Pack) -> Normed:
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    bias = torch.cat([fetch(f"{name}.bias") for name in names]) if config.mlp_bias else None
    return _normed(torch.cat([fetch(f"{name}.weight") for name in names]), bias, norm, pack)


def _bounds(config: LlamaConfig, number: int, weight: Tensor, bias: Tensor | None, head_norm: Tensor | None) -> Tensor:
    """The input has norm 1 at most, so |w x + b| <= |w| + |b| for every output row; a normed head has norm 1 at most
    before its weights."""
    rows = weight.double().norm(dim=1)  # [outputs]
    if bias is not None:
        rows = rows + bias.double().abs()
    heads = rows.unflatten(0, (-1, config.head_dim)).cpu()  # [heads + 2 kv_heads, head_dim]
    lengths = heads.norm(dim=1) if head_norm is None else head_norm.double().abs().amax(dim=1).cpu()
    lengths *= config.gain(number)
    lengths[: config.num_heads] *= config.attention_scale  # which is in the queries' turning
    is_value = torch.arange(len(heads)) >= config.num_heads + config.num_kv_heads
    return torch.stack([torch.where(is_value, heads.amax(dim=1), lengths), is_value.double()], dim=1)


def _slack(dtype: torch.dtype) -> Tensor:
    """What the rounding of inputs and products may add to a bound. [2], for its two columns"""
    return torch.tensor([1.001 + 8 * torch.finfo(dtype).eps, 1.0], dtype=torch.float64)
