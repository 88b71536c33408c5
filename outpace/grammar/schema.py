"""What a JSON schema may hold: no more than can be enforced, and no more than can be compiled in bounded time.

A keyword that the grammar cannot enforce is refused by its name, never left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outpace.core.errors import UserError, unknown

PROPERTIES = 1000  # in the whole schema
DEEPEST = 64  # schemas inside one another
_TEXTS = ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly")
_NAMES = ("$schema", "$id", "id", "$anchor", "$comment", "contentMediaType", "contentEncoding")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalItems", "additionalProperties")
_RULES = (
    *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
KNOWN = frozenset((*_TEXTS, *_NAMES, *_MAPS, *_LISTS, *_ONES, *_RULES))


def check(schema: Any) -> None:
    """UserError for a schema that is too large or too deep, or that has a keyword which cannot be enforced."""
    properties = 0
    left = [(schema, 1)]
    while left:
        one, depth = left.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise UserError(f"the JSON schema holds {one!r:.50} where a schema belongs")
        if depth > DEEPEST:
            raise UserError(f"the JSON schema is deeper than {DEEPEST} levels")
        for keyword in one:
            if keyword not in KNOWN:
                raise unknown("or unsupported keyword of a JSON schema", keyword, KNOWN)
        properties += sum(len(one[name]) for name in _MAPS if isinstance(one.get(name), Mapping))
        if properties > PROPERTIES:
            raise UserError(f"the JSON schema has more than {PROPERTIES} properties and definitions")
        left += [(inner, depth + 1) for inner in _inside(one)]


def _inside(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield from inner.values()
    for name in (*_LISTS, *_ONES):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from inner
        elif inner is not None:
            yield inner
