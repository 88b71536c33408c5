"""Translates a GGUF file's model metadata to Hugging Face terms: config.json's fields and tensor names.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's constants. llama.cpp stores query and key
rows of `llama` and `smollm3` with rotary pairs interleaved, those of other architectures unchanged, and Gemma's norm
weights plus one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.gguf.header import GgufHeader
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.llama.config import gemma, phi
from outpace.models.llama.config import llama_config as sizes
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.fields import FULL, SLIDING

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of LongRoPE
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
LONG = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
LLAMA3_CONTEXT = 8192  # context length in the pre-training of every Llama 3


def shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal with the same float32 value: GGUF stores 1e-5 as 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_scaling(header: GgufHeader, own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary embedding's scaling as in config.json; None if there is none."""
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    trained = own.get("rope.scaling.original_context_length")
    if SHORT_FACTORS in header.tensors:
        return _long_scaling(header, own, trained)
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, settings, trained)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn"):
        shown = f"rope.scaling.type {kind!r:.50} with rope.scaling.factor {factor!r:.50}"
        raise UserError(f"{header.path}: {shown} is not supported, allowed are linear, yarn and none")
    scaling = {"rope_type": kind, "factor": shortest_decimal(factor)}
    return scaling | ({"original_max_position_embeddings": trained} if trained and kind == "yarn" else {})


def _long_scaling(header: GgufHeader, own: Mapping[str, Any], trained: Any) -> dict[str, Any]:
    """Return LongRoPE's scaling: a factor for each rotary pair, and the original context length."""
    factors = {name: _divisors(header, tensor) for name, tensor in LONG.items() if tensor in header.tensors}
    gain = shortest_decimal(own.get("rope.scaling.attn_factor"))
    optional = {"original_max_position_embeddings": trained, "attention_factor": gain}
    return {
        "rope_type": "longrope",
        **factors,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _divisors(header: GgufHeader, name: str) -> list[float]:
    """Read a tensor of float32 divisors of frequencies."""
    entry = header.tensors[name]
    if entry.kind != 0 or len(entry.shape) != 1:
        raise UserError(f"{header.path}: tensor {name!r} is not a list of float32 divisors")
    return [shortest_decimal(value) for value in np.frombuffer(header.raw(name), np.float32).tolist()]


def _llama3_scaling(header: GgufHeader, settings: Mapping[str, Any], trained: Any) -> dict[str, Any] | None:
    """Recover Llama 3's four scaling parameters from one divisor per frequency."""
    entry, theta = header.tensors[ROPE_FACTORS], settings["rope_theta"]
    data = np.frombuffer(header.raw(ROPE_FACTORS), np.uint8)
    if entry.kind != 0 or len(entry.shape) != 1 or not isinstance(theta, float) or not theta > 1:
        raise UserError(f"{header.path}: tensor {ROPE_FACTORS!r} is not a list of float32 divisors")
    divisors = data.view(np.float32).astype(np.float64)  # [head_dim / 2]
    if not np.isfinite(divisors).all() or divisors.min() < 1 - 1e-6:
        raise UserError(f"{header.path} is damaged: tensor {ROPE_FACTORS!r} holds divisors below 1")
    if divisors.max() < 1 + 1e-6:
        return None
    turns = theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)  # turns a token
    factor = shortest_decimal(float(divisors.max()))
    contexts = [trained] if isinstance(trained, int) and trained > 0 else []
    for context in [*contexts, LLAMA3_CONTEXT, *_contexts(divisors, turns, factor)]:
        if np.allclose(_llama3_divisors(turns, factor, context), divisors, rtol=1e-4, atol=0):
            numbers = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": context}
    raise UserError(f"{header.path}: tensor {ROPE_FACTORS!r} does not hold the rope scaling of a Llama 3")


def _llama3_divisors(turns: np.ndarray, factor: float, context: int) -> np.ndarray:
    """Return divisors: 1 above 4 turns in the trained context, `factor` below 1 turn, interpolated between."""
    smooth = np.clip((turns * context - 1.0) / 3.0, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _contexts(divisors: np.ndarray, turns: np.ndarray, factor: float) -> list[int]:
    """Return the trained context lengths implied by the divisors between 1 and factor."""
    between = (divisors > 1.001) & (divisors < factor * 0.999)
    smooth = (1.0 / divisors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    found = (1.0 + 3.0 * smooth) / turns[between]
    return [round(float(context)) for context in found if 1 <= context < 2**31]


GEMMA_LARGEST = 62  # layers of Gemma 3 27B
SMOLLM3_NO_ROPE = 4  # every fourth layer has no rotary embedding: hard-coded in llama.cpp, not in the file

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_PARTS = LAYER_PARTS | {
    "ffn_norm": gemma.MLP_NORM,
    "post_attention_norm": gemma.ATTENTION_NORM,
    "post_ffw_norm": gemma.MLP_OUTPUT_NORM,
}
PHI_PARTS = LAYER_PARTS | {"attn_qkv": phi.QKV, "ffn_up": phi.GATE_UP}
OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Metadata that changes the arithmetic, with its neutral values.
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.scale": (),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "rope.scale_linear": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}


@dataclass(frozen=True)
class GgufModel:
    """A model's config.json fields (`settings`), and the GGUF name of each Hugging Face tensor (`sources`).

    `has_interleaved_rope`: query and key rows are stored in llama.cpp's interleaved order.
    """

    settings: dict[str, Any]
    config: sizes.LlamaConfig
    sources: dict[str, str]
    has_interleaved_rope: bool


def _llama(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Llama 1 to 3 and Mistral: llama.cpp calls both llama, and only the sliding window distinguishes
    them."""
    window = own.get("attention.sliding_window")
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": has_bias(header, "attn_q"), "mlp_bias": has_bias(header, "ffn_down")}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **biases}


def _qwen2(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_window(header, own)
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_window(header, own)
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
    return named | {"attention_bias": has_bias(header, "attn_q")}


def _smollm3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_window(header, own)
    layers = range(own["block_count"])
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "use_sliding_window": False,
        "no_rope_layer_interval": SMOLLM3_NO_ROPE,
        "no_rope_layers": [int((layer + 1) % SMOLLM3_NO_ROPE != 0) for layer in layers],  # 1: with rotary embedding
        "attention_bias": has_bias(header, "attn_q"),
        "mlp_bias": has_bias(header, "ffn_down"),
    }


def _gemma3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the text model of Gemma 3.

    What the file lacks is filled in as in llama.cpp: which layers use a sliding window, their rotary base, and that the
    largest model scales scores by hidden_size / heads.
    """
    window, layers = own.get("attention.sliding_window"), own["block_count"]
    pattern, local = own.get("attention.sliding_window_pattern", gemma.PATTERN), own.get("rope.freq_base_swa")
    types = [SLIDING if slides else FULL for slides in pattern] if isinstance(pattern, list) else None
    is_largest = layers == GEMMA_LARGEST
    return {
        "architectures": [gemma.ARCHITECTURE],
        "model_type": gemma.MODEL_TYPE,
        "hidden_act": None,
        "hidden_activation": GELU,
        "sliding_window": window or None,
        "sliding_window_pattern": pattern if window and types is None else None,
        "layer_types": types if window else [FULL] * layers,
        "rope_local_base_freq": gemma.LOCAL_THETA if local is None else shortest_decimal(local),
        "query_pre_attn_scalar": _default_head_dim(own)
        if is_largest
        else own.get("attention.key_length", _default_head_dim(own)),
        "attention_bias": has_bias(header, "attn_q"),
    }


def _phi3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Phi-3 and Phi-4. A window of 0 tokens means none."""
    turning, head_dim = own.get("rope.dimension_count"), own.get("attention.key_length", _default_head_dim(own))
    is_part = isinstance(turning, int) and isinstance(head_dim, int) and 0 < turning < head_dim
    return {
        "architectures": [phi.ARCHITECTURE],
        "model_type": phi.MODEL_TYPE,
        "sliding_window": own.get("attention.sliding_window") or None,
        "partial_rotary_factor": turning / head_dim if is_part else None,
    }


ARCHITECTURES: dict[str, Callable[[GgufHeader, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
INTERLEAVED_ROPE = ("llama", "smollm3")


def read_model(header: GgufHeader) -> GgufModel:
    """Translate metadata and tensor table; UserError for other architectures or inconsistent values."""
    path, metadata = header.path, header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        check_causal_lm({"model_type": architecture}, path)
        known = f"GGUF files are read of {', '.join(ARCHITECTURES)}"
        advice = "`--runtime transformers` may run the Hugging Face checkpoint of the same model"
        raise UserError(f"{path} has the architecture {architecture!r:.50}; {known}; {advice}")
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _check_metadata(header, prefix, own)
    settings = _common(header, own) | ARCHITECTURES[architecture](header, own)
    scaling = read_scaling(header, own, settings)
    if scaling is not None:
        settings["rope_scaling"] = scaling
    settings = {name: value for name, value in settings.items() if value is not None}
    config = _checked(header, prefix, settings)
    return GgufModel(settings, config, _sources(header, config), architecture in INTERLEAVED_ROPE)


def has_bias(header: GgufHeader, part: str) -> bool:
    """Return whether the first layer's `part` has a bias; the other layers are checked along with the tensors."""
    return f"blk.0.{part}.bias" in header.tensors


def _check_metadata(header: GgufHeader, prefix: str, own: Mapping[str, Any]) -> None:
    for name, harmless in REFUSED_UNLESS.items():
        if name in own and own[name] not in harmless:
            raise UserError(f"{header.path}: {prefix}{name} {own[name]!r:.50} is not supported")
    for name in ("context_length", "block_count"):
        if own.get(name) is None:
            field = " (num_hidden_layers)" if name == "block_count" else ""
            raise UserError(f"{header.path}: {prefix}{name}{field} is missing")
    layers = own["block_count"]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= len(header.tensors):
        held = f"the file holds {len(header.tensors)} tensors"
        raise UserError(f"{header.path}: {prefix}block_count (num_hidden_layers) is {layers!r:.50}, {held}")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path} holds no tensor 'token_embd.weight'")


def _common(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    eps, theta = own.get("attention.layer_norm_rms_epsilon"), own.get("rope.freq_base")
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": own.get("attention.head_count"),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own.get("attention.key_length", _default_head_dim(own)),
        "hidden_act": "silu",
        "rms_norm_eps": shortest_decimal(eps) if eps is not None else 1e-5,
        "rope_theta": shortest_decimal(theta) if theta is not None else 10000.0,
        "max_position_embeddings": own.get("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _default_head_dim(own: Mapping[str, Any]) -> int | None:
    """Return hidden_size / heads, the head size if the file has none: Qwen 3's config.json has another default."""
    hidden, heads = own.get("embedding_length"), own.get("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0 or hidden % heads:
        return None
    return hidden // heads


def _refuse_window(header: GgufHeader, own: Mapping[str, Any]) -> None:
    """Refuse a sliding window, which llama.cpp ignores for these architectures, so its meaning is unknown."""
    window = own.get("attention.sliding_window")
    if window:
        raise UserError(f"{header.path}: attention.sliding_window {window!r:.50} is not supported here")


def _checked(header: GgufHeader, prefix: str, settings: Mapping[str, Any]) -> sizes.LlamaConfig:
    try:
        config = sizes.from_dict(settings)
    except UserError as error:
        raise UserError(f"{header.path}: {error!s:.300}") from error
    turning = config.rotary_dim or config.head_dim
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        expected = turning if name == "rope.dimension_count" else config.head_dim
        value = header.metadata.get(prefix + name, expected)
        if value != expected:
            raise UserError(
                f"{header.path}: {prefix}{name} {value!r:.50} is not supported, heads have {config.head_dim}"
            )
    return config


def _sources(header: GgufHeader, config: sizes.LlamaConfig) -> dict[str, str]:
    """Map Hugging Face names to GGUF names; UserError for a tensor that is missing, unknown or of another shape."""
    expected, sources = sizes.tensor_shapes(config), dict[str, str]()
    parts = GEMMA_PARTS if config.sandwich_norms else PHI_PARTS if config.fused else LAYER_PARTS
    for name, entry in header.tensors.items():
        if name in ROPE_TENSORS:
            continue
        target = _target_name(name, parts)
        if target not in expected:
            raise UserError(f"{header.path}: tensor {name!r} is not supported")
        if entry.shape != tuple(expected[target]):
            shape = list(expected[target])
            raise UserError(f"{header.path}: tensor {name!r} has shape {list(entry.shape)}, expected {shape}")
        sources[target] = name
    for target in expected:
        if target not in sources:
            raise UserError(f"{header.path} holds no tensor for {target!r}")
    return sources


def _target_name(name: str, layer_parts: Mapping[str, str]) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_parts:
        return f"model.layers.{parts[1]}.{layer_parts[parts[2]]}.{parts[3]}"
    return f"{OUTER_PARTS.get(parts[0], '')}.{'.'.join(parts[1:])}"
