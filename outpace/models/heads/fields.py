"""The fields of a head's config.json: those that have several names, those without effect on drafts, and the others.

Formats: EAGLE's own, SpecForge, AngelSlim, ModelOpt, DeepSpec, z-lab, speculators, Medusa, and GGUF files of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from outpace.core.errors import UserError
from outpace.models.heads.config import fields_of
from outpace.models.llama.config.fields import ReadFields, unknown_fields

T = TypeVar("T")

# Fields that may have any value, at any depth, by the reason why they do not change a draft.
HARMLESS = {
    "for other programs": (
        *("auto_map", "transformers_version", "speculators_version", "torch_dtype", "dtype", "use_cache", "modal_type"),
        *("return_dict", "use_return_dict", "id2label", "label2id", "tokenizer_class", "tie_encoder_decoder"),
        *("algorithm", "default_proposal_method", "proposal_methods", "transformer_layer_architecture", "prefix"),
    ),
    "for training": (
        *("initializer_range", "attention_dropout", "pretraining_tp", "embed_requires_grad", "confidence_head_alpha"),
        *("num_anchors", "max_anchors", "loss_decay_gamma", "label_smoothing", "num_labels"),
    ),
    "for sampling": (
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "max_length"),
        *("num_beams", "num_beam_groups", "num_return_sequences", "medusa_choices", "max_paths", "topk", "do_sample"),
    ),
    "the target's tokenizer decides": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    ),
    "the tensors decide": (
        *("quantization_config", "tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "bias", "num_heads"),
        *("enable_confidence_head", "use_confidence_head", "has_confidence_head", "confidence_head_with_markov"),
        *("attention_mode", "parallel_draft_heads_num_layers"),
    ),
    "names; those of the verifier are compared with the target": (
        *("verifier", "base_model_name_or_path", "target_model_id", "target_model_type", "trained_on", "architectures"),
    ),
    "a size of tables; positions beyond it are rotated too": ("max_position_embeddings", "max_seq_len"),
    "used with other fields only, which are read": ("max_window_layers", "swa_window_size", "mask_token"),
    "checked as a whole": ("rope_scaling", "rope_parameters", "outpace"),
}
KNOWN = frozenset(chain(*HARMLESS.values()))
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that change the arithmetic, and the values that do not, at any depth
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style", "next_layer_regular"), (True,)),
    **dict.fromkeys(("use_swa", "attention_sink_bias", "use_gemma_norm", "use_mtp_layernorm"), (False,)),
    **dict.fromkeys(("attention_value_scale", "input_embedding_scale", "output_multiplier"), (1,)),
    **{"attn_output_gate": (False,), "final_logit_softcapping": (0,), "parallel_draft_step": (1,)},
    **dict.fromkeys(("position_embedding_type",), ("rope", "absolute")),
}
# Beginnings of words in the names of fields that say which position a slot predicts, or which layers a head reads.
MOVES = re.compile("anchor|shift|offset|layout|align|predict|label|bonus|delay|slot|layer_ids|layers_to|capture")
OWN_TENSORS = {"lm_head": "lm_head.weight", "embed_tokens": "embed_tokens.weight"}  # of has_... and has_own_...


def moves_positions(name: str) -> str | None:
    """Return why an unknown field is refused, as the end of a sentence; None if it is ignored."""
    if not MOVES.search(name):
        return None
    return ": it is not known, and by its name it may move drafts; leave it out if the head drafts the same without it"


def agreed(
    config: Mapping[str, Any], names: Sequence[str], read: Callable[[Mapping[str, Any], str], T]
) -> tuple[str, T] | None:
    """Return the first of these fields that is there, and its value by `read`; None if none is.

    Names of fields in an object are dotted. Raise UserError if two of the fields contradict each other.
    """
    found: list[tuple[str, Any, T]] = []
    for name in names:
        outer, _, inner = name.rpartition(".")
        value = (fields_of(config, outer) if outer else config).get(inner)
        if value is not None and value != []:
            found.append((name, value, read({name: value}, name)))
    for name, value, meaning in found[1:]:
        if meaning != found[0][2]:
            raise UserError(f"{found[0][0]} is {found[0][1]!r:.80}, but {name} is {value!r:.80}")
    return (found[0][0], found[0][2]) if found else None


def within(outer: str, *names: str) -> tuple[str, ...]:
    """Return the dotted names of these fields at the top and in an object."""
    return *names, *(f"{outer}.{name}" for name in names)


def check_unread(config: ReadFields, tensors: Collection[str], of_target: Collection[str]) -> list[str]:
    """Return the names of unknown fields that are ignored, after all others were read. Fields of the target, whose
    config.json it may be, are known. Raise UserError for a field that would change the drafts."""
    for part, tensor in OWN_TENSORS.items():
        for name in (f"has_{part}", f"has_own_{part}"):
            if config.get(name) and tensor not in tensors:
                raise UserError(f"{name} is {config[name]!r:.80}, but the files hold no tensor {tensor!r}")
    paths = {name: name.split(".") for name in config.unread()}
    unread = {name: value for name, value in config.unread().items() if paths[name][0] not in of_target}
    known = {name for name, path in paths.items() if path[-1].startswith("_") or not KNOWN.isdisjoint(path)}
    neutral = {name: NEUTRAL[path[-1]] for name, path in paths.items() if path[-1] in NEUTRAL}
    return unknown_fields(unread, known, neutral, moves_positions)
