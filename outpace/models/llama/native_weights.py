"""Lays the weights of a layer out for the native kernels: fused, padded to whole groups, rounded to int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.lazy import torch
from outpace.models.llama.config import LlamaConfig

if TYPE_CHECKING:
    from torch import Tensor

Fetch = Callable[[str], np.ndarray]


def fetcher(weight: Callable[[str], Tensor | np.ndarray]) -> Fetch:
    """Weights as float32 arrays, row by row in memory."""

    def fetch(name: str) -> np.ndarray:
        held = weight(name)
        if not isinstance(held, np.ndarray):
            held = held.to(device="cpu", dtype=torch.float32).numpy()
        return np.ascontiguousarray(held, np.float32)

    return fetch


def load_layer(kernels: Any, config: LlamaConfig, number: int, fetch: Fetch) -> Any:
    """Layer `number` from Hugging Face weight names, as the kernels hold it."""
    prefix = f"model.layers.{number}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    names = ("q_norm", "k_norm") if config.head_norm else ()
    norms = [fetch(f"{attention}{name}.weight").tolist() for name in names] or [[], []]
    return kernels.Layer(
        fetch(prefix + "input_layernorm.weight"),
        fetch(prefix + "post_attention_layernorm.weight"),
        _qkv(kernels, config, attention, fetch),
        _output(kernels, config, attention, fetch),
        _gate_up(kernels, config, mlp, fetch),
        _down(kernels, config, mlp, fetch),
        query_norm=norms[0],
        key_norm=norms[1],
        turns=config.rotates(number),
    )


def middle_size(kernels: Any, config: LlamaConfig) -> int:
    """The MLP's width in whole groups; what is added computes silu(0) * 0."""
    return -(-config.intermediate_size // kernels.GROUP) * kernels.GROUP


def _qkv(kernels: Any, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    bias = [fetch(name + ".bias") for name in names] if config.attention_bias else [np.zeros(0, np.float32)]
    weight = np.concatenate([fetch(name + ".weight") for name in names])
    return kernels.Matrix(weight, np.concatenate(bias).tolist())


def _output(kernels: Any, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    """Each head's inputs are padded to whole groups, so that a head can be rounded as soon as it is computed."""
    weight = fetch(prefix + "o_proj.weight").reshape(config.hidden_size, config.num_heads, config.head_dim)
    padded = _padded(weight, 2, -config.head_dim % kernels.GROUP).reshape(config.hidden_size, -1)
    return kernels.Matrix(padded, fetch(prefix + "o_proj.bias").tolist() if config.output_bias else [])


def _gate_up(kernels: Any, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    """16 gates, then the 16 ups that they gate, and so on: both lie in one panel."""
    middle = middle_size(kernels, config)

    def woven(kind: str) -> np.ndarray:
        parts = [fetch(f"{prefix}{name}_proj.{kind}") for name in ("gate", "up")]
        padded = [_padded(part, 0, middle - len(part)) for part in parts]
        both = np.stack([part.reshape(-1, kernels.LANES, *part.shape[1:]) for part in padded], axis=1)
        return both.reshape(2 * middle, *parts[0].shape[1:])

    return kernels.Matrix(woven("weight"), woven("bias").tolist() if config.mlp_bias else [])


def _down(kernels: Any, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    weight = fetch(prefix + "down_proj.weight")
    weight = _padded(weight, 1, middle_size(kernels, config) - config.intermediate_size)
    return kernels.Matrix(weight, fetch(prefix + "down_proj.bias").tolist() if config.mlp_bias else [])


def _padded(weight: np.ndarray, axis: int, count: int) -> np.ndarray:
    """With so many zeros behind an axis; the same array where there are none, which mostly is so."""
    if not count:
        return weight
    return np.pad(weight, [(0, count if place == axis else 0) for place in range(weight.ndim)])
