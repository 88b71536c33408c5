"""A Llama forward written for reading, not for speed: float64, one path, every score of every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.models.llama.config import LlamaConfig

TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=512,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)


def random_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a random model by their Hugging Face names, float32."""
    from outpace.models.llama.config import tensor_shapes

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.3 if len(shape) > 1 else 0.1
        tensors[name] = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
    return tensors


def logits(config: LlamaConfig, tensor: Callable[[str], Tensor], tokens: Sequence[int]) -> Tensor:
    """Scores after every token of one text: [tokens, vocab] float64."""

    def get(name: str) -> Tensor:
        return tensor(name).double()

    x = get("model.embed_tokens.weight")[list(tokens)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = x + _attention(config, layer, get, _norm(config, x, get(prefix + "input_layernorm.weight")))
        h = _norm(config, x, get(prefix + "post_attention_layernorm.weight"))
        gate, up = (_linear(config.mlp_bias, get, f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        x = x + _linear(config.mlp_bias, get, prefix + "mlp.down_proj", torch.nn.functional.silu(gate) * up)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _norm(config, x, get("model.norm.weight")) @ get(head).T


def _norm(config: LlamaConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def _linear(has_bias: bool, get: Callable[[str], Tensor], name: str, x: Tensor) -> Tensor:
    product = x @ get(name + ".weight").T
    return product + get(name + ".bias") if has_bias else product


def _attention(config: LlamaConfig, layer: int, get: Callable[[str], Tensor], x: Tensor) -> Tensor:
    prefix = f"model.layers.{layer}.self_attn."
    count, width = len(x), config.head_dim

    def heads(name: str) -> Tensor:
        split = _linear(config.attention_bias, get, f"{prefix}{name}_proj", x).view(count, -1, width)
        if config.head_norm and name != "v":
            split = _norm(config, split, get(f"{prefix}{name}_norm.weight"))
        return split.transpose(0, 1)

    query, key, value = heads("q"), heads("k"), heads("v")
    places = torch.arange(count, dtype=torch.float64)
    if config.rotates(layer):
        frequencies = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        query, key = (_turn(part, torch.outer(places, frequencies).repeat(1, 2)) for part in (query, key))
    groups = config.num_heads // config.num_kv_heads
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (config.window(layer) or count))
    scores = (query @ key.transpose(1, 2) / math.sqrt(width)).masked_fill(hidden, -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    return _linear(config.output_bias, get, prefix + "o_proj", mixed)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
