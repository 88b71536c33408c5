"""The sizes of well-known models, so that a machine can be planned for without their files."""

from __future__ import annotations

import math

from outpace.core.plan import Size
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes


def _shape(layers: int, hidden: int, middle: int, heads: int, kv_heads: int, width: int, **more: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=middle,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_positions=131072,
        tie_embeddings=more.get("tied", False),
        attention_bias=False,
        mlp_bias=False,
    )


NAMED = {  # Llama 3.2's, Llama 3.1's, and Qwen 2.5's 32B with Llama 3's vocabulary
    "1B": _shape(16, 2048, 8192, 32, 8, 64, tied=True),
    "3B": _shape(28, 3072, 8192, 24, 8, 128, tied=True),
    "8B": _shape(32, 4096, 14336, 32, 8, 128),
    "32B": _shape(64, 5120, 27648, 40, 8, 128),
    "70B": _shape(80, 8192, 28672, 64, 8, 128),
}


def size_of(name: str, config: LlamaConfig, weight_bytes: float, kv_bytes: int = 2) -> Size:
    """What a plan needs of a model whose weights take so many bytes each; `kv_bytes`: a number's of keys and values."""
    held = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    embedding = config.vocab_size * config.hidden_size  # of which a pass reads one row a node
    read = held if config.tie_embeddings else held - embedding
    return Size(name, held, read, weight_bytes, config.kv_entries * kv_bytes, config.max_positions)
