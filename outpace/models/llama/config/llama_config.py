"""The sizes of a model of the Llama family, from a Hugging Face config.json; refuses what would come out wrong.

Where a config.json is silent, what transformers takes for its architecture holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import gemma, phi
from outpace.models.llama.config.families import (
    ACTIVATIONS,
    FAMILIES,
    SILU,
    Family,
    model_type_of,
    read_local_layers,
    read_rotary_layers,
    read_windows,
)
from outpace.models.llama.config.fields import flag, number, size, unsupported_field
from outpace.models.llama.config.rope import LongScaling, Rotation, Scaling, YarnScaling, read_rope

# Fields that change the arithmetic, with the values under which they change nothing.
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
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
    "use_bidirectional_attention": (False,),
}
MLP_NORM = "post_attention_layernorm"  # before the MLP, where nothing is normed behind attention


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
    activation: str = SILU  # of the MLP's gates
    query_scale: float = 0.0  # what scores of attention are multiplied by; 0: one over the root of head_dim
    local_theta: float = 0.0  # the rotary base, without scaling, of those layers whose `local_layers` is True
    local_layers: tuple[bool, ...] = ()  # (): none
    sandwich_norms: bool = False  # what attention and the MLP give is normed before it is added
    norm_offset: float = 0.0  # what is added to the stored weights of all norms
    embedding_scale: float = 1.0  # by which embeddings are multiplied where they go in
    rotary_dim: int = 0  # so many entries of a head turn, the first ones; 0: all
    fused: bool = False  # a checkpoint holds queries, keys and values in one matrix, and gates and ups

    @property
    def attention_scale(self) -> float:
        """What scores of attention are multiplied by."""
        return self.query_scale or self.head_dim**-0.5

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The ways in which layers' queries and keys turn: a rotary base, and its scaling."""
        main = Rotation(self.rope_theta, self.rope_scaling, self.rotary_dim)
        return (main, Rotation(self.local_theta)) if any(self.local_layers) else (main,)

    @property
    def mlp_norm(self) -> str:
        """What a checkpoint calls the norm before the MLP."""
        return gemma.MLP_NORM if self.sandwich_norms else MLP_NORM

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

    def rotation(self, layer: int) -> int | None:
        """By which of `rotations` layer `layer` turns; None where it knows no positions."""
        if not self.rotates(layer):
            return None
        return int(self.local_layers[layer]) if self.local_layers else 0

    def gain(self, layer: int) -> float:
        """By how much turning lengthens queries and keys."""
        rotation = self.rotation(layer)
        return 1.0 if rotation is None else self.rotations[rotation].gain

    def of_layers(self, layers: Sequence[int]) -> LlamaConfig:
        """The config of a model of these layers alone."""
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.window(layer) for layer in layers) if self.windows else (),
            rotary_layers=tuple(self.rotates(layer) for layer in layers) if self.rotary_layers else (),
            local_layers=tuple(self.local_layers[layer] for layer in layers) if self.local_layers else (),
        )


def from_dict(config: Mapping[str, Any]) -> LlamaConfig:
    """The sizes in a config.json; UserError names the first field that is missing, senseless or not supported."""
    model_type = model_type_of(config)
    family = FAMILIES[model_type]
    fields: Mapping[str, Any] = {**family.defaults, **config}
    fields, part = phi.read_part(fields) if family.is_phi else (fields, 1.0)
    _refuse_unsupported(fields, family)
    fields = gemma.with_flat_rope(fields) if family.is_gemma else fields
    theta, scaling = read_rope(fields, family.theta)
    num_layers, max_positions = size(fields, "num_hidden_layers"), _max_positions(fields, scaling)
    rotary_layers = read_rotary_layers(model_type, fields, num_layers)
    heads = _heads(fields)
    return LlamaConfig(
        vocab_size=size(fields, "vocab_size"),
        intermediate_size=size(fields, "intermediate_size"),
        num_layers=num_layers,
        **heads,
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
        activation=family.activation,
        rotary_dim=_rotary_dim(part, heads["head_dim"], scaling),
        fused=family.is_phi,
        local_layers=read_local_layers(model_type, fields, num_layers),
        **(gemma.read_constants(fields) if family.is_gemma else {}),
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
    if config.fused:
        qkv = {"qkv_proj": (queries + 2 * keys, hidden)}
        mlp = {"gate_up_proj": (2 * middle, hidden), "down_proj": (hidden, middle)}
    norms = [
        "input_layernorm",
        config.mlp_norm,
        *((gemma.ATTENTION_NORM, gemma.MLP_OUTPUT_NORM) if config.sandwich_norms else ()),
    ]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
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


def _refuse_unsupported(fields: Mapping[str, Any], family: Family) -> None:
    activations = dict.fromkeys(("hidden_act", "hidden_activation"), ACTIVATIONS[family.activation])
    for name, harmless in (REFUSED_UNLESS | activations).items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported_field(f"{name} {value!r:.200}")


def _heads(fields: Mapping[str, Any]) -> dict[str, Any]:
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
    """How long a text may be. YaRN is often written beside the unscaled length, which it is there to exceed; beyond it
    LongRoPE turns otherwise, which keys that are stored already would have to follow."""
    declared = size(fields, "max_position_embeddings", 2048)
    if isinstance(scaling, LongScaling):
        return min(declared, scaling.original)
    return max(declared, int(scaling.original * scaling.factor)) if isinstance(scaling, YarnScaling) else declared


def _rotary_dim(part: float, head_dim: int, scaling: Scaling | None) -> int:
    """How many entries of a head turn, 0: all; UserError where a scaling has not a factor for each pair of them."""
    count = phi.rotary_dim(part, head_dim)
    pairs = (count or head_dim) // 2
    if isinstance(scaling, LongScaling) and len(scaling.factors) != pairs:
        raise UserError(f"short_factor has {len(scaling.factors)} entries, it must have one for each of {pairs} pairs")
    return count


def _draft_window(fields: Mapping[str, Any]) -> int:
    """Of a draft that `outpace distill` made."""
    ours = fields.get("outpace")
    return size(ours, "draft_window", 0) if isinstance(ours, Mapping) else 0


def _bias(fields: Mapping[str, Any], name: str, model_type: str, fixed: bool | None, is_ignored: bool = False) -> bool:
    """Whether there is a bias: as the architecture has it, else as the config says."""
    said = flag(fields, name)
    if said and fixed is False and not is_ignored:
        raise unsupported_field(f"{name} {said!r:.200} of the model_type {model_type!r}")
    return said if fixed is None else fixed
