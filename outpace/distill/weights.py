"""The target's weights as the writer wants them: fused, in one type, laid out anew for many rows on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config import LlamaConfig, from_dict, tensor_shapes

Linear = Callable[[Tensor], Tensor]


PLAIN = {"output_bias": False, "head_norm": False, "rope_scaling": None, "windows": (), "rotary_layers": ()}


def plain_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The sizes of a plain Llama whose tensors are there with these shapes; UserError for any other kind of model."""
    config = from_dict(checkpoint.config)
    for name, plain in PLAIN.items():
        if getattr(config, name, plain) != plain:
            raise UserError(f"{checkpoint.path} cannot be distilled: {name.replace('_', ' ')} is not supported there")
    checkpoint.check_shapes(tensor_shapes(config))
    return config


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of every row. [..., hidden]"""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@dataclass(frozen=True)
class WriterLayer:
    """One layer; rows stay in float32 between the products."""

    config: LlamaConfig
    dtype: torch.dtype
    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear

    def project(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (over sqrt(d)), keys, values: [rows, hidden] to [rows, heads or kv_heads, d] each."""
        config = self.config
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        mixed = self.qkv(normed(x, self.input_norm, config.rms_norm_eps).to(self.dtype)).unflatten(1, (-1, width))
        turned = rotated(mixed[:, : heads + groups].float(), *turn)
        query = (turned[:, :heads] / math.sqrt(width)).to(self.dtype)
        return query, turned[:, heads:].to(self.dtype), mixed[:, heads + groups :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output projection and the MLP, each added to the residual. x [rows, hidden] float32"""
        x = x + self.output(attended)
        gate, up = self.gate_up(normed(x, self.post_norm, self.config.rms_norm_eps).to(self.dtype)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True)
class Weights:
    """A target for the writer. `embedding` and `rows` (the output layer's) are float32, products run in `dtype`."""

    config: LlamaConfig
    dtype: torch.dtype
    device: torch.device
    layers: tuple[WriterLayer, ...]
    embedding: Tensor  # [vocab, hidden]
    rows: Tensor  # [vocab, hidden]
    head: Linear
    norm: Tensor

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for every row: [rows, 1, d / 2] each."""
        return turns(self.config, positions)


def turns(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding: [rows] to [rows, 1, d / 2] each."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions[:, None, None] * (1.0 / config.rope_theta**pairs)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of every head against each other: [..., d], with cos and sin [..., d / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def load_weights(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Reads a model folder."""
    with Checkpoint.open(folder) as checkpoint:
        config = plain_config(checkpoint)

        def fetch(name: str) -> Tensor:
            return checkpoint.tensor(name).to(device=device, dtype=torch.float32)

        layers = tuple(_load_layer(config, number, fetch, dtype) for number in range(config.num_layers))
        embedding = fetch("model.embed_tokens.weight")
        rows = embedding if config.tie_embeddings else fetch("lm_head.weight")
        norm = fetch("model.norm.weight")
    return Weights(config, dtype, embedding.device, layers, embedding, rows, _linear(rows, None, dtype), norm)


def _load_layer(config: LlamaConfig, number: int, fetch: Callable[[str], Tensor], dtype: torch.dtype) -> WriterLayer:
    prefix = f"model.layers.{number}."

    def linear(part: str, *names: str) -> Linear:
        has_bias = config.attention_bias if part == "self_attn" else config.mlp_bias
        weight = torch.cat([fetch(f"{prefix}{part}.{name}_proj.weight") for name in names])
        bias = torch.cat([fetch(f"{prefix}{part}.{name}_proj.bias") for name in names]) if has_bias else None
        return _linear(weight, bias, dtype)

    return WriterLayer(
        config,
        dtype,
        fetch(f"{prefix}input_layernorm.weight"),
        fetch(f"{prefix}post_attention_layernorm.weight"),
        linear("self_attn", "q", "k", "v"),
        linear("self_attn", "o"),
        linear("mlp", "gate", "up"),
        linear("mlp", "down"),
    )


def _linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """x [rows, inputs] to x W^T + b [rows, outputs]."""
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return partial(_stock, weight, bias)
    return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight, 128), bias)


def _stock(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _packed(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
