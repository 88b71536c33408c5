"""The fields that the APIs share: how an answer is sampled, where it ends, and what is told beside it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.api.params import SamplingParams
from outpace.core.errors import UserError
from outpace.server.errors import ApiError

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_LOGPROBS = 20
WITHOUT_EFFECT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
PLAIN_FIELDS = (  # whose names and meanings are those of SamplingParams
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
)


class Body(BaseModel):
    """A JSON object. Fields that are not known are kept apart, see `unknown_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """Where usage is told in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted without effect


class OutpaceOptions(Body):
    """outpace's own: how this answer is drafted. Its text does not depend on it, but for a rule that says so."""

    method: str | None = None
    drafter: str | None = None
    rule: str | None = None
    nodes: int | None = Field(default=None, ge=1, le=4096)
    speculation: bool | None = None


class Sampled(Body):
    """What every API takes: vLLM's names for what the OpenAI API does not have."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    bad_words: list[str] | None = None
    return_token_ids: bool | None = None
    return_sources: bool | None = None
    return_rounds: bool | None = None
    outpace: OutpaceOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


B = TypeVar("B", bound=Body)


def read(kind: type[B], given: Mapping[str, Any], ignore_unknown: bool) -> tuple[B, list[str]]:
    """A body of this kind, and the names that it does not know; ApiError for a wrong one, and for a name that is not
    known unless they are to be ignored."""
    try:
        body = kind.model_validate(dict(given))
    except ValidationError as error:
        raise _wrong(error, given) from None
    unknown = list(unknown_fields(body))
    if unknown and not ignore_unknown:
        name, allowed = unknown[0]
        near = difflib.get_close_matches(name.rpartition(".")[2], allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ApiError(400, f"unknown field {name!r:.100}{hint}", param=name[:100], code="unknown_field")
    return body, [name for name, _ in unknown]


def unknown_fields(body: Body, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Names that the body and the objects in it do not know, with those that they do."""
    for name in body.model_extra or {}:
        yield path + name, list(type(body).model_fields)
    for name in type(body).model_fields:
        value = getattr(body, name)
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Body):
                place = f"{name}.{number}" if isinstance(value, list) else name
                yield from unknown_fields(item, f"{path}{place}.")


def _wrong(error: ValidationError, given: Any) -> ApiError:
    """What pydantic found, in a sentence."""
    errors = error.errors(include_url=False, include_context=False)
    found = max(errors, key=lambda one: len(_place(one["loc"], given)[0]))  # what came furthest, of several types
    place, value = _place(found["loc"], given)
    whole = ".".join(place) or "the body"
    if found["type"] == "missing":
        name = ".".join([*place, str(found["loc"][-1])])
        return ApiError(400, f"{name} is missing", param=name, code="missing_field")
    said = found["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
    if not place or str(found["loc"][-1]) != place[-1]:
        said = "it is of none of the types that this field takes"
    param = place[0] if place else None
    return ApiError(400, f"{whole} is {reprlib.repr(value)}: {said}", param=param, code="invalid_value")


def _place(location: Sequence[int | str], value: Any) -> tuple[list[str], Any]:
    """The parts of a location that lead into the body, and what stands there. Beside them stand names of types, where a
    field may be of several."""
    place: list[str] = []
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(str(part)[:60])
    return place, value


def sampling(body: Sampled, max_tokens: int, seed: int, **more: Any) -> SamplingParams:
    """The body's parameters; ApiError that names the field of one that is wrong."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings, at most {MOST_STOPS} are allowed", param="stop")
    given = {name: value for name in PLAIN_FIELDS if (value := getattr(body, name)) is not None}
    temperature = 1.0 if body.temperature is None else body.temperature
    try:
        return SamplingParams(
            **{"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stops, **given, **more}
        )
    except UserError as error:
        first = str(error).split(" ", 1)[0]
        name = first if first in type(body).model_fields else None
        raise ApiError(400, str(error), param=name, code="invalid_value") from None
