"""Tiny random models with recurrent layers or experts, written by transformers, also with an MTP layer, and as GGUF
files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from files import CONFIG, add_field, folder_of, interleaved, tokenizer_fields
from files import write_gguf as write_llama_gguf
from safetensors.numpy import load_file, save_file

from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.torch.runtime import Llama

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
SIZES: dict[str, Any] = {
    "vocab_size": CONFIG["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": ROPE,
}
LFM: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "block_auto_adjust_ff_dim": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Qwen3_5", QWEN),
    "equal": ("Qwen3_5", QWEN | {"linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "wide": ("Qwen3_5", QWEN | {"linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 16}),
    "next": ("Qwen3Next", QWEN | {"linear_num_value_heads": 6, "num_experts": 0}),
    "lfm2": ("Lfm2", LFM),
}
DELTAS = QWEN | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
SHAPES = MODELS | {  # others, for comparisons with other engines
    "three values": ("Qwen3_5", DELTAS | {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "every second": ("Qwen3_5", DELTAS | {"full_attention_interval": 2, "num_key_value_heads": 1}),
    "short filter": ("Qwen3_5", QWEN | {"linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    "long filter": ("Lfm2", LFM | {"conv_L_cache": 5, "num_key_value_heads": 4}),
    "attention first": ("Lfm2", LFM | {"layer_types": ["full_attention", "conv", "conv", "conv"]}),
    "one key head": ("Lfm2", LFM | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}),
}
CHOSEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
MOE: dict[str, Any] = SIZES | CHOSEN | {"num_hidden_layers": 3, "head_dim": 16, "moe_intermediate_size": 32}
YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 64, "rope_theta": 150000.0},
}
SHARED: dict[str, Any] = CHOSEN | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", SIZES | SHARED | {"num_hidden_layers": 3}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "some_dense": ("Qwen3Moe", MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", SIZES | CHOSEN | {"num_hidden_layers": 3, "intermediate_size": 32, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", SIZES | {"num_hidden_layers": 3, "num_local_experts": 6, "tie_word_embeddings": True}),
    "gpt_oss": (
        "GptOss",
        SIZES
        | {"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"sliding_window": 5, "rope_parameters": YARN, "intermediate_size": 64},
    ),
    "qwen35moe": ("Qwen3_5Moe", QWEN | SHARED),
    "qwen3next": ("Qwen3Next", QWEN | SHARED | {"linear_num_value_heads": 6}),
    "lfm2_moe": (
        "Lfm2Moe",
        LFM | CHOSEN | {"moe_intermediate_size": 32, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
}


def make(name: str, folder: Path, **changes: Any) -> Any:
    """Write a random model to a folder, and return transformers' own."""
    family, fields = (SHAPES | EXPERTS)[name]
    torch.manual_seed(sum(map(ord, name)))
    kind = f"{family}TextConfig" if "3_5" in family else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, kind)(**fields | changes)).eval()
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *biases]:
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-1, 1)
            elif "norm" in parameter_name or parameter.dim() == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
MTP_LAYER = "mtp.layers.0."


def add_mtp(folder: Path, is_exact: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Add a tokenizer and a random MTP layer to a folder of Qwen3.5; return the layer's tensors.

    If `is_exact`, each token of the target's text depends on the one before only, and the layer drafts the same.
    """
    random, file, width = np.random.default_rng(seed), folder / "model.safetensors", QWEN["hidden_size"]
    tensors, start = load_file(file), "model.layers.3."  # with attention
    shapes = {MTP_LAYER + name.removeprefix(start): tensors[name].shape for name in tensors if name.startswith(start)}
    shapes |= {f"mtp.{name}.weight": (width,) for name in MTP_NORMS} | {"mtp.fc.weight": (width, 2 * width)}
    mtp = {}
    for name, shape in shapes.items():
        deviation = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        mtp[name] = (random.standard_normal(shape) * deviation).astype(np.float32)
    if is_exact:
        for name, values in (tensors | mtp).items():
            if "norm" in name or name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                values[:] = 0
        mtp["mtp.fc.weight"][:] = np.eye(width, 2 * width)  # of the embedding only
    save_file(tensors | mtp, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    with_tokenizer(folder)
    return mtp


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer to a folder, keeping what is there."""
    for one in folder_of(write_llama_gguf(folder / "tokenizer.gguf"), folder / "tokenizer").iterdir():
        if not (folder / one.name).exists():
            one.replace(folder / one.name)
    return folder


ARCHITECTURES = {
    **{"Qwen3_5": "qwen35", "Qwen3Next": "qwen3next", "Lfm2": "lfm2", "Qwen3_5Moe": "qwen35moe", "Lfm2Moe": "lfm2moe"},
    **{"Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Olmoe": "olmoe", "Mixtral": "llama", "GptOss": "gpt-oss"},
}
EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+?)(?:_proj)?\.weight")


def write_gguf(folder: Path, path: Path, name: str, kind: str = "F32", is_old: bool = False, **more: Any) -> Path:
    """Write a folder's weights as llama.cpp's converter does: value heads tiled over key heads, 1 added to norms.
    Qwen3-Next's heads keep their order, and its matrices stay fused if `is_old`. `more`: further metadata of the
    architecture."""
    family, fields = (SHAPES | EXPERTS)[name]
    tensors = stacked(folder)
    architecture, layers = ARCHITECTURES[family], fields["num_hidden_layers"]
    if family == "Qwen3Next" and not is_old:
        tensors = dict(entry for name, values in tensors.items() for entry in _split(name, values, fields))
    writer = gguf.GGUFWriter(path, architecture)
    has_mtp = any(name.startswith("mtp.") for name in tensors)
    metadata: dict[str, Any] = {
        "block_count": layers + has_mtp,
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5 if family in ("Olmoe", "Mixtral", "GptOss") else 1e-6,
        "rope.freq_base": fields.get("rope_parameters", {}).get("rope_theta", 1e6 if family == "Mixtral" else 1e4),
    }
    if "num_experts_per_tok" in fields or family == "Mixtral":
        metadata |= {"expert_count": fields.get("num_experts") or fields["num_local_experts"]}
        metadata |= {"expert_used_count": fields.get("num_experts_per_tok", 2)}
        metadata |= {"expert_feed_forward_length": fields.get("moe_intermediate_size", fields["intermediate_size"])}
    if "shared_expert_intermediate_size" in fields:
        metadata |= {"expert_shared_feed_forward_length": fields["shared_expert_intermediate_size"]}
    if family == "GptOss":
        metadata |= {"attention.sliding_window": 5, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
        metadata |= {"rope.scaling.original_context_length": 64}
    if family == "Lfm2Moe":
        metadata |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        metadata |= {"leading_dense_block_count": 1}
    if family.startswith("Lfm2"):
        counts = [fields["num_key_value_heads"] if "full" in kind else 0 for kind in fields["layer_types"]]
        metadata |= {"attention.head_count_kv": counts, "attention.layer_norm_rms_epsilon": 1e-5}
        metadata |= {"shortconv.l_cache": fields["conv_L_cache"], "vocab_size": fields["vocab_size"]}
    if "linear_num_value_heads" in fields:
        values = fields["linear_num_value_heads"]
        metadata |= {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8}
        metadata |= {
            "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
            "ssm.state_size": fields["linear_key_head_dim"],
        }
        metadata |= {"ssm.group_count": fields["linear_num_key_heads"], "ssm.time_step_rank": values}
        metadata |= {
            "ssm.inner_size": values * fields["linear_value_head_dim"],
            "full_attention_interval": fields.get("full_attention_interval", 4),
        }
        if "3_5" in family:
            metadata |= {"rope.dimension_sections": [2, 1, 1, 0]}
        if "3_5" in family or has_mtp:
            metadata |= {"nextn_predict_layers": int(has_mtp)}
    for key, value in (metadata | more).items():
        add_field(writer, f"{architecture}.{key}", value)
    for key, value in tokenizer_fields().items():
        add_field(writer, key, value)
    for tensor_name, values in tensors.items():
        named, stored = _converted(tensor_name, values, fields, family != "Qwen3Next")
        if family in ("Qwen2Moe", "Qwen3Moe", "Olmoe", "Mixtral"):
            named = named.replace("post_attention_norm", "ffn_norm")
        if family == "Mixtral":
            stored = interleaved(tensor_name, stored)
        is_matrix = stored.ndim > 1 and stored.shape[-1] % 32 == 0 and named.endswith("weight")
        quantisation = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(named, gguf.quants.quantize(stored, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MTP_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    MTP_LAYER: "",
}
NAMES = {
    **{one: f"nextn.{one}" for one in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm": "nextn.shared_head_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    **{f"self_attn.{one}_{norm}": f"attn_{one}_norm" for one in "qk" for norm in ("norm", "layernorm")},
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"{one}.gate": "ffn_gate_inp" for one in ("mlp", "block_sparse_moe", "feed_forward")},
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    **{f"ffn_{one}_exps": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}


def stacked(folder: Path) -> dict[str, np.ndarray]:
    """A folder's tensors, with the experts' matrices of a layer in one, those of gpt-oss split into gates and ups."""
    found, stacks = dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()
    for name, values in load_file(folder / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(match[3], match[3])
            stacks.setdefault(f"{match[1]}.ffn_{part}_exps.weight", {})[int(match[2])] = values
        elif ".mlp.experts." in name:
            layer, _, part = name.partition(".mlp.experts.")
            stored = values if part.endswith("bias") else values.swapaxes(1, 2)
            end = "bias" if part.endswith("bias") else "weight"
            halves = {"gate": stored[:, ::2], "up": stored[:, 1::2]} if "gate_up" in part else {"down": stored}
            found |= {f"{layer}.ffn_{one}_exps.{end}": np.ascontiguousarray(half) for one, half in halves.items()}
        else:
            found[name] = values
    return found | {name: np.stack([parts[one] for one in sorted(parts)]) for name, parts in stacks.items()}


def _converted(name: str, values: np.ndarray, fields: dict[str, Any], is_tiled: bool) -> tuple[str, np.ndarray]:
    for own, other in MTP_NAMES.items():
        if name.startswith(own):
            name = f"model.layers.{fields['num_hidden_layers']}.{other}{name.removeprefix(own)}"
    layer = name.split(".")[2] if name.startswith("model.layers.") else None
    part = name.removeprefix(f"model.layers.{layer}.") if layer else name
    values = values[:, 0] if values.ndim == 3 and "exps" not in name else values
    if part.startswith("linear_attn."):
        values = _tiled(part, values, fields) if is_tiled else values
    elif "norm" in part and "linear_num_value_heads" in fields:
        values = values + np.float32(1)
    if part.endswith(("A_log", "dt_bias")):
        is_rate = part.endswith("A_log")
        return f"blk.{layer}.{'ssm_a' if is_rate else 'ssm_dt.bias'}", -np.exp(values) if is_rate else values
    if part in ("self_attn.sinks", "feed_forward.expert_bias"):
        return f"blk.{layer}.{'attn_sinks.weight' if 'sinks' in part else 'exp_probs_b.bias'}", values
    if part == "mlp.shared_expert_gate.weight":
        values = values[0]
    stem, _, end = part.rpartition(".")
    return f"blk.{layer}.{NAMES[stem]}.{end}" if layer else f"{NAMES[stem]}.{end}", np.ascontiguousarray(values)


def _tiled(part: str, values: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """Reorder value heads [key heads, shared] to [shared, key heads]."""
    keys, heads, depth = (fields[f"linear_{one}"] for one in ("num_key_heads", "num_value_heads", "value_head_dim"))
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)
    entries = (order[:, None] * depth + np.arange(depth)).reshape(-1)
    if "in_proj_qkv" in part or "conv1d" in part:
        first = len(values) - heads * depth
        return np.concatenate([values[:first], values[first:][entries]])
    if "in_proj_z" in part:
        return values[entries]
    if "out_proj" in part:
        return values[:, entries]
    return values if "norm" in part else values[order]


def _split(name: str, values: np.ndarray, fields: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Split a fused matrix of queries, keys, values and gates, whose rows are in the order of key heads."""
    if not name.endswith("in_proj_qkvz.weight"):
        return [(name, values)]
    heads, key, value = (fields[f"linear_{one}"] for one in ("num_key_heads", "key_head_dim", "value_head_dim"))
    wide = fields["linear_num_value_heads"] // heads * value
    parts = np.split(values.reshape(heads, -1, values.shape[1]), np.cumsum([key, key, wide]), axis=1)
    query, keys, value_rows, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    stem = name.removesuffix("qkvz.weight")
    return [(f"{stem}qkv.weight", np.concatenate([query, keys, value_rows])), (f"{stem}z.weight", gates)]


class Pair(NamedTuple):
    """A random model: transformers' own, its folder, and ours in float32."""

    reference: Any
    folder: Path
    model: Llama


def read(source: Any, **options: Any) -> Llama:
    """Return our model of a checkpoint, which is closed."""
    with source:
        return Llama.from_tensors(source.read_config(), source.tensor, **options)


def pairs_of(folders: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return a function that returns the pair of a name, made once."""
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            folder = folders.mktemp(name)
            reference = make(name, folder)
            made[name] = Pair(reference, folder, read(Checkpoint.open(folder)))
        return made[name]

    return pair
