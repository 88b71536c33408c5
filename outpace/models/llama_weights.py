"""Lays the weights of a Llama layer out for the runtime: fused, scaled, interleaved for rotation, packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.config import LlamaConfig
from outpace.models.linear import Linear, pack

Fetch = Callable[[str], Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer; its norms' weights and sqrt(hidden) are folded into the products that follow them.

    `qkv` gives queries (scaled by 1 / sqrt(head_dim)), keys and values side by side; rotation pairs lie next to each
    other. `bounds` [heads + 2 kv_heads, 2]: for any input, the largest norm of each head's queries and keys, the
    largest entry of each value head; the second column is 1 for value heads.
    """

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    bounds: Tensor


def load_layer(config: LlamaConfig, number: int, fetch: Fetch) -> Layer:
    """Layer `number` from Hugging Face weight names."""
    prefix = f"model.layers.{number}."
    input_norm, post_norm = (fetch(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention"))
    weight, bias = _fused_qkv(config, prefix + "self_attn.", fetch)
    weight = _folded(config, weight, input_norm)

    def linear(name: str, has_bias: bool) -> Linear:
        return pack(fetch(f"{prefix}{name}.weight"), fetch(f"{prefix}{name}.bias") if has_bias else None)

    return Layer(
        qkv=pack(weight, bias),
        output=linear("self_attn.o_proj", config.attention_bias),
        gate_up=_gate_up(config, prefix + "mlp.", post_norm, fetch),
        down=linear("mlp.down_proj", config.mlp_bias),
        bounds=_bounds(config, weight, bias),
    )


def load_head(config: LlamaConfig, embedding: Tensor, fetch: Fetch) -> Linear:
    """The final norm's weights and the output layer, which may be the embedding."""
    weight = embedding if config.tie_embeddings else fetch("lm_head.weight")
    return pack(_folded(config, weight, fetch("model.norm.weight")))


def _folded(config: LlamaConfig, weight: Tensor, norm: Tensor) -> Tensor:
    """W for an input of norm 1 at most, where the model has W for that input times sqrt(hidden) and `norm`."""
    scale = norm.float() * math.sqrt(config.hidden_size)  # [hidden]
    return (weight.float() * scale).to(weight.dtype)


def rotary(config: LlamaConfig, device: torch.device) -> Tensor:
    """e^(i position frequency) for every position and pair: [positions, head_dim / 2] complex64."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**pairs)
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin()).to(device)


def _fused_qkv(config: LlamaConfig, prefix: str, fetch: Fetch) -> tuple[Tensor, Tensor | None]:
    scale = 1.0 / math.sqrt(config.head_dim)

    def fused(kind: str) -> Tensor:
        query = _interleave(fetch(f"{prefix}q_proj.{kind}"), config.head_dim) * scale
        key = _interleave(fetch(f"{prefix}k_proj.{kind}"), config.head_dim)
        return torch.cat([query, key, fetch(f"{prefix}v_proj.{kind}")])

    return fused("weight"), fused("bias") if config.attention_bias else None


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (i, i + d/2) of every head, which rotate together, become neighbours; dot products are unchanged."""
    split = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, halves, pairs, ...]
    return split.transpose(1, 2).flatten(0, 2)


def _gate_up(config: LlamaConfig, prefix: str, norm: Tensor, fetch: Fetch) -> Linear:
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    bias = torch.cat([fetch(f"{name}.bias") for name in names]) if config.mlp_bias else None
    return pack(_folded(config, torch.cat([fetch(f"{name}.weight") for name in names]), norm), bias)


def _bounds(config: LlamaConfig, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The input has norm 1 at most, so |w x + b| <= |w| + |b| for every output row."""
    rows = weight.double().norm(dim=1)  # [outputs]
    if bias is not None:
        rows = rows + bias.double().abs()
    heads = rows.unflatten(0, (-1, config.head_dim)).cpu()  # [heads + 2 kv_heads, head_dim]
    is_value = torch.arange(len(heads)) >= config.num_heads + config.num_kv_heads
    bounds = torch.where(is_value, heads.amax(dim=1), heads.norm(dim=1)) * (1 + 1e-4)
    return torch.stack([bounds, is_value.double()], dim=1)
