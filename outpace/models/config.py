"""The sizes of a plain Llama model, from a Hugging Face config.json; refuses what this runtime would get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# transformers takes these where a Mistral config.json leaves the field out; Llama's own defaults differ.
MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
LARGEST_SIZE = 2**31 - 1

# Fields that change the arithmetic, with the values under which they change nothing.
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": ({},),
    "compression_config": ({},),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "no_rope_layers": ([],),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama model; sizes count elements, `max_positions` counts tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def from_dict(config: Mapping[str, Any]) -> LlamaConfig:
    """The sizes in a config.json; UserError names the first field that is missing, senseless or not supported."""
    model_type = _model_type(config)
    fields = dict(MISTRAL_DEFAULTS) if model_type == "mistral" else {}
    fields.update(config)
    _refuse_unsupported(fields)
    hidden_size = _size(fields, "hidden_size")
    num_heads = _size(fields, "num_attention_heads")
    num_kv_heads = _size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"num_attention_heads is {num_heads}, it must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    return LlamaConfig(
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(fields, "intermediate_size"),
        num_layers=_size(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6, 1.0),
        rope_theta=_rope_theta(fields),
        max_positions=_size(fields, "max_position_embeddings", 2048),
        tie_embeddings=_flag(fields, "tie_word_embeddings"),
        attention_bias=_flag(fields, "attention_bias"),
        mlp_bias=_flag(fields, "mlp_bias"),
    )


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a checkpoint of this config holds (Hugging Face names, [out, in])."""
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    mlp = {"gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."
        shapes[start + "input_layernorm.weight"] = (hidden,)
        shapes[start + "post_attention_layernorm.weight"] = (hidden,)
        parts = (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias))
        for part, matrices, bias in parts:
            for name, shape in matrices.items():
                shapes[f"{start}{part}.{name}.weight"] = shape
                if bias:
                    shapes[f"{start}{part}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _model_type(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"architectures is {named!r}, it must be a list of names")
    by_architecture = {name: model_type for model_type, name in ARCHITECTURES.items()}
    model_type = config.get("model_type") or by_architecture.get(named[0] if named else "")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"model_type {model_type!r} is not supported, supported are {', '.join(sorted(ARCHITECTURES))}")
    if named and ARCHITECTURES[model_type] not in named:
        raise UserError(f"architectures {named!r} is not supported, supported is {ARCHITECTURES[model_type]}")
    return model_type


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, harmless in REFUSED_UNLESS.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise UserError(f"{name} {value!r} is not supported")
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise UserError(f"layer_types {layer_types!r} is not supported, every layer must be 'full_attention'")
    window = fields.get("sliding_window")
    if window is None or fields.get("use_sliding_window") is False:
        return
    if _size(fields, "sliding_window") < _size(fields, "max_position_embeddings", 2048):
        raise UserError(f"sliding_window {window!r} is not supported, it is shorter than max_position_embeddings")


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """The rotary base: transformers 5 writes it inside rope_parameters, earlier ones beside rope_scaling."""
    found = dict(fields)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise UserError(f"{name} is {rope!r}, it must be an object or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind != "default" or rope.get("partial_rotary_factor") not in (None, 1, 1.0) or not set(rope) <= known:
            raise UserError(f"{name} {dict(rope)!r} is not supported, only the default rotary embedding is")
        if rope.get("rope_theta") is not None:
            found["rope_theta"] = rope["rope_theta"]
    return _number(found, "rope_theta", 10000.0, 1e12)


def _head_dim(fields: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(f"hidden_size is {hidden_size}, it must be a multiple of num_attention_heads {num_heads}")
    head_dim = _size(fields, "head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise UserError(f"head_dim is {head_dim}, it must be even")
    return head_dim


def _size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise UserError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, largest: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise UserError(f"{name} is {value!r}, it must be above 0 and at most {largest:g}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}, it must be true or false")
    return value
