"""Mixtures of experts: their sizes, and how a router chooses and weighs them; read from a config.json.

A router scores a layer's experts for each token. The `chosen` best are applied, ties going to the lower number, and
their outputs are multiplied by weights and added in the order of their numbers, then the shared expert's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config.fields import flag, number, size, unsupported_field

SOFTMAX, SIGMOID = "softmax", "sigmoid"  # how logits become scores
SIGMOID_FLOOR = 1e-6  # added to the sum by which weights that are sigmoids are divided
SWISH_FACTOR = 1.702  # of a limited gate's sigmoid
LARGEST_SCALE = 1e6
SPLIT = "split_experts"  # in config.json's `outpace`, of a GGUF file of gpt-oss that was converted: by expert
COUNTS = ("num_experts", "num_local_experts")  # names of the number of experts, the one of older config.json files last
CHOSEN = ("num_experts_per_tok", "experts_per_token")  # of that of chosen ones, likewise


@dataclass(frozen=True)
class Experts:
    """Sizes and constants of all layers with experts; sizes count elements.

    A weight is the score of a chosen expert: its share in the softmax of all logits, or the sigmoid of its own. If
    `norms_weights`, weights are divided by their sum; all are multiplied by `scale`. If `corrects_choice`, the choice,
    but no weight, adds a stored number to each score. `has_biases`: of the router and of all matrices of the experts.
    `shared_width`: of an expert that is always applied, 0 without one; if `gates_shared`, its output is multiplied by
    the sigmoid of a product of its own. `limit`: if not 0, gates are at most this, ups within plus and minus this, and
    the activation is gate * sigmoid(SWISH_FACTOR * gate) * (up + 1).
    """

    count: int
    chosen: int
    width: int
    scoring: str = SOFTMAX
    norms_weights: bool = True
    scale: float = 1.0
    corrects_choice: bool = False
    has_biases: bool = False
    shared_width: int = 0
    gates_shared: bool = True
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.chosen > self.count:
            raise UserError(
                f"num_experts_per_tok is {self.chosen}, it must be at most the number of experts {self.count}"
            )


ExpertLayers = tuple[Experts | None, tuple[bool, ...]]  # and which layers have them


def read_experts(fields: Mapping[str, Any], num_layers: int, count: int, chosen: int, **constants: Any) -> ExpertLayers:
    """Read experts in all layers but those that the config excepts; with 0 experts, all layers are dense.

    `count`, `chosen`: defaults; `constants`: fields of `Experts` that the architecture fixes.
    """
    count = _agreed(fields, COUNTS, count)
    if not count:
        return None, ()
    width = constants.pop("width", None) or size(fields, "moe_intermediate_size")
    experts = Experts(count, _agreed(fields, CHOSEN, chosen, 1), width, **constants)
    step, dense = size(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise UserError(f"mlp_only_layers is {dense!r:.200}, it must be a list of layers below {num_layers}")
    layers = [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]
    return experts, tuple(layers)


def _agreed(fields: Mapping[str, Any], names: Sequence[str], default: int, smallest: int = 0) -> int:
    """Return the number that fields of these names have; UserError if they differ."""
    found = {name: size(fields, name, smallest=smallest) for name in names if fields.get(name) is not None}
    if len({*found.values()}) > 1:
        raise UserError(" and ".join(f"{name} is {value}" for name, value in found.items()) + ", they must be equal")
    return next(iter(found.values()), default)


def read_qwen3_moe(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of Qwen3."""
    return read_experts(fields, num_layers, 128, 8, norms_weights=flag(fields, "norm_topk_prob"))


def read_olmoe(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of OLMoE."""
    width, normed = size(fields, "intermediate_size"), flag(fields, "norm_topk_prob")
    return read_experts(fields, num_layers, 64, 8, width=width, norms_weights=normed)


def read_mixtral(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of Mixtral."""
    return read_experts(fields, num_layers, 8, 2, width=size(fields, "intermediate_size"))


def read_gpt_oss(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of gpt-oss."""
    constants = {"width": size(fields, "intermediate_size"), "has_biases": True}
    if number(fields, "swiglu_alpha", SWISH_FACTOR, LARGEST_SCALE) != SWISH_FACTOR:
        raise unsupported_field(f"swiglu_alpha {fields['swiglu_alpha']!r:.50} (only {SWISH_FACTOR})")
    limit = number(fields, "swiglu_limit", 7.0, LARGEST_SCALE)
    return read_experts(fields, num_layers, 128, 4, **constants, limit=limit)


def read_shared(fields: Mapping[str, Any], num_layers: int, count: int, chosen: int, normed: bool) -> ExpertLayers:
    """Read the experts of Qwen3-Next and Qwen3.5, one of them shared."""
    shared = size(fields, "shared_expert_intermediate_size", 512)
    return read_experts(fields, num_layers, count, chosen, norms_weights=normed, shared_width=shared)


def read_qwen2_moe(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of Qwen2, one of them shared."""
    if not flag(fields, "qkv_bias", True):
        raise unsupported_field("qkv_bias False (only True)")
    shared, normed = size(fields, "shared_expert_intermediate_size", 5632), flag(fields, "norm_topk_prob")
    return read_experts(fields, num_layers, 60, 4, norms_weights=normed, shared_width=shared)


def read_qwen3_5_moe(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of Qwen3.5."""
    return read_shared(fields, num_layers, 256, 8, True)


def read_qwen3_next(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of Qwen3-Next."""
    return read_shared(fields, num_layers, 512, 10, flag(fields, "norm_topk_prob", True))


def read_lfm2_moe(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts of LFM2, whose first layers are dense."""
    experts, _ = read_experts(
        fields,
        num_layers,
        32,
        4,
        scoring=SIGMOID,
        norms_weights=flag(fields, "norm_topk_prob", True),
        scale=number(fields, "routed_scaling_factor", 1.0, LARGEST_SCALE),
        corrects_choice=flag(fields, "use_expert_bias", True),
    )
    dense = size(fields, "num_dense_layers", 2, smallest=0)
    return experts, tuple(layer >= dense for layer in range(num_layers))


MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OTHER_NAMES = {  # of a checkpoint's parts: those of Qwen3's mixtures of experts
    ".mlp.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
    ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.": ".mlp.",
}


def own_name(name: str) -> str:
    """Return the name by which runtimes know a checkpoint's tensor."""
    for part, ours in OTHER_NAMES.items():
        if part in name:
            before, _, end = name.partition(part)
            return before + ours + ".".join(MATRICES.get(one, one) for one in end.split("."))
    return name


def stored_name(part: str, name: str) -> str:
    """Return the name of a tensor in checkpoints that call the MLP `part`, and its matrices w1, w2 and w3."""
    before, found, end = name.partition(".mlp.")
    numbers = {ours: theirs for theirs, ours in MATRICES.items()}
    end = end.replace("gate.e_score_correction_bias", "expert_bias")
    return ".".join([before, part, *(numbers.get(one, one) for one in end.split("."))]) if found else name
