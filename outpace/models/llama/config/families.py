"""The architectures of the Llama family by their names in config.json, and how their layers differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import experts, gemma, lfm2, phi, qwen35
from outpace.models.llama.config.experts import ExpertLayers
from outpace.models.llama.config.fields import SLIDING, flag, read_layer_types, size, unsupported_field
from outpace.models.llama.config.recurrence import PARTS, Recurrence

Fields = Mapping[str, Any]
SILU, GELU = "silu", "gelu_pytorch_tanh"  # activations of the MLP's gate
ACTIVATIONS = {SILU: ("silu", "swish"), GELU: ("gelu_pytorch_tanh",)}  # their names in a config.json


def no_layer(fields: Fields, rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window: none. `rotates`: whether each layer is rotated."""
    return [False] * len(rotates)


def all_layers(fields: Fields, rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window: all."""
    return [True] * len(rotates)


def late_layers(fields: Fields, rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window: those from max_window_layers on."""
    first = size(fields, "max_window_layers", 28, smallest=0)
    return [layer >= first for layer in range(len(rotates))]


def even_layers(fields: Fields, rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window: every second one, from the first on."""
    return [layer % 2 == 0 for layer in range(len(rotates))]


def early_even_layers(fields: Fields, rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window: every second one, from the first on, below max_window_layers."""
    return [
        even and not late for even, late in zip(even_layers(fields, rotates), late_layers(fields, rotates), strict=True)
    ]


@dataclass(frozen=True)
class Family:
    """An architecture: the contents of its checkpoints, and defaults of fields that a config.json leaves out.

    Biases: True or False if the architecture fixes them, None if the config decides. `fused`: queries, keys and values
    are one matrix, gates and ups another. `slides`: which layers have a sliding window. `by_layer`: the config's
    layer_types may say otherwise. `always_slides`: use_sliding_window is ignored. `skips_rotation`: no_rope_layers are
    honoured. `prepare` rewrites fields that have a form of their own; `constants` reads fields of LlamaConfig that
    other architectures do not set. `local_rotation`: layers with a window have a rotary base of their own.
    `recurrence` reads the sizes of recurrent layers, and which layers these are; `experts` those of mixtures of
    experts. `own_name`: Llama's name of a tensor; `stored_name`: the checkpoint's, from Llama's.
    """

    architecture: str
    defaults: Fields = field(default_factory=dict)
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norm: bool = False
    theta: float = 10000.0
    activation: str = SILU
    fused: bool = False
    slides: Callable[[Fields, Sequence[bool]], list[bool]] = no_layer
    by_layer: bool = False
    always_slides: bool = False
    skips_rotation: bool = False
    local_rotation: bool = False
    prepare: Callable[[Fields], Fields] = dict
    constants: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    recurrence: Callable[[Fields, int], tuple[Recurrence, tuple[bool, ...]]] | None = None
    experts: Callable[[Fields, int], ExpertLayers] | None = None
    own_name: Callable[[str], str] = str
    stored_name: Callable[[str], str] = str


NO_BIASES: dict[str, Any] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
QWEN2 = Family(
    "Qwen2ForCausalLM",
    {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    **NO_BIASES | {"qkv_bias": True},
    slides=late_layers,
    by_layer=True,
)
QWEN35 = Family(
    qwen35.ARCHITECTURE,
    qwen35.DEFAULTS,
    **NO_BIASES,
    head_norm=True,
    prepare=qwen35.with_flat_rope,
    constants=qwen35.read_constants,
    recurrence=qwen35.read_recurrence,
)
LFM2 = Family(
    lfm2.ARCHITECTURE,
    lfm2.DEFAULTS,
    **NO_BIASES,
    head_norm=True,
    theta=lfm2.THETA,
    prepare=lfm2.with_usual_fields,
    recurrence=lfm2.read_recurrence,
    own_name=lfm2.own_name,
    stored_name=lfm2.stored_name,
)
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        **NO_BIASES,
        slides=all_layers,
        always_slides=True,
    ),
    "qwen2": QWEN2,
    "mimo": replace(QWEN2, architecture="MiMoForCausalLM"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
        mlp_bias=False,
        head_norm=True,
        slides=late_layers,
        by_layer=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        theta=2000000.0,
        slides=lambda fields, rotates: [not rotated for rotated in rotates],
        by_layer=True,
        skips_rotation=True,
    ),
    gemma.MODEL_TYPE: Family(
        gemma.ARCHITECTURE,
        gemma.DEFAULTS,
        mlp_bias=False,
        head_norm=True,
        theta=gemma.THETA,
        activation=GELU,
        slides=gemma.sliding_layers,
        by_layer=True,
        always_slides=True,
        local_rotation=True,
        prepare=gemma.with_flat_rope,
        constants=gemma.read_constants,
    ),
    phi.MODEL_TYPE: Family(
        phi.ARCHITECTURE,
        phi.DEFAULTS,
        **NO_BIASES,
        fused=True,
        slides=all_layers,
        always_slides=True,
        prepare=phi.with_rotated_share,
    ),
    qwen35.MODEL_TYPE: QWEN35,
    lfm2.MODEL_TYPE: LFM2,
    "qwen2_moe": replace(
        QWEN2,
        architecture="Qwen2MoeForCausalLM",
        defaults={**QWEN2.defaults, "num_key_value_heads": 16, "use_sliding_window": False},
        slides=early_even_layers,
        prepare=lambda fields: {**fields, "sliding_window": fields.get("sliding_window") or None},  # 0: none
        experts=experts.read_qwen2_moe,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False},
        mlp_bias=False,
        head_norm=True,
        slides=all_layers,
        experts=experts.read_qwen3_moe,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {"num_key_value_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        mlp_bias=False,
        head_norm=True,
        constants=lambda fields: {"joint_norm": True},
        experts=experts.read_olmoe,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **NO_BIASES,
        theta=1e6,
        slides=all_layers,
        always_slides=True,
        experts=experts.read_mixtral,
        own_name=experts.own_name,
        stored_name=partial(experts.stored_name, "block_sparse_moe"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **{"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            **{"attention_bias": True, "sliding_window": 128},
        },
        mlp_bias=False,
        theta=150000.0,
        slides=even_layers,
        by_layer=True,
        always_slides=True,
        constants=lambda fields: {"sinks": True},
        experts=experts.read_gpt_oss,
        own_name=experts.own_name,
    ),
    qwen35.MOE_TYPE: replace(
        QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        defaults=qwen35.DEFAULTS | {"num_key_value_heads": 2},
        experts=experts.read_qwen3_5_moe,
    ),
    qwen35.NEXT_TYPE: replace(
        QWEN35,
        architecture=qwen35.NEXT_ARCHITECTURE,
        defaults=qwen35.NEXT_DEFAULTS,
        recurrence=partial(qwen35.read_recurrence, fused=tuple(PARTS)),
        experts=experts.read_qwen3_next,
    ),
    "lfm2_moe": replace(
        LFM2,
        architecture="Lfm2MoeForCausalLM",
        defaults=lfm2.DEFAULTS | {"hidden_size": 2048, "block_auto_adjust_ff_dim": False},
        experts=experts.read_lfm2_moe,
    ),
}
REFUSED = {  # architectures that are known, and why they are not run
    "qwen4_exp": "it has hyper-connections, embeddings of n-grams and sparse attention",
    "lfm3": "its layers have windows, gates and norms that LFM2 does not have",
    "gemma3n": "its layers have several residual streams and sparse MLPs",
}


def model_type_of(config: Fields) -> str:
    """Return a config's key in FAMILIES; UserError if its names are unknown or contradict each other."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"architectures is {named!r:.200}, it must be a list of names")
    by_architecture = {family.architecture: model_type for model_type, family in FAMILIES.items()}
    model_type = config.get("model_type") or by_architecture.get(named[0] if named else "")
    if model_type is None and named:
        raise unsupported_field(f"architectures {named!r:.200} (only {', '.join(sorted(by_architecture))})")
    if reason := why_refused(model_type):
        raise unsupported_field(f"the architecture {model_type}: {reason}. It")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unsupported_field(f"model_type {model_type!r:.80} (only {', '.join(sorted(FAMILIES))})")
    expected = FAMILIES[model_type].architecture
    without_output = expected.replace("ForCausalLM", "Model")  # which a checkpoint with tied embeddings may name
    if named and expected not in named and without_output not in named:
        raise unsupported_field(f"architectures {named!r:.200} with model_type {model_type!r:.80} (only {expected})")
    return model_type


def why_refused(name: object) -> str | None:
    """Return why an architecture that is known is not run; None for others."""
    spelled = str(name).removesuffix("_text").replace("_", "")
    return next((reason for one, reason in REFUSED.items() if one.replace("_", "") == spelled), None)


def ties_embeddings(config: Fields) -> bool:
    """Return whether a config.json says, or implies, that the output layer is the embedding."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    said = {**(family.defaults if family else {}), **config}
    return said.get("tie_word_embeddings") is True


def read_rotary_layers(model_type: str, fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer is rotated; () if all are."""
    listed = fields.get("no_rope_layers")
    if not FAMILIES[model_type].skips_rotation:
        if listed not in (None, []):
            raise unsupported_field(f"no_rope_layers {listed!r:.200} of the model_type {model_type!r}")
        return ()
    if listed is None:
        interval = size(fields, "no_rope_layer_interval", 4)
        listed = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(entry not in (0, 1) for entry in listed):
        raise UserError(f"no_rope_layers is {listed!r:.200}, it must be a list of 1 (rotated) and 0, one a layer")
    rotates = tuple(entry == 1 for entry in listed[:num_layers])
    return () if all(rotates) else rotates


def read_local_layers(model_type: str, fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer uses the local rotary base; () if none does."""
    family = FAMILIES[model_type]
    if not family.local_rotation:
        return ()
    types = read_layer_types(fields, num_layers, SLIDING)
    slides = family.slides(fields, [True] * num_layers) if types is None else [kind == SLIDING for kind in types]
    return tuple(slides) if any(slides) else ()


def read_windows(
    model_type: str, fields: Fields, num_layers: int, max_positions: int, rotary_layers: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return each layer's window, None for full attention; () if all layers have full attention."""
    family = FAMILIES[model_type]
    if family.recurrence:
        return ()
    window = _window(model_type, fields, max_positions)
    types = read_layer_types(fields, num_layers, SLIDING)
    slides = family.slides(fields, rotary_layers or [True] * num_layers)
    if types is not None:
        named = [kind == SLIDING for kind in types]
        if any(named) and (window is None if family.by_layer else named != slides):
            used = "no sliding_window in use" if window is None else f"sliding_window {window}"
            raise unsupported_field(f"layer_types {types!r:.200} of the model_type {model_type!r} with {used}")
        slides = named if family.by_layer else slides
    if window is None or window >= max_positions or not any(slides):
        return ()
    return tuple(window if slid else None for slid in slides)


def _window(model_type: str, fields: Fields, max_positions: int) -> int | None:
    if fields.get("sliding_window") is None:
        return None
    window, family = size(fields, "sliding_window"), FAMILIES[model_type]
    is_used = flag(fields, "use_sliding_window", not family.by_layer)
    if family.slides is no_layer and is_used and window < max_positions:
        raise unsupported_field(f"sliding_window {window} of the model_type {model_type!r}")
    return window if is_used or family.always_slides else None
