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
    """One layer. `qkv` gives queries (scaled by 1 / sqrt(head_dim)), keys and values side by side; rotation pairs lie
    next to each other. `bounds` [heads + 2 kv_heads, 2]: for any input, the largest norm of each head's queries and
    keys, the largest entry of each value head; the second column is 1 for value heads."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    bounds: Tensor


def load_layer(config: LlamaConfig, number: int, fetch: Fetch) -> Layer:
    """Layer `number` from Hugging Face weight names."""
    prefix = f"model.layers.{number}."
    input_norm = fetch(prefix + "input_layernorm.weight")
    weight, bias = _fused_qkv(config, prefix + "self_attn.", fetch)

    def linear(name: str, has_bias: bool) -> Linear:
        return pack(fetch(f"{prefix}{name}.weight"), fetch(f"{prefix}{name}.bias") if has_bias else None)

    return Layer(
        input_norm=input_norm,
        post_norm=fetch(prefix + "post_attention_layernorm.weight"),
        qkv=pack(weight, bias),
        output=linear("self_attn.o_proj", config.attention_bias),
        gate_up=_joined(config, prefix + "mlp.", fetch),
        down=linear("mlp.down_proj", config.mlp_bias),
        bounds=_bounds(config, weight * input_norm, bias),
    )


def unfold_head(weight: Tensor) -> Linear:
    """The output layer, packed."""
    return pack(weight)


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


def _joined(config: LlamaConfig, prefix: str, fetch: Fetch) -> Linear:
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    bias = torch.cat([fetch(f"{name}.bias") for name in names]) if config.mlp_bias else None
    return pack(torch.cat([fetch(f"{name}.weight") for name in names]), bias)


def _bounds(config: LlamaConfig, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A normed input has norm at most sqrt(hidden), so |w x + b| <= |w| sqrt(hidden) + |b| for every output row."""
    rows = weight.double().norm(dim=1) * math.sqrt(config.hidden_size)  # [outputs]
    if bias is not None:
        rows = rows + bias.double().abs()
    heads = rows.unflatten(0, (-1, config.head_dim)).cpu()  # [heads + 2 kv_heads, head_dim]
    is_value = torch.arange(len(heads)) >= config.num_heads + config.num_kv_heads
    bounds = torch.where(is_value, heads.amax(dim=1), heads.norm(dim=1)) * (1 + 1e-4)
    return torch.stack([bounds, is_value.double()], dim=1)
