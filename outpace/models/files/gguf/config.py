"""Translates a GGUF file's model metadata to Hugging Face terms: config.json's fields and tensor names.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's constants. llama.cpp stores query and key
rows of `llama` and `smollm3` with rotary pairs interleaved, those of other architectures unchanged, and Gemma's norm
weights plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.gguf.header import GgufHeader
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.llama.config import gemma, phi
from outpace.models.llama.config.families import FAMILIES, GELU
from outpace.models.llama.config.fields import FULL, SLIDING
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes

# Tensors with a divisor for the frequency of each rotary pair: of LongRoPE, and of Llama 3's scaling.
SHORT_FACTORS, LONG_FACTORS, ROPE_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight"


def shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal with the same float32 value: GGUF stores 1e-5 as 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_scaling(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary embedding's scaling as in config.json; None if there is none."""
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    trained = own.get("rope.scaling.original_context_length")
    if SHORT_FACTORS in header.tensors:
        names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
        factors = {name: _divisors(header, tensor) for name, tensor in names.items() if tensor in header.tensors}
        gain = shortest_decimal(own.get("rope.scaling.attn_factor"))
        optional = {"original_max_position_embeddings": trained, "attention_factor": gain}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"rope_type": "longrope", **factors, **given}
    if ROPE_FACTORS in header.tensors:  # LongRoPE whose factors apply to texts of any length
        divisors = _divisors(header, ROPE_FACTORS)
        if all(divisor == 1 for divisor in divisors):
            return None
        same = {"short_factor": divisors, "long_factor": divisors}
        return {"rope_type": "longrope", **same, "factor": 1.0, "attention_factor": 1.0}
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn"):
        shown = f"rope.scaling.type {kind!r:.50} with rope.scaling.factor {factor!r:.50}"
        raise UserError(f"{header.path}: {shown} is not supported, allowed are linear, yarn and none")
    scaling = {"rope_type": kind, "factor": shortest_decimal(factor)}
    return scaling | ({"original_max_position_embeddings": trained} if trained and kind == "yarn" else {})


def _divisors(header: GgufHeader, name: str) -> list[float]:
    """Read a tensor of float32 divisors of frequencies."""
    entry = header.tensors[name]
    if entry.kind != 0 or len(entry.shape) != 1:
        raise UserError(f"{header.path}: tensor {name!r} is not a list of float32 divisors")
    return [shortest_decimal(value) for value in np.frombuffer(entry.raw(), np.float32).tolist()]


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
    config: LlamaConfig
    sources: dict[str, str]
    has_interleaved_rope: bool


def _llama(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Llama 1 to 3 and Mistral: llama.cpp calls both llama, and only the sliding window distinguishes
    them."""
    window = own.get("attention.sliding_window")
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return {"model_type": "llama", **_biases(header)}


def _qwen2(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen2", **_no_window(header, own)}


def _qwen3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3", "attention_bias": _has_bias(header, "attn_q"), **_no_window(header, own)}


def _smollm3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "smollm3",
        "no_rope_layer_interval": SMOLLM3_NO_ROPE,
        # 1: with rotary embedding
        "no_rope_layers": [int((layer + 1) % SMOLLM3_NO_ROPE != 0) for layer in range(own["block_count"])],
        **_no_window(header, own),
        **_biases(header),
    }


def _gemma3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the text model of Gemma 3.

    What the file lacks is filled in as in llama.cpp: which layers use a sliding window, their rotary base, and that the
    largest model scales scores by hidden_size / heads.
    """
    window, layers = own.get("attention.sliding_window"), own["block_count"]
    pattern, local = own.get("attention.sliding_window_pattern", gemma.PATTERN), own.get("rope.freq_base_swa")
    types = [SLIDING if slides else FULL for slides in pattern] if isinstance(pattern, list) else None
    return {
        "model_type": gemma.MODEL_TYPE,
        "hidden_act": None,
        "hidden_activation": GELU,
        "sliding_window": window or None,
        "sliding_window_pattern": pattern if window and types is None else None,
        "layer_types": types if window else [FULL] * layers,
        "rope_local_base_freq": gemma.LOCAL_THETA if local is None else shortest_decimal(local),
        "query_pre_attn_scalar": _default_head_dim(own) if layers == GEMMA_LARGEST else own["attention.key_length"],
        "attention_bias": _has_bias(header, "attn_q"),
    }


def _phi3(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Phi-3 and Phi-4. A window of 0 tokens means none."""
    rotated, head_dim = own.get("rope.dimension_count"), own["attention.key_length"]
    is_part = isinstance(rotated, int) and isinstance(head_dim, int) and 0 < rotated < head_dim
    return {
        "model_type": phi.MODEL_TYPE,
        "sliding_window": own.get("attention.sliding_window") or None,
        "partial_rotary_factor": rotated / head_dim if is_part else None,
    }


ARCHITECTURES = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
INTERLEAVED_ROPE = ("llama", "smollm3")


def _has_bias(header: GgufHeader, part: str) -> bool:
    """Return whether the first layer's `part` has a bias; the other layers are checked along with the tensors."""
    return f"blk.0.{part}.bias" in header.tensors


def _biases(header: GgufHeader) -> dict[str, bool]:
    return {"attention_bias": _has_bias(header, "attn_q"), "mlp_bias": _has_bias(header, "ffn_down")}


def _no_window(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, bool]:
    """Refuse a sliding window, which llama.cpp ignores for these architectures, so its meaning is unknown."""
    window = own.get("attention.sliding_window")
    if window:
        raise UserError(f"{header.path}: attention.sliding_window {window!r:.50} is not supported here")
    return {"use_sliding_window": False}


def _default_head_dim(own: Mapping[str, Any]) -> int | None:
    """Return hidden_size / heads, the head size if the file has none: Qwen 3's config.json has another default."""
    hidden, heads = own.get("embedding_length"), own.get("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0 or hidden % heads:
        return None
    return hidden // heads


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
    own = {"attention.key_length": _default_head_dim(own), **own}
    _check_metadata(header, prefix, own)
    settings = _common(header, own) | ARCHITECTURES[architecture](header, own)
    settings["architectures"] = [FAMILIES[settings["model_type"]].architecture]
    settings["rope_scaling"] = read_scaling(header, own)
    settings = {name: value for name, value in settings.items() if value is not None}
    config = _checked(header, prefix, settings)
    return GgufModel(settings, config, _sources(header, config), architecture in INTERLEAVED_ROPE)


def _check_metadata(header: GgufHeader, prefix: str, own: Mapping[str, Any]) -> None:
    for name, harmless in REFUSED_UNLESS.items():
        if name in own and own[name] not in harmless:
            raise UserError(f"{header.path}: {prefix}{name} {own[name]!r:.50} is not supported")
    for name, field in {"context_length": "", "block_count": " (num_hidden_layers)"}.items():
        if own.get(name) is None:
            raise UserError(f"{header.path}: {prefix}{name}{field} is missing")
    layers = own["block_count"]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= len(header.tensors):
        held = f"the file holds {len(header.tensors)} tensors"
        raise UserError(f"{header.path}: {prefix}block_count (num_hidden_layers) is {layers!r:.50}, {held}")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path} holds no tensor 'token_embd.weight'")


def _common(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own.get("attention.head_count"),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own["attention.key_length"],
        "hidden_act": "silu",
        "rms_norm_eps": shortest_decimal(own.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": shortest_decimal(own.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": own["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _checked(header: GgufHeader, prefix: str, settings: Mapping[str, Any]) -> LlamaConfig:
    try:
        config = from_dict(settings)
    except UserError as error:
        raise UserError(f"{header.path}: {error!s:.300}") from error
    head_dim = config.head_dim
    sizes = {"rope.dimension_count": config.rotary_dim or head_dim}
    sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for name, expected in sizes.items():
        value = header.metadata.get(prefix + name, expected)
        if value != expected:
            raise UserError(f"{header.path}: {prefix}{name} {value!r:.50} is not supported, heads have {head_dim}")
    return config


def _sources(header: GgufHeader, config: LlamaConfig) -> dict[str, str]:
    """Map Hugging Face names to GGUF names; UserError for a tensor that is missing, unknown or of another shape."""
    expected, sources = tensor_shapes(config), dict[str, str]()
    parts = GEMMA_PARTS if config.sandwich_norms else PHI_PARTS if config.fused else LAYER_PARTS
    for name, entry in header.tensors.items():
        if name in (SHORT_FACTORS, LONG_FACTORS, ROPE_FACTORS):
            continue
        target = _target_name(name, parts)
        if target not in expected:
            raise UserError(f"{header.path}: tensor {name!r} is not supported")
        if entry.shape != tuple(expected[target]):
            shape = list(expected[target])
            raise UserError(f"{header.path}: tensor {name!r} has shape {list(entry.shape)}, expected {shape}")
        sources[target] = name
    missing = next((target for target in expected if target not in sources), None)
    if missing is not None:
        raise UserError(f"{header.path} holds no tensor for {missing!r}")
    return sources


def _target_name(name: str, layer_parts: Mapping[str, str]) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_parts:
        return f"model.layers.{parts[1]}.{layer_parts[parts[2]]}.{parts[3]}"
    return f"{OUTER_PARTS.get(parts[0], '')}.{'.'.join(parts[1:])}"
