"""Tiny random models of transformers, by architecture, and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from files import folder_of, write_gguf

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 272  # the tokenizer of `files`
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
LINEAR |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
LAYERS = ["sliding_attention", "full_attention"]
SHARED = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": BASE,
    "gemma": BASE,
    "gemma2": BASE | {"sliding_window": 8},
    "gemma3_text": BASE | {"sliding_window": 8, "layer_types": LAYERS},
    "gemma3n_text": BASE
    | SHARED
    | {"num_hidden_layers": 4, "layer_types": LAYERS * 2, "sliding_window": 8, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4},
    "mistral": BASE | {"sliding_window": 8},
    "mixtral": BASE | {"num_local_experts": 4},
    "gpt_oss": BASE | {"num_local_experts": 4, "sliding_window": 8},
    "deepseek_v3": BASE | LATENT | EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    "qwen3_5_text": BASE | LINEAR | {"num_hidden_layers": 4},
    "lfm2": BASE | {"layer_types": ["conv", "full_attention"]},
    "opt": BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gptj": GPT | {"rotary_dim": 4},
    "gpt_bigcode": GPT,
    "bloom": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "gpt_neo": BASE
    | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "llama": BASE,
}
TREES = [name for name in CONFIGS if name not in ("bloom", "mpt", "gpt_neo", "qwen3_5_text", "lfm2")]


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose scores depend visibly on positions and on every token before."""
    fields = CONFIGS.get(name, BASE) | changes
    config = transformers.AutoConfig.for_model(name, **fields)
    torch.manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config)
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return module.eval()


def folder(where: Path, name: str, seed: int = 0, module: Any = None, **changes: Any) -> Path:
    """A model with the tokenizer of `files` in the folder where/name-seed."""
    path = where / f"{name}-{seed}"
    (module or build(name, seed, **changes)).save_pretrained(path)
    tokenizer = folder_of(write_gguf(where / f"{name}-{seed}.gguf"), where / f"{name}-{seed}-tokenizer")
    for file in tokenizer.iterdir():
        if file.name.startswith("tokenizer"):
            file.rename(path / file.name)
    return path
