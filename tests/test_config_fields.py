"""Every field that transformers writes to config.json is honoured, has no effect on a text, or is refused by name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import transformers
from test_architectures import SIZES
from transformers import modeling_rope_utils

from outpace.core.errors import UserError
from outpace.models.llama.config.families import FAMILIES
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.config.rope import COMMON, OWN

# Fields without effect on a text's scores, and why.
HARMLESS = {
    **dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range"), "of training"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "tokens, which the tokenizer reads"),
    **dict.fromkeys(("id2label", "label2id", "problem_type"), "of classifiers"),
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states", "return_dict"), "what a pass returns"),
    **dict.fromkeys(("transformers_version", "_name_or_path"), "where the config comes from"),
    "dtype": "of the stored weights; the runtime has its own",
    "chunk_size_feed_forward": "of memory",
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"), "of a router's training"),
    "pretraining_tp": "of training on several devices",
    "is_encoder_decoder": "refused when a model is located, by its kind",
    "_sliding_window_pattern": "already applied in layer_types",
}
# Fields that have an effect only with these others.
GIVEN: dict[str, dict[str, Any]] = {
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 9, "layer_types": None},
    "use_sliding_window": {"sliding_window": 9, "max_window_layers": 1, "layer_types": None},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "conv_L_cache": {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "full_attn_idxs": {"layer_types": None},
    "original_max_position_embeddings": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
}
OTHERS: dict[str, Any] = {
    "max_window_layers": 2,
    "sliding_window": 9,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "no_rope_layers": [0, 1, 1, 1],
    "no_rope_layer_interval": 2,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "original_max_position_embeddings": 50,
    "use_bidirectional_attention": True,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 32,
    "full_attn_idxs": [1],
    "num_experts": 8,
    "decoder_sparse_step": 2,
}
UNNAMED = {  # fields of no family's config class
    "is_causal": False,
    "attention_chunk_size": 16,
    "per_layer_config": {"1": {"hidden_size": 32}},
}


def written(family: str) -> dict[str, Any]:
    """The config.json that transformers writes for a small model of this family."""
    named = "qwen2" if family == "mimo" else family  # MiMo's class comes with its checkpoints
    fields = transformers.AutoConfig.for_model(named, **SIZES).to_dict()
    if family.startswith("lfm2"):
        del fields["rms_norm_eps"]  # its own field is norm_eps
    if family == "lfm2":
        fields["block_multiple_of"] = 56  # so that every field that counts changes the width
    if family == "gpt_oss":
        fields["rope_parameters"]["original_max_position_embeddings"] = 2  # shorter texts than the declared ones
        fields["sliding_window"] = 7
    return fields | {"architectures": [FAMILIES[family].architecture], "model_type": family}


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2 if isinstance(value, float) else max(1, value // 2)
    return "another" if isinstance(value, str) else ["another"]


def outcome(fields: dict[str, Any]) -> object:
    """Return the config that a config.json gives, or the text of its error."""
    try:
        return from_dict(fields)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_is_ignored(family: str) -> None:
    fields = written(family)
    assert from_dict(fields)
    for name in {*fields, *UNNAMED} - HARMLESS.keys():
        given, value = fields | GIVEN.get(name, {}), UNNAMED.get(name, OTHERS.get(name, other(fields.get(name))))
        value = value[::-1] if isinstance(value, list) and value == fields.get(name) else value
        assert outcome(given | {name: value}) != outcome(given), name
    for name in HARMLESS.keys() & fields.keys():
        assert from_dict(fields | {name: other(fields[name])}) == from_dict(fields), name
    for name, value in UNNAMED.items():
        assert name in str(outcome(fields | {name: value}))


def test_no_number_of_rotary_scalings_is_ignored() -> None:
    """Every field of rope_parameters that transformers reads is known for some types and refused for the others."""
    source = inspect.getsource(modeling_rope_utils)
    read = set(re.findall(r"rope_parameters(?:_dict)?(?:\[|\.get\()\"([a-z_]+)\"", source))
    assert len(read) > 12
    assert read - {"layer_type"} <= COMMON.union(*OWN.values())
    for kind, own in OWN.items():
        for name in read - COMMON - own:
            with pytest.raises(UserError, match="rope_parameters"):
                from_dict(SIZES | {"model_type": "llama", "rope_parameters": {"rope_type": kind, name: 2.0}})


def test_the_factor_of_yarn_may_follow_from_the_lengths() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    named = from_dict(SIZES | {"model_type": "llama", "rope_parameters": yarn | {"factor": 4.0}})
    assert from_dict(SIZES | {"model_type": "llama", "rope_parameters": yarn | {"factor": None}}) == named
