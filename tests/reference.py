"""A Llama forward written for reading, not for speed: float64, one path, every score of every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.config.rope import LongScaling

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
GEMMA = replace(
    TINY,
    head_norm=True,
    num_layers=4,
    windows=(7, None, 7, 19),
    local_layers=(True, False, True, True),
    local_theta=100.0,
    activation=GELU,
    query_scale=0.3,
    sandwich_norms=True,
    norm_offset=1.0,
    embedding_scale=7.0,
)

GEMMA2 = replace(
    GEMMA, head_norm=False, windows=(7, None, 7, None), local_layers=(), local_theta=0.0, score_cap=2.0, logit_cap=5.0
)
PHI = replace(
    TINY,
    head_dim=14,
    windows=(11, 11, 11),
    fused=True,
    rotary_dim=6,
    rope_scaling=LongScaling((1.0, 1.7, 2.5), 512, 1.2),
)

KIND = ["sliding_attention", "sliding_attention", "full_attention"]
SMALL: dict[str, Any] = {  # Gemma 4's kinds by what they add
    **{"model_type": "gemma4_text", "vocab_size": 131, "hidden_size": 80, "intermediate_size": 70},
    **{"num_hidden_layers": 6, "layer_types": 2 * KIND, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 22, "global_head_dim": 36, "max_position_embeddings": 512, "sliding_window": 7},
    **{"final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0},
}
JOINED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4 = {
    "gemma4_e": {"hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_large": JOINED,
    "gemma4_experts": JOINED
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
}
GEMMA4_CONFIGS = {name: from_dict(SMALL | changes) for name, changes in GEMMA4.items()}


def random_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a random model by their Hugging Face names, float32; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.3 if len(shape) > 1 else 0.1
        middle = 1.0 - config.norm_offset if "norm" in name or (len(shape) == 1 and "scal" in name) else 0.0
        tensors[name] = torch.randn(shape, generator=generator) * scale + middle
    return tensors


def logits(config: LlamaConfig, tensor: Callable[[str], Tensor], tokens: Sequence[int]) -> Tensor:
    """Scores after every token of one text: [tokens, vocab] float64."""

    def get(name: str) -> Tensor:
        return tensor(name).double()

    x = get("model.embed_tokens.weight")[list(tokens)] * config.embedding_scale
    gated = torch.nn.functional.silu if config.activation == "silu" else _gelu

    def added(name: str, part: Tensor) -> Tensor:
        """What is added to the residual: normed before where such a norm is there."""
        return _norm(config, part, get(f"{name}.weight")) if config.sandwich_norms else part

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        mixed = _attention(config, layer, get, _norm(config, x, get(prefix + "input_layernorm.weight")))
        x = x + added(prefix + "post_attention_layernorm", mixed)
        h = _norm(config, x, get(f"{prefix}{config.mlp_norm}.weight"))
        if config.fused:
            gate, up = _linear(False, get, prefix + "mlp.gate_up_proj", h).chunk(2, dim=-1)
        else:
            gate, up = (_linear(config.mlp_bias, get, f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        fed = _linear(config.mlp_bias, get, prefix + "mlp.down_proj", gated(gate) * up)
        x = x + added(prefix + "post_feedforward_layernorm", fed)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _capped(_norm(config, x, get("model.norm.weight")) @ get(head).T, config.logit_cap)


def _norm(config: LlamaConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * (weight + config.norm_offset)


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _linear(has_bias: bool, get: Callable[[str], Tensor], name: str, x: Tensor) -> Tensor:
    product = x @ get(name + ".weight").T
    return product + get(name + ".bias") if has_bias else product


def _attention(config: LlamaConfig, layer: int, get: Callable[[str], Tensor], x: Tensor) -> Tensor:
    prefix = f"model.layers.{layer}.self_attn."
    count, width = len(x), config.head_dim

    def heads(name: str) -> Tensor:
        if config.fused:
            sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
            together = _linear(False, get, prefix + "qkv_proj", x).view(count, -1, width)
            return together.split(list(sizes.values()), 1)["qkv".index(name)].transpose(0, 1)
        split = _linear(config.attention_bias, get, f"{prefix}{name}_proj", x).view(count, -1, width)
        if config.head_norm and name != "v":
            split = _norm(config, split, get(f"{prefix}{name}_norm.weight"))
        return split.transpose(0, 1)

    query, key, value = heads("q"), heads("k"), heads("v")
    places = torch.arange(count, dtype=torch.float64)
    rotation = config.rotation(layer)
    if rotation is not None:
        turning, scaling = config.rotary_dim or width, config.rotations[rotation].scaling
        frequencies = config.rotations[rotation].theta ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
        if isinstance(scaling, LongScaling):
            frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float64)
        angles, gain = torch.outer(places, frequencies).repeat(1, 2), scaling.gain if scaling else 1.0
        query, key = (
            torch.cat([gain * _turn(part[..., :turning], angles), part[..., turning:]], -1) for part in (query, key)
        )
    groups = config.num_heads // config.num_kv_heads
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (config.window(layer) or count))
    scores = _capped(query @ key.transpose(1, 2) * config.attention_scale, config.score_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    return _linear(config.output_bias, get, prefix + "o_proj", mixed)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
