"""The sizes of a model of the Llama family, from a Hugging Face config.json; refuses what would come out wrong.

Where a config.json is silent, what transformers takes for its architecture holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.fields import flag, number, size, unsupported
from outpace.models.llama.layer_kinds import read_rotary_layers, read_windows
from outpace.models.llama.rope import Scaling, YarnScaling, read_rope

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
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a model; sizes count elements, `max_positions` counts tokens."""

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
    attention_bias: bool  # of queries, keys and values
    mlp_bias: bool
    output_bias: bool = False  # of the attention's output
    head_norm: bool = False  # every head's queries and keys are normed before they turn
    rope_scaling: Scaling | None = None
    windows: tuple[int | None, ...] = ()  # tokens that a layer sees, itself included; None and (): all
    rotary_layers: tuple[bool, ...] = ()  # whether a layer's queries and keys turn; (): all do
    draft_window: int = 0  # tokens of a text's end that suffice it to draft; 0: it is to read the whole text

    @property
    def kv_entries(self) -> int:
        """Numbers that a token's keys and values are, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many tokens layer `layer` sees, the node itself included; None: all."""
        return self.windows[layer] if self.windows else None

    def rotates(self, layer: int) -> bool:
        """Whether layer `layer` knows positions."""
        return self.rotary_layers[layer] if self.rotary_layers else True

    def gain(self, layer: int) -> float:
        """By how much turning lengthens queries and keys."""
        return self.rope_scaling.gain if self.rope_scaling and self.rotates(layer) else 1.0

    def of_layers(self, layers: Sequence[int]) -> LlamaConfig:
        """The config of a model of these layers alone."""
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.window(layer) for layer in layers) if self.windows else (),
            rotary_layers=tuple(self.rotates(layer) for layer in layers) if self.rotary_layers else (),
        )


def from_dict(config: Mapping[str, Any]) -> LlamaConfig:
    """The sizes in a config.json; UserError names the first field that is missing, senseless or not supported."""
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    fields = {**family.defaults, **config}
    _refuse_unsupported(fields)
    theta, scaling = read_rope(fields, family.theta)
    num_layers, max_positions = size(fields, "num_hidden_layers"), _max_positions(fields, scaling)
    rotary_layers = read_rotary_layers(model_type, fields, num_layers)
    return LlamaConfig(
        vocab_size=size(fields, "vocab_size"),
        intermediate_size=size(fields, "intermediate_size"),
        num_layers=num_layers,
        **_heads(fields),
        rms_norm_eps=number(fields, "rms_norm_eps", 1e-6, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=max_positions,
        tie_embeddings=flag(fields, "tie_word_embeddings"),
        attention_bias=_bias(fields, "attention_bias", model_type, family.qkv_bias),
        output_bias=_bias(fields, "attention_bias", model_type, family.output_bias, family.qkv_bias is True),
        mlp_bias=_bias(fields, "mlp_bias", model_type, family.mlp_bias),
        head_norm=family.head_norm,
        windows=read_windows(model_type, fields, num_layers, max_positions, rotary_layers),
        rotary_layers=rotary_layers,
        draft_window=_draft_window(fields),
    )


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a checkpoint of this config holds (Hugging Face names, [out, in])."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    mlp = {"gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    parts = (
        ("self_attn", qkv, config.attention_bias),
        ("self_attn", {"o_proj": (hidden, queries)}, config.output_bias),
        ("mlp", mlp, config.mlp_bias),
    )
    for part, matrices, has_bias in parts:
        for name, shape in matrices.items():
            shapes[f"{part}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{part}.{name}.bias"] = shape[:1]
    if config.head_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _model_type(config: Mapping[str, Any]) -> str:
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


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, harmless in REFUSED_UNLESS.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(f"{name} {value!r:.200}")


def _heads(fields: Mapping[str, Any]) -> dict[str, int]:
    hidden_size, num_heads = size(fields, "hidden_size"), size(fields, "num_attention_heads")
    num_kv_heads = size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"num_attention_heads is {num_heads}, it must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(f"hidden_size is {hidden_size}, it must be a multiple of num_attention_heads {num_heads}")
    head_dim = size(fields, "head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise UserError(f"head_dim is {head_dim}, it must be even")
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return sizes | {"head_dim": head_dim}


def _max_positions(fields: Mapping[str, Any], scaling: Scaling | None) -> int:
    """How long a text may be; YaRN is often written beside the unscaled length, which it is there to exceed."""
    declared = size(fields, "max_position_embeddings", 2048)
    return max(declared, int(scaling.original * scaling.factor)) if isinstance(scaling, YarnScaling) else declared


def _draft_window(fields: Mapping[str, Any]) -> int:
    """Of a draft that `outpace distill` made."""
    ours = fields.get("outpace")
    return size(ours, "draft_window", 0) if isinstance(ours, Mapping) else 0


def _bias(fields: Mapping[str, Any], name: str, model_type: str, fixed: bool | None, is_ignored: bool = False) -> bool:
    """Whether there is a bias: as the architecture has it, else as the config says."""
    said = flag(fields, name)
    if said and fixed is False and not is_ignored:
        raise unsupported(f"{name} {said!r:.200} of the model_type {model_type!r}")
    return said if fixed is None else fixed
