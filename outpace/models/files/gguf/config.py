"""Translates a GGUF file's model metadata to Hugging Face terms: config.json's fields and tensor names.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's constants. llama.cpp stores query and key
rows of `llama` and `smollm3` with rotary pairs interleaved, those of other architectures unchanged, and Gemma's norm
weights plus one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import NOTICES
from outpace.models.files.gguf.header import GgufHeader, TensorEntry
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.llama.config import gemma, lfm2, phi, qwen35
from outpace.models.llama.config.experts import SPLIT
from outpace.models.llama.config.families import FAMILIES, GELU, why_refused
from outpace.models.llama.config.fields import FULL, SLIDING, number, unknown_fields
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.config.rope import LARGEST_FACTOR, yarn_gain

# Tensors with a divisor for the frequency of each rotary pair: of LongRoPE, and of Llama 3's scaling.
SHORT_FACTORS, LONG_FACTORS, ROPE_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight"


def shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal with the same float32 value: GGUF stores 1e-5 as 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_scaling(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary embedding's scaling as in config.json; None if there is none.

    As in llama.cpp, a factor without a type is linear, 0 means unset, and `attn_factor` multiplies the cosines and
    sines of every type. config.json has no such factor for unscaled and linear frequencies, so these become LongRoPE.
    """
    kind, trained = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.original_context_length") or None
    factor_name = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"  # its name until 2023
    factor = 1.0 if kind == "none" else _number(header, own, factor_name)
    gain = _number(header, own, "rope.scaling.attn_factor")
    tensors = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    if SHORT_FACTORS not in header.tensors:  # the factors apply to texts of any length
        tensors, trained = dict.fromkeys(tensors, ROPE_FACTORS), trained if kind == "yarn" else own["context_length"]
    factors = {name: _divisors(header, tensor) for name, tensor in tensors.items() if tensor in header.tensors}
    is_even = all(divisor == 1 for listed in factors.values() for divisor in listed)
    length = {} if trained is None else {"original_max_position_embeddings": trained}
    if kind == "yarn" and is_even:
        return {"rope_type": kind, "factor": factor, **length, **_yarn_numbers(header, own, factor, gain)}
    if kind not in ("linear", "none") and not (kind == "longrope" and factors):
        named = f" with the tensor {ROPE_FACTORS}" if factors else ""
        allowed = "allowed are linear, yarn, none, and longrope with its factors in the file"
        raise UserError(f"{header.path}: rope.scaling.type {kind!r:.50}{named} is not supported, {allowed}")
    if is_even and gain == 1.0:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if not factors:
        rotated = own.get("rope.dimension_count", own["attention.key_length"])
        factors = dict.fromkeys(tensors, [1.0] * (rotated // 2 if isinstance(rotated, int) else 1))
    scaled = {name: [divisor * factor for divisor in listed] for name, listed in factors.items()}
    return {"rope_type": "longrope", **scaled, **length, "factor": 1.0, "attention_factor": gain}


def _yarn_numbers(header: GgufHeader, own: Mapping[str, Any], factor: float, gain: float) -> dict[str, float]:
    """Return YaRN's optional fields. The file's `yarn_attn_factor` replaces YaRN's own gain; `gain` multiplies it."""
    names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    given = {name: f"rope.scaling.yarn_{stored}" for name, stored in names.items()}
    found = {name: _number(header, own, stored) for name, stored in given.items() if own.get(stored)}
    if gain != 1.0:
        found["attention_factor"] = gain * found.get("attention_factor", yarn_gain(factor))
    return found


def _number(header: GgufHeader, own: Mapping[str, Any], name: str) -> float:
    """Return a field's positive number, 1 if it is missing or 0."""
    try:
        value: float = shortest_decimal(number({name: own.get(name) or None}, name, 1.0, LARGEST_FACTOR))
    except UserError as error:
        raise UserError(f"{header.path}: {error}") from error
    return value


def _divisors(header: GgufHeader, name: str) -> list[float]:
    entry = header.tensors[name]
    if entry.kind != 0 or len(entry.shape) != 1:
        raise UserError(f"{header.path}: tensor {name!r} is not a list of float32 divisors")
    return [shortest_decimal(value) for value in np.frombuffer(entry.raw(), np.float32).tolist()]


SOFTMAX_OF_ALL, SIGMOIDS, SOFTMAX_OF_CHOSEN = 1, 2, 3  # values of expert_gating_func
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
RECURRENT_PARTS = LAYER_PARTS | {
    "post_attention_norm": "post_attention_layernorm",  # of Qwen3.5, before the MLP
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",  # holds -exp(A_log)
    "ssm_dt.bias": "linear_attn.dt_bias",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
EXPERT_PARTS = {
    "post_attention_norm": "post_attention_layernorm",  # of gpt-oss, before the experts
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
EXPERT_STACKS = {  # parts with a tensor for all experts of a layer, and the matrices that they hold one after the other
    **{f"ffn_{name}_exps": (name,) for name in ("gate", "up", "down")},
    "ffn_gate_up_exps": ("gate", "up"),
}
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.")
SHARED_GATE = "shared_expert_gate.weight"  # end of a name; Hugging Face's has one more dimension
PHI_PARTS = LAYER_PARTS | {"attn_qkv": phi.QKV, "ffn_up": phi.GATE_UP}
OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LFM2_OUTER_PARTS = OUTER_PARTS | {"token_embd_norm": "model.norm"}  # an old mistake in the name

# An architecture's metadata are honoured (or compared with what is computed), harmless (without effect on a text), or
# refused unless they have a neutral value. Any other key must be off (0, false or empty) if llama.cpp knows it for
# other architectures; otherwise it is ignored with a notice, because llama.cpp ignores it.
HONOURED = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.scale", "attention.layer_norm_rms_epsilon"),
        *("attention.key_length", "attention.key_length_swa", "attention.value_length", "attention.value_length_swa"),
        *("attention.sliding_window", "rope.freq_base", "rope.dimension_count", "rope.dimension_count_swa"),
        *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"),
        *("rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    )
)
MTP_INPUT = "nextn.eh_proj.weight"  # of a layer for multi-token prediction
INTERVAL, RECURRENT, MTP_BLOCKS = qwen35.INTERVAL, "attention.recurrent_layers", "nextn_predict_layers"
SSM = {  # of a delta net: the names in config.json
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "all value heads' entries together",
}
FILTER = "shortconv.l_cache"
RECURRENT_KINDS = ("qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe")
OF_EXPERTS = {
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func", "expert_weights_norm"),
    "expert_weights_scale",
}
SHARED = {"expert_shared_feed_forward_length", "expert_shared_count"}
HONOURED_BY = {
    "llama": OF_EXPERTS,
    "qwen2moe": OF_EXPERTS | SHARED,
    **dict.fromkeys(("qwen3moe", "olmoe", "gpt-oss"), OF_EXPERTS),
    "gemma3": {"attention.sliding_window_pattern", "rope.freq_base_swa"},
    "qwen35": {*SSM, INTERVAL, RECURRENT, MTP_BLOCKS, "rope.dimension_sections"},  # sections are of images
    "qwen35moe": {*SSM, *OF_EXPERTS, *SHARED, INTERVAL, RECURRENT, MTP_BLOCKS, "rope.dimension_sections"},
    "qwen3next": {*SSM, *OF_EXPERTS, *SHARED, INTERVAL, RECURRENT, MTP_BLOCKS},
    "lfm2": {FILTER},
    "lfm2moe": {*OF_EXPERTS, FILTER, "leading_dense_block_count"},
}
HARMLESS = {
    "vocab_size": "the embedding's number of rows decides",
    "attention.layer_norm_epsilon": "these architectures have no such norms",
    "pooling_type": "for text embeddings only",
    "rope.scaling.finetuned": "says only how the scaling was chosen",
    "tensor_data_layout": "a remark on the conversion",
}
OLLAMA_NAMES = {  # of keys that Ollama's converter writes: llama.cpp's
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.extrapolation_factor": "rope.scaling.yarn_ext_factor",
}
OLLAMA_LEAVES_OUT = {"gemma3": {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": gemma.THETA}}
GEMMA_LONG, GEMMA_FACTOR = 131072, 8.0  # length of a text, and the factor of Gemma 3 with vision that Ollama leaves out
OTHER_MODELS = ("v", "mm", "a")  # first parts of the names of tensors of a vision or audio model in the same file
OTHER_KEYS = ("vision.", "mm.", "audio.")  # beginnings of its keys
HEADS = ("eagle3", "dflash")  # architectures of trained heads
KV_HEADS = "attention.head_count_kv"
SIZES = ("embedding_length", "feed_forward_length", "attention.head_count", KV_HEADS)
COMPUTED = ("attn_rot_embd",)  # parts of layers with tables that are computed
UNSCALED = (0.0, 1.0)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale"), UNSCALED),
    **{"attention.causal": (True,), "rope.scaling.alpha": UNSCALED},
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # below 0: unset
}
OTHER_TYPES = {
    "mmproj": "a projector for images or sound",
    "adapter": "LoRA weights",
    "imatrix": "an importance matrix, for quantising",
    "vocab": "a vocabulary",
}
REASONS = {"nextn_predict_layers": ": layers for multi-token prediction (MTP) are not read from GGUF files"}
REQUIRED = {"context_length": "", "block_count": " (num_hidden_layers)", "attention.layer_norm_rms_epsilon": ""}
NEUTRAL_BY = {"gemma3": {"rope.scaling.attn_factor": UNSCALED}}  # it would wrongly apply to local layers too


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
    them. Mixtral is a llama with experts."""
    window = own.get("attention.sliding_window")
    if own.get("expert_count"):
        return {"model_type": "mixtral", "sliding_window": window or None, **_experts(header, own)}
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return {"model_type": "llama", **_biases(header)}


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


def _qwen35(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Qwen3.5, 3.6 and 3.8. The file's value heads are in another order than in Hugging Face's checkpoint."""
    start = f"{header.path}: {header.metadata['general.architecture']}."
    for name in SSM:
        if type(own.get(name)) is not int or own[name] < 1:
            raise UserError(f"{start}{name} is {own.get(name)!r:.50}, it must be a whole number above 0")
    inner, heads, listed = own["ssm.inner_size"], own["ssm.time_step_rank"], own.get(RECURRENT)
    if inner % heads:
        raise UserError(f"{start}ssm.inner_size is {inner}, it must be a multiple of the {heads} heads")
    layers, kv_heads = _num_layers(header, own), own.get("attention.head_count_kv")
    interval = own.get(INTERVAL, 4)
    if type(interval) is not int or interval < 1:
        raise UserError(f"{start}{INTERVAL} is {interval!r:.50}, it must be a whole number above 0")
    if isinstance(kv_heads, list):  # with 0 for recurrent layers
        listed, kv_heads = [not count for count in kv_heads], max(kv_heads, default=0)
    if not isinstance(listed, list):
        listed = [(layer + 1) % interval != 0 for layer in range(layers)]
    elif len(listed) not in (layers, own["block_count"]):
        raise UserError(f"{start}{RECURRENT} has {len(listed)} entries, it must have one for each of {layers} layers")
    return {
        **{"model_type": qwen35.MODEL_TYPE, "num_hidden_layers": layers, "num_key_value_heads": kv_heads},
        "layer_types": [qwen35.LINEAR if is_recurrent else FULL for is_recurrent in listed[:layers]],
        "partial_rotary_factor": own.get("rope.dimension_count", own["attention.key_length"])
        / own["attention.key_length"],
        **{field: own[name] for name, field in SSM.items() if name != "ssm.inner_size"},
        "linear_value_head_dim": inner // heads,
        qwen35.MTP_LAYERS: own["block_count"] - layers or None,
        "outpace": {qwen35.TILED: True} if heads != own["ssm.group_count"] else None,
    }


def _qwen3next(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Qwen3-Next, whose value heads are in Hugging Face's order; some of its matrices stay fused."""
    tensors = {"qkvz": ".ssm_in.weight", "ba": ".ssm_ba.weight"}
    fused = [name for name, end in tensors.items() if any(stored.endswith(end) for stored in header.tensors)]
    ours = {qwen35.FUSED: fused} if len(fused) < len(tensors) else None
    experts = _experts(header, own) if own.get("expert_count") else {"num_experts": 0}
    return _qwen35(header, own) | {"model_type": qwen35.NEXT_TYPE, **experts, "outpace": ours}


def _qwen35moe(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    return _qwen35(header, own) | {"model_type": qwen35.MOE_TYPE, **_experts(header, own)}


def _experts(
    header: GgufHeader, own: Mapping[str, Any], func: int = SOFTMAX_OF_ALL, normed: bool = True, is_scaled: bool = False
) -> dict[str, Any]:
    """Translate the sizes of mixtures of experts. `func`, `normed`: the scores and the norm of weights that the
    architecture has, which the file must not contradict; `is_scaled`: whether weights may have a factor."""
    start = f"{header.path}: {header.metadata['general.architecture']}."
    count, chosen, scale = own.get("expert_count"), own.get("expert_used_count"), own.get("expert_weights_scale") or 1.0
    for name, value in (("expert_count", count), ("expert_used_count", chosen)):
        if type(value) is not int or value < 1:
            raise UserError(f"{start}{name} is {value!r:.50}, it must be a whole number above 0")
    fixed = {"expert_gating_func": func, "expert_weights_norm": normed, "expert_shared_count": 1}
    for name, expected in fixed.items():
        value = own.get(name)
        if value not in (None, expected) and (value != 0 or value is False):  # a number of 0: unset
            raise UserError(f"{start}{name} is {value!r:.50}, it must be {expected!r} for this architecture")
    if scale != 1.0 and not is_scaled:
        raise UserError(f"{start}expert_weights_scale is {scale!r:.50}, it must be 1 for this architecture")
    dense, shared = own.get("feed_forward_length"), own.get("expert_shared_feed_forward_length")
    width = own.get("expert_feed_forward_length") or dense
    return {
        **{"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width},
        **{"shared_expert_intermediate_size": shared, "norm_topk_prob": normed, "routed_scaling_factor": scale},
        "intermediate_size": dense or width,
    }


def _of_width(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an architecture whose experts have the width that others give to dense layers."""
    return {**found, "intermediate_size": found["moe_intermediate_size"]}


def _gpt_oss(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate gpt-oss. Every second layer has a window, from the first on, as llama.cpp fixes it."""
    window = own.get("attention.sliding_window") or None
    slides = SLIDING if window else FULL
    return {
        **{"model_type": "gpt_oss", "attention_bias": _has_bias(header, "attn_q"), "sliding_window": window},
        "layer_types": [FULL if layer % 2 else slides for layer in range(own["block_count"])],
        **_of_width(_experts(header, own, SOFTMAX_OF_CHOSEN)),
        "outpace": {SPLIT: True},
    }


def _num_layers(header: GgufHeader, own: Mapping[str, Any]) -> int:
    """Return the number of layers; `block_count` includes those for multi-token prediction, which come last."""
    count, extra = own["block_count"], own.get(MTP_BLOCKS) or 0
    if type(extra) is not int or not 0 <= extra < count:
        start = f"{header.path}: {header.metadata['general.architecture']}."
        raise UserError(f"{start}{MTP_BLOCKS} is {extra!r:.50}, it must be less than block_count {count}")
    return int(count) - extra


def _lfm2(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """Translate LFM2: layers without key heads are short convolutions."""
    counts, layers = own.get("attention.head_count_kv"), own["block_count"]
    counts = counts if isinstance(counts, list) else [counts] * layers
    attending = {count for count in counts if count}
    if len(counts) != layers or len(attending) != 1:
        said = f"lfm2.attention.head_count_kv is {counts!r:.100}"
        raise UserError(f"{header.path}: {said}, it must have one number, or 0, for each of {layers} layers")
    return {
        "model_type": lfm2.MODEL_TYPE,
        "num_key_value_heads": attending.pop(),
        "layer_types": [FULL if count else lfm2.CONV for count in counts],
        "conv_L_cache": own.get(FILTER),
        "norm_eps": shortest_decimal(own["attention.layer_norm_rms_epsilon"]),
        "block_auto_adjust_ff_dim": False,
        **_no_window(header, own),
    }


ARCHITECTURES: dict[str, Callable[[GgufHeader, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda header, own: {"model_type": "qwen2", **_no_window(header, own)},
    "qwen3": lambda header, own: {
        **{"model_type": "qwen3", "attention_bias": _has_bias(header, "attn_q")},
        **_no_window(header, own),
    },
    "smollm3": _smollm3,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "qwen35": _qwen35,
    "qwen3next": _qwen3next,
    "lfm2": _lfm2,
    "qwen2moe": lambda header, own: {
        **{"model_type": "qwen2_moe", **_no_window(header, own)},
        **_experts(header, own, normed=False),
    },
    "qwen3moe": lambda header, own: {
        **{"model_type": "qwen3_moe", "attention_bias": _has_bias(header, "attn_q")},
        **_no_window(header, own),
        **_experts(header, own),
    },
    "olmoe": lambda header, own: {
        **{"model_type": "olmoe", "attention_bias": _has_bias(header, "attn_q")},
        **_no_window(header, own),
        **_of_width(_experts(header, own, normed=False)),
    },
    "gpt-oss": _gpt_oss,
    "qwen35moe": _qwen35moe,
    "lfm2moe": lambda header, own: {
        **_lfm2(header, own),
        **_experts(header, own, SIGMOIDS, is_scaled=True),
        **{"model_type": "lfm2_moe", "num_dense_layers": own.get("leading_dense_block_count")},
    },
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
    kind = metadata.get("general.type", "model")
    if kind != "model":
        what = f" ({OTHER_TYPES[kind]})" if kind in OTHER_TYPES else ""
        raise UserError(f"{path} holds no model: its general.type is {kind!r:.50}{what}; name the model's own file")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise _unsupported(architecture, path)
    if not header.tensors:
        raise UserError(f"{path} holds a vocabulary and no tensors; name the model's own file")
    prefix = architecture + "."
    own = _own_metadata(header, prefix)
    unknown = _check_metadata(header, architecture, own)
    notices = [f"unknown metadata of the file were ignored: {', '.join(unknown)}"] if unknown else []
    own = {"attention.key_length": _default_head_dim(own), **own}
    settings = _common(header, own) | ARCHITECTURES[architecture](header, own)
    settings["architectures"] = [FAMILIES[settings["model_type"]].architecture]
    settings["rope_scaling"] = scaling = read_scaling(header, own)
    if architecture == "gpt-oss" and scaling and scaling["rope_type"] == "yarn":  # no key says so
        scaling["truncate"] = False
    settings = {name: value for name, value in settings.items() if value is not None}
    config = _checked(header, prefix, own, settings)
    sources = _sources(header, config, prefix, own)
    if others := sorted({name.partition(".")[0] for name in header.tensors} & {*OTHER_MODELS}):
        notices.append(f"tensors of a vision or audio model in the file were ignored: {', '.join(others)}")
    if notices:
        settings["outpace"] = {**settings.get("outpace", {}), NOTICES: notices}
    return GgufModel(settings, config, sources, architecture in INTERLEAVED_ROPE)


def _unsupported(architecture: Any, path: object) -> UserError:
    """Return the error for an architecture that is not read."""
    from gguf.constants import MODEL_ARCH_NAMES

    if reason := why_refused(architecture):
        return UserError(f"{path} has the architecture {architecture!r}, which is not supported: {reason}")
    if architecture in HEADS:
        return UserError(f"{path} is a trained head ({architecture}), which drafts for another model: name it as draft")
    is_encoder = any(part in str(architecture) for part in ("bert", "encoder", "embedding"))
    check_causal_lm({"model_type": "bert" if is_encoder else architecture, "architectures": [architecture]}, path)
    known = f"GGUF files are read of {', '.join(ARCHITECTURES)}"
    advice = "`--runtime transformers` may run the Hugging Face checkpoint of the same model"
    if architecture not in MODEL_ARCH_NAMES.values():
        advice = "nor does the installed package gguf know a language model of that name"
    return UserError(f"{path} has the architecture {architecture!r:.50}; {known}; {advice}")


def _own_metadata(header: GgufHeader, prefix: str) -> dict[str, Any]:
    """Return the architecture's metadata; a list with one value for each layer becomes that value if all are equal."""
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    own = {name: value for name, value in own.items() if not name.startswith(OTHER_KEYS)}
    renamed = {new: own.pop(old) for old, new in OLLAMA_NAMES.items() if old in own}
    own = OLLAMA_LEAVES_OUT.get(prefix[:-1], {}) | renamed | own
    has_vision = any(name.startswith("v.") for name in header.tensors)
    is_scaled = any(name.startswith("rope.scal") for name in own)
    if prefix == "gemma3." and has_vision and own.get("context_length") == GEMMA_LONG and not is_scaled:
        own["rope.scaling.factor"] = GEMMA_FACTOR
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = own.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            own[name] = value[0]
    return own


def unknown_metadata(
    header: GgufHeader,
    architecture: str,
    own: Mapping[str, Any],
    known: Container[str],
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> list[str]:
    """Refuse metadata that would change the arithmetic; return the ignored keys, which llama.cpp does not know."""

    def objection(name: str) -> str | None:
        return REASONS.get(name, "") if _is_llama_cpp_key(name) else None

    try:
        return unknown_fields(own, known, neutral, objection, f"{architecture}.")
    except UserError as error:
        raise UserError(f"{header.path}: {error}") from error


def _check_metadata(header: GgufHeader, architecture: str, own: Mapping[str, Any]) -> list[str]:
    """Check a model's metadata; return the ignored keys."""
    known = HONOURED.union(HARMLESS, HONOURED_BY.get(architecture, ()))
    if architecture == "llama" and not own.get("expert_count"):  # a dense model would ignore them
        known -= OF_EXPERTS
    unknown = unknown_metadata(header, architecture, own, known, NEUTRAL | NEUTRAL_BY.get(architecture, {}))
    for name, field in REQUIRED.items():
        if own.get(name) is None:
            raise UserError(f"{header.path}: {architecture}.{name}{field} is missing")
    layers = own["block_count"]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= len(header.tensors):
        held = f"the file holds {len(header.tensors)} tensors"
        raise UserError(f"{header.path}: {architecture}.block_count (num_hidden_layers) is {layers!r:.50}, {held}")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path} holds no tensor 'token_embd.weight'")
    return unknown


def _is_llama_cpp_key(name: str) -> bool:
    """Return whether llama.cpp reads this key, for any architecture."""
    from gguf.constants import Keys

    def is_in(section: type) -> bool:
        values = vars(section).values()
        return f"{{arch}}.{name}" in values or any(is_in(value) for value in values if isinstance(value, type))

    return is_in(Keys)


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
        "rms_norm_eps": shortest_decimal(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest_decimal(own.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": own["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _checked(header: GgufHeader, prefix: str, own: Mapping[str, Any], settings: Mapping[str, Any]) -> LlamaConfig:
    try:
        config = from_dict(settings)
    except UserError as error:
        raise UserError(f"{header.path}: {error!s:.300}") from error
    head_dim = config.head_dim
    computed: dict[str, float] = {"rope.dimension_count": config.rotary_dim or head_dim}
    lengths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    computed |= {name + end: head_dim for name in lengths for end in ("", "_swa") if name + end not in computed}
    computed["attention.scale"] = shortest_decimal(config.attention_scale)
    for name, expected in computed.items():
        value = shortest_decimal(own.get(name, expected))
        if value != expected and (value or name != "attention.scale"):
            raise UserError(f"{header.path}: {prefix}{name} {value!r:.50} is not supported, it must be {expected:g}")
    return config


def _sources(header: GgufHeader, config: LlamaConfig, prefix: str, own: Mapping[str, Any]) -> dict[str, str]:
    """Map Hugging Face names to GGUF names; UserError for a tensor that is missing, of another shape, or that would
    change a text and is not part of the model."""
    expected, sources = tensor_shapes(config), dict[str, str]()
    parts = GEMMA_PARTS if config.sandwich_norms else PHI_PARTS if config.fused else LAYER_PARTS
    is_hybrid, outer = prefix[:-1] in RECURRENT_KINDS, OUTER_PARTS
    parts = RECURRENT_PARTS if is_hybrid else parts
    if config.experts:
        parts = EXPERT_PARTS | parts
    if prefix in ("lfm2.", "lfm2moe."):
        outer = LFM2_OUTER_PARTS
    mtp = {str(layer) for layer in range(config.num_layers, own["block_count"])} if own.get(MTP_BLOCKS) else set()
    for layer in mtp & {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}:
        if f"blk.{layer}.{MTP_INPUT}" not in header.tensors:
            said = f"{prefix}{MTP_BLOCKS} is {own[MTP_BLOCKS]}, so the block {layer} must have a tensor {MTP_INPUT!r}"
            raise UserError(f"{header.path}: {said}")
    layers = f"{prefix}block_count {config.num_layers}"
    for name, entry in header.tensors.items():
        (target, *others), (first, *inner) = _target_names(name, entry, parts, outer), name.split(".")
        if first == "blk" and inner[0] in mtp:
            continue
        if target in expected:
            drops_ones = len(expected[target]) == 3 or target.endswith(SHARED_GATE)
            shape = tuple(size for size in expected[target] if size != 1 or not drops_ones)
            if others and config.experts:
                matrices = len(EXPERT_STACKS[inner[1]])
                shape = (config.experts.count, matrices * shape[0], *shape[1:])
            if entry.shape != shape:
                said = _said(own, (*SIZES, *SSM, FILTER, *sorted(OF_EXPERTS)))
                found = f"has shape {list(entry.shape)}, expected {list(shape)} ({said})"
                raise UserError(f"{header.path}: tensor {name!r} {found}")
            sources |= dict.fromkeys([target, *others], name)
        elif name in (SHORT_FACTORS, LONG_FACTORS, ROPE_FACTORS) or first in OTHER_MODELS or {*COMPUTED} & {*inner}:
            continue
        elif not name.endswith(".bias") or entry.raw().any():
            is_beyond = first == "blk" and inner[0].isdecimal() and int(inner[0]) >= config.num_layers
            label = layers if is_beyond else f"the architecture {prefix[:-1]}"
            if is_hybrid and first == "blk" and inner[0].isdecimal() and not is_beyond:
                mixer = "a recurrence" if config.is_recurrent(int(inner[0])) else "attention"
                label = f"{mixer} in layer {inner[0]} ({_said(own, (RECURRENT, INTERVAL, KV_HEADS))})"
            raise UserError(f"{header.path}: tensor {name!r} is not supported: a model with {label} has none such")
    missing = next((target for target in expected if target not in sources), None)
    if missing is not None:
        raise UserError(f"{header.path} holds no tensor for {missing!r}, which a model with {layers} has")
    return sources


def _said(own: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return what the file says under these keys."""
    return ", ".join(f"{key} {own[key]!r:.50}" for key in keys if key in own)


def _target_names(name: str, entry: TensorEntry, layer_parts: Mapping[str, str], outer: Mapping[str, str]) -> list[str]:
    """Return the Hugging Face name of a tensor, or those of the experts' matrices that it holds."""
    first, *inner = name.split(".")
    stacked = expert_names(".".join(inner[1:]), entry) if first == "blk" else []
    return [f"model.layers.{inner[0]}.{one}" for one in stacked] or [_target_name(name, layer_parts, outer)]


def expert_names(part: str, entry: TensorEntry) -> list[str]:
    """Return the Hugging Face names in a layer of the experts' matrices that a tensor of it holds, none if it is any
    other."""
    stack, _, end = part.partition(".")
    matrices = EXPERT_STACKS.get(stack, ())
    return [
        f"mlp.experts.{number}.{one}_proj.{end}"
        for number in range(entry.shape[0] if matrices else 0)
        for one in matrices
    ]


def expert_entry(entry: TensorEntry, name: str, config: LlamaConfig) -> TensorEntry:
    """Return where an expert's matrix or bias of this name is in a tensor with those of all experts of a layer, or the
    tensor itself if it is any other."""
    part = EXPERT.search(name)
    if part is None or config.experts is None:
        return entry
    rows = config.hidden_size if part[2] == "down" else config.experts.width
    size = entry.num_bytes // entry.shape[0]
    start, whole = entry.start + int(part[1]) * size, entry.shape[1]
    size = size * rows // whole
    if part[2] == "up" and rows < whole:
        start += size
    return replace(entry, shape=(rows, *entry.shape[2:]), start=start, num_bytes=size)


def _target_name(name: str, layer_parts: Mapping[str, str], outer: Mapping[str, str]) -> str:
    first, *inner = name.split(".")
    if first != "blk" or len(inner) < 2:
        return f"{outer.get(first, '')}.{'.'.join(inner)}"
    number, *rest = inner
    whole, (stem, _, end) = ".".join(rest), ".".join(rest).rpartition(".")
    part = layer_parts.get(whole) or (f"{layer_parts[stem]}.{end}" if stem in layer_parts else "")
    return f"model.layers.{number}.{part}"
