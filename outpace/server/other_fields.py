"""Fields of other APIs and servers: other names of our own, without effect, or refused by name.

A field that would change the answer is never merely ignored.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from outpace.server.errors import ApiError

OFF: tuple[Any, ...] = (False, 0, "", [], {})
STRUCTURED = "structured_outputs text.format output_config.format"
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # with their neutral values


class OtherField(NamedTuple):
    """How an API treats a field that it does not have.

    `own`: fields to use instead, the first one that the API has. `is_same`: that one has the same values, so this is
    another name of it. `neutral`: values that change nothing, all others are refused; None: no value changes anything.
    `is_window`: it only bounds the text in which PENALTIES count tokens.
    """

    own: tuple[str, ...] = ()
    is_same: bool = False
    neutral: tuple[Any, ...] | None = OFF
    is_window: bool = False


def _no_effect(names: str) -> dict[str, OtherField]:
    return dict.fromkeys(names.split(), OtherField(neutral=None))


def _same(names: str, neutral: tuple[Any, ...] = OFF) -> dict[str, OtherField]:
    return dict.fromkeys(names.split(), OtherField(tuple(names.split()), True, neutral))


def _refused(names: str, use: str = "", neutral: tuple[Any, ...] = OFF, **more: bool) -> dict[str, OtherField]:
    return dict.fromkeys(names.split(), OtherField(tuple(use.split()), False, neutral, **more))


OTHER_FIELDS: dict[str, OtherField] = {
    **_no_effect("annotations cache_control cache_prompt citations data encrypted_content generate_summary id_slot"),
    **_no_effect("include_obfuscation is_error keep_alive n_discard n_keep phase priority prompt_cache_key"),
    **_no_effect("prompt_cache_breakpoint"),
    **_no_effect("prompt_cache_retention request_id rid safety_identifier service_tier signature status summary"),
    **_no_effect("guided_decoding_backend max_tool_calls spaces_between_special_tokens timings_per_token"),
    # These only tune what is refused below.
    **_no_effect("adaptive_decay dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers"),
    **_no_effect("dynatemp_exponent early_stopping mirostat_eta mirostat_tau smoothing_curve xtc_threshold"),
    **_same("max_tokens max_completion_tokens max_output_tokens n_predict max_new_tokens num_predict"),
    **_same("min_tokens min_new_tokens"),
    **_same("stop stop_sequences stop_strings stopping_strings"),
    **_same("include_stop_str_in_output no_stop_trim"),
    **_same("seed random_seed sampler_seed"),
    **_same("repetition_penalty repeat_penalty"),
    **_same("bad_words banned_strings"),
    **_same("n n_cmpl num_return_sequences", (1,)),
    **_same("add_special_tokens add_bos_token"),
    **_same("chat_template_kwargs chat_template_args"),
    **_same("thinking think", (*OFF, {"type": "disabled"})),
    **_refused("enable_thinking reasoning reasoning_effort verbosity", neutral=(*OFF, "none")),
    **_refused("disable_reasoning", "enable_thinking"),
    **_refused("clear_thinking preserve_thinking thinking_mode prompt_mode safe_prompt", "chat_template_kwargs"),
    **_refused("thinking_budget thinking_token_budget reasoning_budget reasoning_budget_tokens thinking_forced_open"),
    **_refused("include_reasoning separate_reasoning parse_tool_calls", neutral=(True,)),
    **_refused("reasoning_format", neutral=("auto", "parsed", "deepseek")),
    **_refused("chat_template documents add_generation_prompt continue_final_message tool_prompt guideline"),
    **_refused("template prompt_template raw continue_assistant_turn", "chat_template_kwargs continue_final_message"),
    **_refused("guided_json guided_regex guided_choice guided_grammar json_schema regex", STRUCTURED, (False, "")),
    **_refused("ebnf grammar format structural_tag", STRUCTURED, (False, "")),
    **_refused("response_format structured_outputs output_format text", f"response_format {STRUCTURED}"),
    **_refused("output_config", "reasoning_effort"),
    **_refused("guided_whitespace_pattern grammar_lazy grammar_triggers"),
    **_refused("functions tools", "tools"),
    **_refused("function_call tool_choice", "tool_choice", (*OFF, "none", "auto")),
    **_refused("parallel_tool_calls", "tool_choice", (True,)),
    **_refused("web_search_options", neutral=()),  # {} turns it on
    **_refused("enable_search search_options search_settings plugins mcp_servers container"),
    **_refused("system instructions system_prompt", "system instructions messages"),
    **_refused("messages input inputs input_ids prompt context", "messages input prompt"),
    **_refused("previous_response_id conversation session_params suffix prediction negative_prompt"),
    **_refused("audio images image_data video multimodal_data mm_processor_kwargs"),
    **_refused("modalities", neutral=(*OFF, ["text"])),
    **_refused("truncate truncate_prompt_tokens prompt_truncate_len truncation_side transforms", "truncation"),
    **_refused("truncation", neutral=(*OFF, "disabled")),
    **_refused("do_sample", "temperature", (True,)),
    **_refused("best_of num_beams num_beam_groups beam_width", neutral=(1,)),
    **_refused("length_penalty", neutral=(0, 1)),
    **_refused("use_beam_search diversity_penalty penalty_alpha"),
    **_refused("typical_p typical tfs tfs_z guidance_scale cfg_scale encoder_repetition_penalty", neutral=(1,)),
    **_refused("top_n_sigma nsigma adaptive_target", neutral=(0, -1)),
    **_refused("min_keep", neutral=(0, 1)),
    **_refused("top_a top_h epsilon_cutoff eta_cutoff smoothing_factor dynamic_temperature dynatemp_range mirostat"),
    **_refused("mirostat_mode dry_multiplier xtc_probability samplers sampler_order sampler_priority"),
    **_refused("temperature_last watermark"),
    **_refused("logits_processors custom_logit_processor no_repeat_ngram_size exponential_decay_length_penalty"),
    **_refused("repeat_last_n penalty_last_n repetition_context_size", neutral=(-1,), is_window=True),
    **_refused("repetition_penalty_range penalize_nl", is_window=True),
    **_refused("max_length max_time t_max_predict_ms n_indent", "max_tokens max_output_tokens"),
    **_refused("min_length", "min_tokens"),
    **_refused("stop_regex", "stop stop_sequences"),
    **_refused("eos_token_id end_id", "stop_token_ids"),
    **_refused("ban_eos_token", "ignore_eos"),
    **_refused("bad_words_ids banned_tokens custom_token_bans suppress_tokens sequence_bias", "logit_bias"),
    **_refused("logprobs top_logprobs n_probs top_n_tokens prompt_logprobs", "top_logprobs logprobs"),
    **_refused("echo return_full_text", "echo"),
    **_refused("lora lora_path lora_request adapter_id adapters"),
    **_refused("options parameters sampling_params extra_body nvext vllm_xargs custom_params"),
}


def has_no_effect(name: str) -> bool:
    """Return whether a field that an API does not have changes nothing, whatever its value."""
    return name in OTHER_FIELDS and OTHER_FIELDS[name].neutral is None


def with_own_names(given: Mapping[str, Any], fields: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Rename fields that an API has under another name; return the body, and the given names of the renamed fields.

    `fields`: those that the API has. ApiError if a field and its other name have different values.
    """
    found, names = dict(given), dict[str, str]()
    for name, value in given.items():
        other = OTHER_FIELDS.get(name)
        if name in fields or value is None or other is None or not other.is_same:
            continue
        own = next((own for own in other.own if own in fields), None)
        if own is not None:
            agreed({names.get(own, own): found.get(own), name: value})
            found[own], names[own] = found.pop(name), name
    return found, names


def agreed(values: Mapping[str, Any]) -> Any:
    """Return the value of fields that mean the same, None if none has one; ApiError if they contradict each other."""
    (first, value), *others = [item for item in values.items() if item[1] is not None] or [("", None)]
    for name, other in others:
        if other != value:
            why = f"{first} is {reprlib.repr(value)}, but {name} is {reprlib.repr(other)}: give one of them"
            raise ApiError(400, why, param=name, code="invalid_value")
    return value


def refuse_others(unknown: Mapping[str, Any], fields: Collection[str], penalties: Mapping[str, Any]) -> None:
    """Raise ApiError for a field of another API that would change the answer.

    `unknown`: the fields that the API does not have; `fields`: those that it has; `penalties`: values of PENALTIES.
    """
    has_penalty = any(penalties.get(name) not in (None, neutral) for name, neutral in PENALTIES.items())
    for name, value in unknown.items():
        other = OTHER_FIELDS.get(name)
        if name in fields or other is None or value is None or other.neutral is None or value in other.neutral:
            continue
        own = next((own for own in other.own if own.partition(".")[0] in fields), None)
        if (own and other.is_same) or (other.is_window and not has_penalty):
            continue
        message = f"{name} is {reprlib.repr(value)}, but this API does not support it{f'; use {own}' if own else ''}"
        raise ApiError(400, message, param=name, code="unsupported_field")
