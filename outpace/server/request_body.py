"""Request bodies: reading JSON within bounds of size, time and depth, the fields of all APIs, and others.

A field of another API or server is another name of one of our own, has no effect, or is refused by name. A field that
would change the answer is never merely ignored.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
import reprlib
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from outpace.api.params import SamplingParams
from outpace.core.arrays import as_whole
from outpace.core.errors import UserError
from outpace.server.errors import ApiError, to_api_error
from outpace.server.options import ServerLimits

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
SURROGATE = re.compile("[\ud800-\udfff]")
FUNCTION_FIELDS = ("type", "function", "name", "description", "parameters", "strict", "cache_control")
UNLIMITED = 2**31  # tokens


async def read_json(request: Request, limits: ServerLimits) -> dict[str, Any]:
    """Read a request's body as a JSON object; raise ApiError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content-type is {kind[:80]!r}, it must be application/json")
    encoding = ", ".join(request.headers.getlist("content-encoding") or ["identity"]).strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"the content-encoding is {encoding[:80]!r}, bodies must be sent uncompressed")
    return parse_json(await _read(request, limits), limits.json_depth)


async def _read(request: Request, limits: ServerLimits) -> bytearray:
    too_large = ApiError(413, f"the body is larger than {limits.max_body} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > limits.max_body:
        raise too_large
    chunks = bytearray()

    async def collect() -> None:
        async for chunk in request.stream():
            chunks.extend(chunk)
            if len(chunks) > limits.max_body:
                raise too_large

    try:
        await asyncio.wait_for(collect(), limits.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive in {limits.body_seconds:g} seconds", code="timeout") from None
    except ClientDisconnect:
        message = "the client disconnected before its body was complete"
        raise ApiError(499, message, code="client_disconnected") from None
    return chunks


def parse_json(body: bytes | bytearray, depth: int) -> dict[str, Any]:
    """Parse a JSON object of at most `depth` levels, without lone surrogates and numbers beyond a double's range."""
    try:
        value = parse_finite_json(body.decode("utf-8"))
    except RecursionError:
        raise _too_deep(depth) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise _invalid_json(f"the body is not JSON ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise _invalid_json(f"the body is a JSON {type(value).__name__}, it must be an object")
    _check_json(value, depth)
    return value


def parse_finite_json(text: str) -> Any:
    """Parse JSON; raise ValueError also for NaN, infinities and numbers beyond a double's range, such as 1e999."""
    return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _check_json(value: Any, depth: int) -> None:
    """Check depth and strings level by level: a recursive check could exhaust the stack."""
    level = [value]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and SURROGATE.search(item):
                raise _invalid_json("the body has half a character (a lone surrogate)")
        if not inner:
            return
        level = inner
    raise _too_deep(depth)


def _too_deep(depth: int) -> ApiError:
    return _invalid_json(f"the body's JSON is nested more than {depth} levels deep")


def _invalid_json(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _logit_bias(value: Any) -> Any:
    """Convert a list of pairs, as llama.cpp takes it, to an object."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    found = {str(as_whole(token)): -100.0 if bias is False else bias for token, bias in value}  # false: never
    if len(found) < len(value):
        raise ValueError("it names a token twice")
    return found


Whole = Annotated[int, BeforeValidator(as_whole)]  # other servers take 3.0 for 3
MaxTokens = Annotated[Whole, BeforeValidator(lambda value: UNLIMITED if value == -1 else value)]  # as llama.cpp
LogitBias = Annotated[dict[str, float], BeforeValidator(_logit_bias)]


class Body(BaseModel):
    """A JSON object. It keeps unknown fields, see `unknown_fields`. `tool_type`: the only type of tools supported.

    `is_kept`: unknown fields are never refused, see `content.Turn`.
    """

    tool_type: ClassVar[str | None] = None
    is_kept: ClassVar[bool] = False
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @property
    def unknown_type(self) -> str | None:
        """The type that the client gave, if it is unknown."""
        return None


class StreamOptions(Body):
    """Where a stream reports usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OutpaceOptions(Body):
    """outpace's own options: how this answer is drafted. The text does not depend on them, except with
    rules that say so."""

    method: str | None = None
    drafter: str | None = None
    rule: str | None = None
    nodes: Whole | None = Field(default=None, ge=1, le=4096)
    speculation: bool | None = None


class SamplingBody(Body):
    """The fields that every API accepts. What the OpenAI API does not have is named as in vLLM."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Whole | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: Whole | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    allowed_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = Field(default=None, ge=0)
    bad_words: list[str] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    outpace: OutpaceOptions | None = None
    user: str | None = None  # accepted without effect, as `metadata`
    metadata: dict[str, Any] | None = None


# Those that are passed to SamplingParams under the same names.
SAMPLING_FIELDS = SamplingParams.__dataclass_fields__.keys() & SamplingBody.model_fields.keys() - {"seed", "stop"}


class DetailsBody(SamplingBody):
    """Adds the fields that ask for details of how the answer was written."""

    return_token_ids: bool | None = None
    return_sources: bool | None = None
    return_rounds: bool | None = None


B = TypeVar("B", bound=Body)


def validate(kind: type[B], given: Mapping[str, Any], is_strict: bool) -> tuple[B, list[str]]:
    """Validate a body; return it with the names of ignored fields and tools, which are those of unknown names or types.

    Raises ApiError for a wrong value, a field of another API that would change the answer and, if `is_strict`,
    anything unknown outside of the conversation.
    """
    given, names = with_own_names(given, kind.model_fields)
    given, left_out = _without_unknown_tools(kind, given, is_strict)
    try:
        body = kind.model_validate(dict(given))
    except ValidationError as error:
        raise _validation_error(error, given, names) from None
    if isinstance(body, SamplingBody):
        refuse_others(body.model_extra or {}, kind.model_fields, vars(body))
    unknown = [*unknown_fields(body), *_unknown_in_functions(getattr(body, "tools", None))]
    if is_strict and (refused := [one for one in unknown if one[1]]):
        name, allowed = refused[0]
        near = difflib.get_close_matches(name.rpartition(".")[2], allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ApiError(400, f"unknown field {name!r:.100}{hint}", param=name[:100], code="unknown_field")
    return body, [name for name, _ in unknown] + left_out


def _without_unknown_tools(
    kind: type[Body], given: Mapping[str, Any], is_strict: bool
) -> tuple[Mapping[str, Any], list[str]]:
    """Remove tools of unknown types, such as web search; return the remaining body and what was removed."""
    tools = given.get("tools")
    if not isinstance(tools, list) or kind.tool_type is None:
        return given, []
    types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    known = (kind.tool_type, "function")  # functions in the format of another API fail validation
    unknown = {number: name for number, name in enumerate(types) if isinstance(name, str) and name not in known}
    if unknown and is_strict:
        number, name = next(iter(unknown.items()))
        message = f"tools.{number}.type is {name!r:.60}, this API supports {kind.tool_type!r} only"
        raise ApiError(400, message, param="tools", code="invalid_value")
    kept = [tool for number, tool in enumerate(tools) if number not in unknown]
    return {**given, "tools": kept}, [f"tools.{number}={name}" for number, name in unknown.items()]


def unknown_fields(body: Body, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the unknown fields and types in a body, each with the known names of its object, or none if it is kept."""
    if body.unknown_type is not None:
        yield f"{path[:-1]}={body.unknown_type}", []
        return
    for name, value in (body.model_extra or {}).items():
        if value is not None and OTHER_FIELDS.get(name, OtherField()).neutral is not None:
            yield path + name, [] if body.is_kept else list(type(body).model_fields)
    for name in type(body).model_fields:
        value = getattr(body, name)
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Body):
                place = f"{name}.{number}" if isinstance(value, list) else name
                yield from unknown_fields(item, f"{path}{place}.")


def _unknown_in_functions(tools: Sequence[Any] | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the unknown fields of functions, which are dicts because chat templates render all of their fields."""
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            continue
        for place, fields in (("", tool), ("function.", tool.get("function"))):
            for name, value in fields.items() if isinstance(fields, dict) else ():
                if name not in FUNCTION_FIELDS and value is not None:
                    yield f"tools.{number}.{place}{name}", list(FUNCTION_FIELDS)


def _validation_error(error: ValidationError, given: Any, names: Mapping[str, str]) -> ApiError:
    """Describe the error; `names` are the given names of renamed fields."""
    errors = error.errors(include_url=False, include_context=False)
    found = max(errors, key=lambda one: len(_locate(one["loc"], given)[0]))  # of several types, the closest match
    place, value = _locate(found["loc"], given)
    has_types = not place or str(found["loc"][-1]) != place[-1]
    place[:1] = [names.get(name, name) for name in place[:1]]
    if found["type"] == "missing":
        name = ".".join([*place, str(found["loc"][-1])])
        return ApiError(400, f"{name} is missing", param=name, code="missing_field")
    why = re.sub(r"^\w+ should ", "it must ", found["msg"].removeprefix("Value error, "))
    why = why.replace("must be None", "must be null")
    if has_types:
        why = "it has none of the types that this field accepts"
    message = f"{'.'.join(place) or 'the body'} is {reprlib.repr(value)}: {why}"
    return ApiError(400, message, param=place[0] if place else None, code="invalid_value")


def _locate(location: Sequence[int | str], value: Any) -> tuple[list[str], Any]:
    """Return the parts of a location that lead into the body, and the value there. For a field of several types,
    pydantic's locations contain names of types too, which are skipped."""
    place: list[str] = []
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(str(part)[:60])
    return place, value


def sampling_params(body: SamplingBody, max_tokens: int, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """Return the body's sampling parameters, and the `defaults` where it has none, with a random seed if it has none;
    raise ApiError for a wrong field."""
    name = "stop_sequences" if "stop_sequences" in type(body).model_fields else "stop"
    given = getattr(body, name) or []
    stops = [given] if isinstance(given, str) else given
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"{name} has {len(stops)} strings, at most {MAX_STOPS} are allowed", param=name)
    seed = secrets.randbelow(2**63) if body.seed in (None, -1) else body.seed % 2**63  # -1: as in llama.cpp and vLLM
    fields: dict[str, Any] = {**defaults, "max_tokens": max_tokens, "seed": seed, "stop": stops}
    fields |= {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    fields |= more
    if fields.get("top_p") == 0:  # only the likeliest token is left
        fields |= {"temperature": 0.0, "top_p": 1.0}
    try:
        return SamplingParams(**fields)
    except UserError as error:
        raise to_api_error(error, type(body).model_fields) from None


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
    **_refused("thinking_budget thinking_token_budget max_thinking_tokens", "enable_thinking", (-1,)),  # 0: none
    **_refused("reasoning_budget reasoning_budget_tokens", "enable_thinking", (-1,)),
    **_refused("thinking_forced_open repetition_detection"),
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
