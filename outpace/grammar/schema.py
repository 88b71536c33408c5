"""Checks that a JSON schema can be enforced, and compiled in bounded time.

A keyword that the grammar cannot enforce is refused by name, never ignored silently. A keyword that no known draft or
dialect defines is an annotation, which validators ignore, and so does this module (JSON Schema 2020-12, Core, 6.5:
unknown keywords), unless it looks like a misspelt keyword.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError, unknown

PROPERTIES = 1000  # most properties in the whole schema
NOTES = 200  # most distinct unknown keywords: each is compared with all known ones
DEEPEST = 64  # most nested schemas
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
_REFUSED = (
    # of the drafts of JSON Schema
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependencies", "dependentSchemas", "dependentRequired", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary"),
    *("extends", "disallow", "divisibleBy", "requires", "optional", "unique", "maxDecimal"),
    *("minimumCanEqual", "maximumCanEqual"),
    # of OpenAPI, MongoDB and Ajv
    *("nullable", "discriminator", "bsonType", "$data", "$merge", "$patch", "switch", "constant", "typeof"),
    "instanceof",
    *("range", "exclusiveRange", "regexp", "transform", "prohibited", "patternRequired", "uniqueItemProperties"),
    *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
    *("allRequired", "anyRequired", "oneRequired", "deepRequired", "deepProperties"),
    *("select", "selectCases", "selectDefault", "strictProperties"),
    # common mistakes for a supported keyword
    *("min", "max", "minValue", "maxValue", "ref"),
    "x-guidance",  # llguidance's options
)
_NOTES = frozenset((*_TEXTS, *_NAMES))
KNOWN = frozenset((*_NOTES, *_MAPS, *_LISTS, *_ONES, *_RULES))
_NOTED = frozenset(name.lower() for name in _NOTES)
_LIMITING = frozenset(name.lower() for name in (*KNOWN - _NOTES, *_REFUSED))
_ALIKE = 0.85  # similarity from which a name counts as misspelt
_SHORT = 4  # letters; shorter names resemble too many words
_LONG_ENOUGH = [name for name in _LIMITING if len(name) >= _SHORT]
_OWN = ("_", "@", "//", "x-")  # prefixes of comments, of JSON-LD and of extensions


def enforceable(schema: Any) -> Any:
    """Return the schema without unknown annotations.

    Raises UserError for a schema that is too large or too deep, or has a keyword that cannot be enforced.
    """
    return _Checker().check(schema, 1)


class _Checker:
    """Checks one schema and all schemas in it, which count together."""

    def __init__(self) -> None:
        self._properties = 0
        self._notes: set[str] = set()

    def check(self, schema: Any, depth: int) -> Any:
        """Return a schema at this depth without unknown annotations; UserError if it cannot be enforced."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UserError(f"the JSON schema holds {schema!r:.50} where a schema belongs")
        if depth > DEEPEST:
            raise UserError(f"the JSON schema is deeper than {DEEPEST} levels")
        kept = {keyword: value for keyword, value in schema.items() if self._is_known(keyword)}
        for name in _MAPS:
            if isinstance(inner := kept.get(name), Mapping):
                self._properties += len(inner)
                if self._properties > PROPERTIES:
                    raise UserError(f"the JSON schema has more than {PROPERTIES} properties and definitions")
                kept[name] = {key: self.check(value, depth + 1) for key, value in inner.items()}
        for name in (*_LISTS, *_ONES):
            if isinstance(inner := kept.get(name), list):
                kept[name] = [self.check(one, depth + 1) for one in inner]
            elif inner is not None:
                kept[name] = self.check(inner, depth + 1)
        return kept

    def _is_known(self, keyword: str) -> bool:
        """Return whether a keyword is enforced or a known annotation; UserError if it limits values in another way."""
        if keyword not in KNOWN and keyword not in self._notes:
            if _has_meaning(keyword):
                raise unknown("or unsupported keyword of a JSON schema", keyword, KNOWN)
            self._notes.add(keyword)
            if len(self._notes) > NOTES:
                raise UserError(f"the JSON schema has more than {NOTES} different keywords that are not known")
        return keyword in KNOWN


def _has_meaning(keyword: str) -> bool:
    """Return whether a keyword that is not enforced limits values in some dialect, or looks like one that does."""
    if keyword in _REFUSED:
        return True
    lower = keyword.lower()[:60]
    if keyword.startswith(_OWN) or lower in _NOTED:
        return False
    return lower in _LIMITING or bool(difflib.get_close_matches(lower, _LONG_ENOUGH, 1, _ALIKE))
