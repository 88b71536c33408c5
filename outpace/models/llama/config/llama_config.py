"""Sizes of a model of the Llama family from a Hugging Face config.json; unsupported fields are refused.

Defaults of missing fields are those of transformers for the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import gemma, phi
from outpace.models.llama.config.experts import COUNTS, Experts
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
from outpace.models.llama.config.fields import ReadFields, flag, number, size, unsupported_field
from outpace.models.llama.config.recurrence import INPUTS, Recurrence
from outpace.models.llama.config.rope import LongScaling, Rotation, Scaling, YarnScaling, read_rope

ENTRY_BYTES = {"float32": 4, "float16": 2, "int8": 1}  # of keys and values
SCALED = 32  # int8 entries of a head that share a scale in bfloat16
# Fields that change the arithmetic, with the values that are supported because they change nothing.
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
    "is_causal": (True,),
    "attention_chunk_size": (),
    "per_layer_config": ({},),
}
MLP_NORM = "post_attention_layernorm"  # the norm before the MLP, if attention has no output norm


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
    output_bias: bool = False  # of the attention's output projection
    head_norm: bool = False  # whether each head's queries and keys are normed before rotation
    rope_scaling: Scaling | None = None
    windows: tuple[int | None, ...] = ()  # number of tokens that a layer sees, itself included; None and (): all
    rotary_layers: tuple[bool, ...] = ()  # whether a layer's queries and keys are rotated; (): all are
    draft_window: int = 0  # number of trailing tokens it reads when it drafts; 0: the whole text
    activation: str = SILU  # of the MLP's gate
    query_scale: float = 0.0  # factor of attention scores; 0: 1 / sqrt(head_dim)
    local_theta: float = 0.0  # rotary base, without scaling, of the `local_layers`
    local_layers: tuple[bool, ...] = ()  # (): none
    sandwich_norms: bool = False  # whether outputs of attention and MLP are normed before they are added
    norm_offset: float = 0.0  # added to the stored weights of all norms
    embedding_scale: float = 1.0  # factor of the input embeddings
    rotary_dim: int = 0  # number of leading entries of a head that are rotated; 0: all
    fused: bool = False  # whether a checkpoint fuses queries, keys and values, and gates and ups
    takes_features: bool = False  # EAGLE-3: attention reads a token's embedding and a feature, which is the residual
    norms_features: bool = True  # whether the feature has a norm in the layer
    norms_output: bool = True  # whether the output layer's input is normed
    causal_layers: tuple[bool, ...] = ()  # of a block: where a node sees no later ones, whatever its session says
    output_gate: bool = False  # whether heads are multiplied by the sigmoid of a gate, projected with the queries
    recurrence: Recurrence | None = None  # sizes of the recurrent layers
    recurrent_layers: tuple[bool, ...] = ()  # (): none
    experts: Experts | None = None  # of the layers whose MLP is a mixture of experts
    expert_layers: tuple[bool, ...] = ()  # (): none
    joint_norm: bool = False  # whether all heads' queries, and all keys, are normed as one vector, not by head
    sinks: bool = False  # whether each head has a score that takes a share of the softmax and adds nothing

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return self.query_scale or self.head_dim**-0.5

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The rotations that layers use, each a rotary base with its scaling."""
        main = Rotation(self.rope_theta, self.rope_scaling, self.rotary_dim)
        return (main, Rotation(self.local_theta)) if any(self.local_layers) else (main,)

    @property
    def mlp_norm(self) -> str:
        """Name of the norm before the MLP in a checkpoint."""
        return gemma.MLP_NORM if self.sandwich_norms else MLP_NORM

    @property
    def kv_entries(self) -> int:
        """Number of entries of a token's keys and values, all layers together."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim

    @property
    def num_recurrent_layers(self) -> int:
        return sum(self.recurrent_layers)

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_recurrent_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of a session's recurrent states, in float32."""
        return 4 * self.recurrence.state_size * self.num_recurrent_layers if self.recurrence else 0

    def is_causal(self, layer: int) -> bool:
        return bool(self.causal_layers) and self.causal_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    def has_experts(self, layer: int) -> bool:
        return bool(self.expert_layers) and self.expert_layers[layer]

    def token_bytes(self, kv_dtype: str) -> int:
        """Return the bytes of keys and values per token, all layers together."""
        scales = 2 * num_scales(self.head_dim) if kv_dtype == "int8" else 0
        return self.kv_entries // self.head_dim * (self.head_dim * ENTRY_BYTES[kv_dtype] + scales)

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer sees, the node itself included; None: all."""
        return self.windows[layer] if self.windows else None

    def rotates(self, layer: int) -> bool:
        return self.rotary_layers[layer] if self.rotary_layers else True

    def rotation(self, layer: int) -> int | None:
        """Return the index in `rotations` of a layer's rotation; None for a layer without positions."""
        if not self.rotates(layer):
            return None
        return int(self.local_layers[layer]) if self.local_layers else 0

    def gain(self, layer: int) -> float:
        """Return the factor by which rotation lengthens queries and keys."""
        rotation = self.rotation(layer)
        return 1.0 if rotation is None else self.rotations[rotation].gain

    def of_layers(self, layers: Sequence[int]) -> LlamaConfig:
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.window(layer) for layer in layers) if self.windows else (),
            rotary_layers=tuple(self.rotates(layer) for layer in layers) if self.rotary_layers else (),
            local_layers=tuple(self.local_layers[layer] for layer in layers) if self.local_layers else (),
            recurrent_layers=tuple(map(self.is_recurrent, layers)) if self.recurrent_layers else (),
            expert_layers=tuple(map(self.has_experts, layers)) if self.expert_layers else (),
        )


def from_dict(config: Mapping[str, Any], asked: set[str] | None = None) -> LlamaConfig:
    """Read a config.json; UserError names the first field that is missing, invalid or unsupported. The names of all
    fields that count are added to `asked`."""
    model_type = model_type_of(config)
    family = FAMILIES[model_type]
    fields = ReadFields(family.prepare({**family.defaults, **config}), asked)
    _refuse_unsupported(fields, family)
    theta, scaling = read_rope(fields, family.theta)
    num_layers, max_positions = size(fields, "num_hidden_layers"), _max_positions(fields, scaling)
    rotary_layers = read_rotary_layers(model_type, fields, num_layers)
    heads, ours = _heads(fields), fields.get("outpace")
    recurrence, recurrent_layers = family.recurrence(fields, num_layers) if family.recurrence else (None, ())
    if not any(recurrent_layers):
        recurrence, recurrent_layers = None, ()
    experts, expert_layers = family.experts(fields, num_layers) if family.experts else (None, ())
    if not any(expert_layers):
        experts, expert_layers = None, ()
    return LlamaConfig(
        vocab_size=size(fields, "vocab_size"),
        intermediate_size=size(fields, "intermediate_size", experts.width if experts and all(expert_layers) else None),
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
        draft_window=size(ours, "draft_window", 0) if isinstance(ours, Mapping) else 0,  # of `outpace distill`
        activation=family.activation,
        rotary_dim=_rotary_dim(fields.get(phi.SHARE, 1.0), heads["head_dim"], scaling),
        fused=family.fused,
        local_layers=read_local_layers(model_type, fields, num_layers),
        recurrence=recurrence,
        recurrent_layers=recurrent_layers,
        experts=experts,
        expert_layers=expert_layers,
        **family.constants(fields),
    )


def num_scales(head_dim: int) -> int:
    """Return the number of scales of one head's key, or value, in int8.

    KIVI (arXiv:2402.02750) scales values by token and keys by channel; by token for both, appended text does not change
    what is stored, and the Q8_0 cache of llama.cpp does the same.
    """
    return -(-head_dim // SCALED)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in a checkpoint (Hugging Face names, [out, in])."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: LlamaConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, middle = config.hidden_size, config.intermediate_size
    gates = {"gate_up_proj": 2 * middle} if config.fused else {"gate_proj": middle, "up_proj": middle}
    norms = ["input_layernorm", config.mlp_norm]
    if config.sandwich_norms:
        norms += [gemma.ATTENTION_NORM, gemma.MLP_OUTPUT_NORM]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    shapes |= _recurrent_shapes(config) if config.is_recurrent(layer) else _attention_shapes(config)
    if config.has_experts(layer):
        return shapes | expert_shapes(config)
    shapes |= _matrix_shapes("mlp", gates, hidden, config.mlp_bias)
    return shapes | _matrix_shapes("mlp", {"down_proj": hidden}, middle, config.mlp_bias)


def _attention_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated = 2 * queries if config.output_gate else queries
    qkv = {"qkv_proj": queries + 2 * keys} if config.fused else {"q_proj": gated, "k_proj": keys, "v_proj": keys}
    shapes = _matrix_shapes("self_attn", qkv, config.hidden_size, config.attention_bias)
    shapes |= _matrix_shapes("self_attn", {"o_proj": config.hidden_size}, queries, config.output_bias)
    if config.head_norm:
        widths = (queries, keys) if config.joint_norm else (config.head_dim, config.head_dim)
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name, width in zip("qk", widths, strict=True)}
    return shapes | ({"self_attn.sinks": (config.num_heads,)} if config.sinks else {})


def expert_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixture of experts' tensors. Files that store all experts as one tensor are read under
    these names too."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    shapes = _matrix_shapes("mlp", {"gate": experts.count}, hidden, experts.has_biases)
    if experts.corrects_choice:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    parts = [(f"mlp.experts.{number}", experts.width, experts.has_biases) for number in range(experts.count)]
    if experts.shared_width:
        parts.append(("mlp.shared_expert", experts.shared_width, False))
        shapes |= {"mlp.shared_expert_gate.weight": (1, hidden)} if experts.gates_shared else {}
    for part, width, has_biases in parts:
        shapes |= _matrix_shapes(part, {"gate_proj": width, "up_proj": width}, hidden, has_biases)
        shapes |= _matrix_shapes(part, {"down_proj": hidden}, width, has_biases)
    return shapes


def _recurrent_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    sizes, hidden = config.recurrence, config.hidden_size
    assert sizes is not None
    if not sizes.is_delta_net:
        shapes = _matrix_shapes("conv", {"in_proj": 3 * hidden, "out_proj": hidden}, hidden, False)
        return shapes | {"conv.conv.weight": (sizes.channels, 1, sizes.filter_length)}
    inputs = {f"{INPUTS}{name}.weight": (rows, hidden) for name, rows in sizes.input_rows().items()}
    return {
        **inputs,
        "linear_attn.conv1d.weight": (sizes.channels, 1, sizes.filter_length),
        "linear_attn.A_log": (sizes.value_heads,),
        "linear_attn.dt_bias": (sizes.value_heads,),
        "linear_attn.norm.weight": (sizes.value_depth,),
        "linear_attn.out_proj.weight": (hidden, sizes.value_width),
    }


def _matrix_shapes(part: str, matrices: Mapping[str, int], inputs: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of matrices with these outputs, and of their biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, outputs in matrices.items():
        shapes[f"{part}.{name}.weight"] = (outputs, inputs)
        if has_bias:
            shapes[f"{part}.{name}.bias"] = (outputs,)
    return shapes


def _refuse_unsupported(fields: Mapping[str, Any], family: Family) -> None:
    activations = dict.fromkeys(("hidden_act", "hidden_activation"), ACTIVATIONS[family.activation])
    for name, harmless in (REFUSED_UNLESS | activations).items():
        if family.experts and name in COUNTS:
            continue
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported_field(f"{name} {value!r:.200}")


def _heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size, num_heads = size(fields, "hidden_size"), size(fields, "num_attention_heads")
    num_kv_heads = size(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        allowed = f"it must be a multiple of num_key_value_heads {num_kv_heads}"
        raise UserError(f"num_attention_heads is {num_heads}, {allowed}")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(f"hidden_size is {hidden_size}, it must be a multiple of num_attention_heads {num_heads}")
    head_dim = size(fields, "head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise UserError(f"head_dim is {head_dim}, it must be even")
    return {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _max_positions(fields: Mapping[str, Any], scaling: Scaling | None) -> int:
    """Return the maximum length of a text.

    With YaRN, a config often states the unscaled length, which YaRN exists to exceed. LongRoPE ends at its original
    length: beyond it the frequencies change, and stored keys would have to be rotated again.
    """
    declared = size(fields, "max_position_embeddings", 2048)
    if isinstance(scaling, LongScaling):
        return min(declared, scaling.original)
    return max(declared, int(scaling.original * scaling.factor)) if isinstance(scaling, YarnScaling) else declared


def _rotary_dim(part: float, head_dim: int, scaling: Scaling | None) -> int:
    """Return how many entries of a head are rotated, 0: all; UserError if a scaling lacks factors for their pairs."""
    count = phi.rotary_dim(part, head_dim)
    pairs = (count or head_dim) // 2
    if isinstance(scaling, LongScaling) and len(scaling.factors) != pairs:
        raise UserError(f"short_factor has {len(scaling.factors)} entries, it must have one for each of {pairs} pairs")
    return count


def _bias(fields: Mapping[str, Any], name: str, model_type: str, fixed: bool | None, is_ignored: bool = False) -> bool:
    """Return whether there is a bias: the architecture decides, else the config."""
    said = flag(fields, name)
    if said and fixed is False and not is_ignored:
        raise unsupported_field(f"{name} {said!r:.200} of the model_type {model_type!r}")
    return said if fixed is None else fixed
