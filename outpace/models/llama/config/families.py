"""The architectures of the Llama family, by the names that a config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import gemma, phi
from outpace.models.llama.config.fields import unsupported

SILU, GELU = "silu", "gelu_pytorch_tanh"  # what an MLP's gates go through
ACTIVATIONS = {SILU: ("silu", "swish"), GELU: ("gelu_pytorch_tanh",)}  # their names in a config.json


@dataclass(frozen=True)
class Family:
    """An architecture: what its weights hold, and what stands for fields that a config.json leaves out.

    Biases: True and False where the architecture has no choice, None where the config says.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norm: bool = False
    theta: float = 10000.0
    activation: str = SILU
    is_gemma: bool = False
    is_phi: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
        mlp_bias=False,
        head_norm=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        theta=2000000.0,
    ),
    gemma.MODEL_TYPE: Family(
        gemma.ARCHITECTURE,
        gemma.DEFAULTS,
        mlp_bias=False,
        head_norm=True,
        theta=gemma.THETA,
        activation=GELU,
        is_gemma=True,
    ),
    phi.MODEL_TYPE: Family(
        phi.ARCHITECTURE, phi.DEFAULTS, qkv_bias=False, output_bias=False, mlp_bias=False, is_phi=True
    ),
}


def model_type_of(config: Mapping[str, Any]) -> str:
    """The name of its family in FAMILIES; UserError where what it says of itself does not agree or is not known."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"architectures is {named!r:.200}, it must be a list of names")
    by_architecture = {family.architecture: model_type for model_type, family in FAMILIES.items()}
    model_type = config.get("model_type") or by_architecture.get(named[0] if named else "")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if model_type is None and named:
            raise unsupported(f"architectures {named!r:.200} (only {', '.join(sorted(by_architecture))})")
        raise unsupported(f"model_type {model_type!r:.80} (only {', '.join(sorted(FAMILIES))})")
    if named and FAMILIES[model_type].architecture not in named:
        expected = FAMILIES[model_type].architecture
        raise unsupported(f"architectures {named!r:.200} with model_type {model_type!r:.80} (only {expected})")
    return model_type
