"""Reads the types of a tool's parameters from their JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.grammar.schema import target

TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MOST_REFERENCES = 8


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all types if it does not limit them. `root` has its definitions."""
    return frozenset(_types(schema, root, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | set[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return TYPES
    if "type" in schema:
        named = schema["type"]
        return TYPES & set(named if isinstance(named, list) else [named])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(keyword), list):
            return set[str]().union(*(_types(one, root, depth + 1) for one in several))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_OF.get(type(value), "null") for value in values} if isinstance(values, list) else TYPES


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow references; return the schema itself if it is not a reference."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(name := schema.get("$ref"), str):
            break
        schema = target(root, name)
    return schema
