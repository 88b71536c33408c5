"""Reads what form an answer must have: a JSON schema, any JSON object, a regex, a choice of texts, or a Lark grammar.

The fields are those of the OpenAI API (`response_format`) and of vLLM (`structured_outputs`). This module checks their
shape; `schema.py` checks a schema, and `compiler.py` compiles it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError, unknown

LARGEST = 2**16  # most bytes of a schema, a regex or a grammar
KINDS = ("json", "json_object", "regex", "choice", "grammar")
FORMATS = ("text", "json_object", "json_schema")
# Options of llguidance for JSON with any white space, of bounded length.
FREE_WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
_FORMAT_FIELDS = ("name", "description", "schema", "strict")


@dataclass(frozen=True)
class Structure:
    """The form of an answer.

    `text` is a JSON schema, a regex, or a grammar in Lark's syntax. `compact`: JSON is written with ", " and ": " and
    no other whitespace. `around`: Lark rules of a larger grammar, which refers to this form as `@form`. `fallback` is
    used if this form cannot be enforced.
    """

    kind: str  # json, regex or lark
    text: str
    compact: bool = False
    around: str = ""
    fallback: Structure | None = None


NAMES = {"json": "JSON schema", "regex": "regex", "lark": "grammar"}


def _limited(structure: Structure) -> Structure:
    """Return the structure; raise UserError if its text is too large."""
    size = len(structure.text.encode("utf-8", "surrogatepass"))
    if size > LARGEST:
        raise UserError(f"the {NAMES[structure.kind]} has {size} bytes, at most {LARGEST} are allowed")
    return structure


def read_structure(response_format: Any, structured_outputs: Any) -> Structure | None:
    """Return what either field requests, None for plain text; raise UserError for invalid values, or for both."""
    asked, other = _response_format(response_format), _structured_outputs(structured_outputs)
    if asked is not None and other is not None:
        raise UserError("response_format and structured_outputs both say what the answer is, give one of them")
    return asked or other


def choice_of(texts: Any) -> Structure:
    """Return the structure of a choice of texts."""
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"choice is {reprlib.repr(texts)}, it must be a list of non-empty strings")
    return _limited(Structure("lark", "start: " + " | ".join(map(quoted, dict.fromkeys(texts)))))


def quoted(text: str) -> str:
    """Quote a text as in JSON and in Lark grammars."""
    return json.dumps(text, ensure_ascii=False)


def schema_of(schema: Any, compact: bool = False) -> Structure:
    """Return the structure of a JSON schema, given as an object or as its text."""
    if isinstance(schema, str):
        if len(schema) > LARGEST:
            raise UserError(f"the JSON schema has {len(schema)} characters, at most {LARGEST} bytes are allowed")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the JSON schema is not valid JSON ({error!s:.100})") from error
    if not isinstance(schema, Mapping | bool):
        raise UserError(f"the JSON schema is {reprlib.repr(schema)}, it must be an object")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema must be plain JSON ({error!s:.100})") from error
    return _limited(Structure("json", text, compact))


def _response_format(value: Any) -> Structure | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise UserError(f"response_format is {reprlib.repr(value)}, it must be an object with a type")
    kind = value["type"]
    if kind not in FORMATS:
        raise unknown("type of response_format", kind, FORMATS)
    given = _members("response_format", value, ("type", "json_schema", *_FORMAT_FIELDS))
    inner = given.get("json_schema", given)
    if not isinstance(inner, Mapping):
        raise UserError(f"json_schema of response_format is {reprlib.repr(inner)}, it must be an object")
    found = _members("json_schema", inner, _FORMAT_FIELDS) if inner is not given else given
    asked = found.get("schema")
    if kind == "text" and asked is not None:
        raise UserError("response_format of type text has a schema: its type must be json_schema or json_object")
    if kind == "text":
        return None
    if asked is None and kind == "json_schema":
        raise UserError("response_format of type json_schema has no schema: put it in json_schema.schema")
    return schema_of(_of_object(asked) if kind == "json_object" else asked)


def _of_object(asked: Any) -> Any:
    """Return a schema that also requires its value to be an object."""
    limits = {} if asked is None else json.loads(schema_of(asked).text)
    kinds = limits.get("type", "object") if isinstance(limits, Mapping) else limits
    if kinds is not True and "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise UserError(f"the schema of json_object has the type {reprlib.repr(kinds)}, it must be object")
    return {**(limits if isinstance(limits, Mapping) else {}), "type": "object"}


def _members(name: str, value: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Return the members of an object that are not null; raise UserError if one of them is unknown."""
    found = {member: inner for member, inner in value.items() if inner is not None}
    for member in found:
        if member not in allowed:
            raise unknown("field", str(member)[:60], allowed, of=name)
    return found


def _structured_outputs(value: Any) -> Structure | None:
    if value is None or isinstance(value, Structure):
        return value
    if not isinstance(value, Mapping):
        kinds = ", ".join(KINDS)
        raise UserError(f"structured_outputs is {reprlib.repr(value)}, it must be an object with one of {kinds}")
    if value and all(asked is None for asked in value.values()):
        return None
    given = {name: asked for name, asked in value.items() if asked is not None and asked is not False}
    compact = given.pop("disable_any_whitespace", False) is True
    for name in given:
        if name not in KINDS:
            raise unknown("field of structured_outputs", str(name), (*KINDS, "disable_any_whitespace"))
    if len(given) != 1:
        found = ", ".join(given) or "nothing"
        raise UserError(f"structured_outputs has {found}, it must have one of {', '.join(KINDS)}")
    ((kind, asked),) = given.items()
    if kind == "json":
        return schema_of(asked, compact)
    if kind == "json_object":
        return schema_of({"type": "object"}, compact)
    if kind == "choice":
        return choice_of(asked)
    if not isinstance(asked, str) or not asked:
        raise UserError(f"{kind} is {reprlib.repr(asked)}, it must be a non-empty string")
    return _limited(Structure("regex" if kind == "regex" else "lark", asked))
