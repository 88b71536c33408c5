"""Reduces a JSON schema to what the grammar enforces.

Each keyword is treated in one of three ways, depending on its value. It is left out if it cannot affect the answer:
titles, unknown annotations (JSON Schema 2020-12, Core, 6.5), `uniqueItems: false`, a string format for a number. It is
enforced, if necessary after it was expressed by other keywords. Or it is refused, here by name or by llguidance: a
limit is never ignored silently, and an unknown keyword that resembles a known one is assumed to be misspelt.
"""

from __future__ import annotations

import difflib
import itertools
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core.errors import UserError
from outpace.grammar.merging import LISTS, MAPS, MAX_DEPTH, NAMES, ONES, at_pointer, merged, unsupported
from outpace.grammar.regexes import has_lookaround, with_plain_classes, without_lookaheads

MAX_PROPERTIES = 1000  # in the whole schema
MAX_UNKNOWN = 200  # distinct unknown keywords: each is compared with all known ones
_MAX_BRANCHES = 100  # of oneOf, whose pairs are compared
_EXACT = 2**53  # the grammar represents all integers up to here
_LARGEST = 2**63 - 1024  # the largest bound of a grammar
_SMALLEST = 1e-30
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$vocabulary", "$recursiveAnchor"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
    )
)
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_MINIMA, _MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_TEXTS = (*NAMES, "$ref", "pattern", "format")
_RULES = (*_TEXTS, *_COUNTS, *_MINIMA, *_MAXIMA, "multipleOf", "type", "enum", "const", "required")
_REWRITTEN = ("discriminator", "nullable", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_REFUSED = frozenset(
    (
        # JSON Schema, all drafts
        *("if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependencies", "dependentSchemas", "dependentRequired", "$dynamicRef", "$recursiveRef"),
        *("extends", "disallow", "divisibleBy", "requires", "optional", "unique", "maxDecimal"),
        *("minimumCanEqual", "maximumCanEqual"),
        # MongoDB and Ajv
        *("bsonType", "$data", "$merge", "$patch", "switch", "constant", "typeof", "instanceof"),
        *("range", "exclusiveRange", "regexp", "transform", "prohibited", "patternRequired", "uniqueItemProperties"),
        *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
        *("allRequired", "anyRequired", "oneRequired", "deepRequired", "deepProperties"),
        *("select", "selectCases", "selectDefault", "strictProperties"),
        # common mistakes for a supported keyword
        *("min", "max", "minValue", "maxValue", "ref"),
        "x-guidance",  # llguidance's options
    )
)
_ENFORCED = frozenset((*MAPS, *LISTS, *ONES, *_RULES, *_REWRITTEN))
_HARMLESS = frozenset(name.lower() for name in (*_ANNOTATIONS, *NAMES))
_LIMITING = {name.lower(): name for name in (_ENFORCED | _REFUSED).difference(NAMES)}
_ALIKE = 0.85  # similarity from which a name counts as misspelt
_SHORT = 4  # letters; shorter names resemble too many words
_LONG_ENOUGH = [name for name in _LIMITING if len(name) >= _SHORT]
_OWN = ("_", "@", "//", "x-")  # prefixes of comments, JSON-LD and extensions

_NUMBER = frozenset(("integer", "fraction"))
_TYPES = {name: frozenset((name,)) for name in ("null", "boolean", "integer", "string", "array", "object")}
_TYPES["number"] = _NUMBER
ALL_TYPES = frozenset((*_TYPES, "fraction")) - {"number"}
_OF_TYPE = {
    **dict.fromkeys(("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("dependencies", "dependentSchemas", "dependentRequired", "propertyNames"), "object"),
    **{"unevaluatedProperties": "object", "pattern": "string", "format": "string"},
}
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")  # they also evaluate items and properties
_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-%s[0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_BASE64 = "^(?:[%s]{4})*(?:[%s]{2}(?:==)%s|[%s]{3}=%s)?$"
_FORMATS = {  # as patterns
    "uuid": _UUID % ("[0-9a-fA-F]", "[0-9a-fA-F]"),
    **{f"uuid{version}": _UUID % (version, "[89abAB]") for version in range(1, 9)},
    **dict.fromkeys(("base64", "byte"), _BASE64 % (("A-Za-z0-9+/",) * 2 + ("", "A-Za-z0-9+/", ""))),
    "base64url": _BASE64 % (("A-Za-z0-9_-",) * 2 + ("?", "A-Za-z0-9_-", "?")),
    "jwt": r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
_NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}  # enforced by ASCII alone
_KNOWN_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri")
_LOOKAHEADS = (  # negative lookaheads that zod and pydantic write, with equivalent patterns
    ("^(?!\\.)(?!.*\\.\\.)", ("^[^.]", "^(?:\\.?[^.]+)*\\.?$")),  # no dot at the beginning, no two dots
    ("^(?!^[-+.]*$)", ("[^-+.]",)),
)


def enforceable(schema: Any) -> Any:
    """Return a schema that llguidance can enforce. Every answer that it allows is valid under the given schema.

    Raises UserError if the schema is too large, too deep or invalid, or has a keyword that cannot be enforced.
    """
    return _Reducer(schema).whole()


class _Reducer:
    """Reduces a schema and the schemas nested in it. The limits apply to all of them together."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._properties = 0
        self._unknown: set[str] = set()
        self._reduced: dict[int, dict[str, Any]] = {}  # by the id() of the original schema
        self._tags: dict[int, tuple[Mapping[str, Any], str]] = {}  # by id(): a schema and the property it must require

    def whole(self) -> Any:
        found = self._reduce(self._root, 1)
        for original, (_, tag) in self._tags.items():
            if (inner := self._reduced.get(original)) is not None and tag not in inner.get("required", ()):
                inner["required"] = [*inner.get("required", ()), tag]
        found = merged(found) if isinstance(found, Mapping) else found
        if found is False:
            raise UserError("the JSON schema allows no value")
        return {} if found is True else found

    def _reduce(self, schema: Any, depth: int) -> Any:
        """Return a nested schema, reduced. `depth` is 1 for the whole schema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UserError(f"the JSON schema has {schema!r:.50} where a schema must be")
        if depth > MAX_DEPTH:
            raise UserError(f"the JSON schema is deeper than {MAX_DEPTH} levels")
        given = {keyword: value for keyword, value in schema.items() if value is not None or keyword == "const"}
        kept = {keyword: _checked(keyword, given[keyword]) for keyword in given if self._has_effect(keyword, given)}
        if _limits_nothing(kept.get("not", False)):
            return False
        kept = self._rewritten(kept)
        for name in MAPS:
            if (inner := kept.get(name)) is not None:
                self._properties += len(inner)
                if self._properties > MAX_PROPERTIES:
                    raise UserError(f"the JSON schema has more than {MAX_PROPERTIES} properties and definitions")
                kept[name] = {key: self._reduce(value, depth + 1) for key, value in inner.items()}
        for name in (*LISTS, *ONES):
            if isinstance(inner := kept.get(name), list):
                kept[name] = [self._reduce(one, depth + 1) for one in inner]
            elif inner is not None:
                kept[name] = self._reduce(inner, depth + 1)
        self._reduced[id(schema)] = kept
        return kept

    def _has_effect(self, keyword: str, schema: Mapping[str, Any]) -> bool:
        """Return whether a keyword may limit values; raise UserError if it may but cannot be enforced."""
        if keyword in _ANNOTATIONS or _is_redundant(keyword, schema):
            return False
        if keyword in _ENFORCED:
            return True
        if keyword in _REFUSED:
            raise unsupported(keyword, schema[keyword])
        if keyword not in self._unknown:
            if near := _resembles(keyword):
                hint = f"did you mean {near!r}? Prefix annotations of your own with x-"
                raise UserError(f"the JSON schema has the unknown keyword {keyword!r:.60}; {hint}")
            self._unknown.add(keyword)
            if len(self._unknown) > MAX_UNKNOWN:
                raise UserError(f"the JSON schema has more than {MAX_UNKNOWN} different unknown keywords")
        return False

    def _rewritten(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Express the same limits by keywords that llguidance knows."""
        if "$dynamicAnchor" in kept:
            kept["$anchor"] = kept.pop("$dynamicAnchor")
        if kept.pop("nullable", False) and "type" in kept:
            kept["type"] = list(dict.fromkeys([*_listed(kept["type"]), "null"]))
        is_merged = any(name in kept for name in _IN_PLACE)
        others = kept.pop("unevaluatedProperties", None)
        if others is False and is_merged and "additionalProperties" not in kept:
            kept["unevaluatedProperties"] = False  # of the merged object
        elif others is not None:
            if is_merged and "additionalProperties" not in kept and not _limits_nothing(others):
                raise unsupported("unevaluatedProperties", others)
            kept.setdefault("additionalProperties", others)
        if "unevaluatedItems" in kept and isinstance(kept.get("items", []), list):
            if "items" in kept or is_merged:
                raise unsupported("unevaluatedItems", kept["unevaluatedItems"])
            kept["items"] = kept["unevaluatedItems"]
        kept.pop("unevaluatedItems", None)
        if "not" in kept:
            raise unsupported("not", kept["not"])
        if "propertyNames" in kept:
            kept = self._with_names(kept)
        if (discriminator := kept.pop("discriminator", None)) is not None:
            self._discriminate(kept, discriminator)
        if "oneOf" in kept:
            self._check_exclusive(kept["oneOf"])
        return _with_formats(kept)

    def _with_names(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Replace `propertyNames` by `properties` or `patternProperties`."""
        asked = kept.pop("propertyNames")
        names = self._resolved(asked)
        is_text = "string" in _types(names) and names
        left_out = {"type", *(name for name in names if _is_redundant(name, names))}
        names = {name: value for name, value in names.items() if name not in _ANNOTATIONS | left_out}
        if is_text and not names:
            return kept
        others = kept.get("additionalProperties", True)
        if is_text and set(names) <= {"enum", "const"} and "patternProperties" not in kept:
            allowed = [name for name in _values(names) or () if isinstance(name, str)]
            kept["properties"] = {name: kept.get("properties", {}).get(name, others) for name in allowed}
        elif is_text and (pattern := _name_pattern(names)) and not {"properties", "patternProperties"} & kept.keys():
            kept["patternProperties"] = {pattern: others}
        else:
            raise unsupported("propertyNames", asked)
        return {**kept, "additionalProperties": False}

    def _discriminate(self, kept: Mapping[str, Any], discriminator: Any) -> None:
        """Record that each branch must require the property that distinguishes the branches, as in OpenAPI."""
        tag = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        branches = [*kept.get("oneOf", ()), *kept.get("anyOf", ())]
        if not isinstance(tag, str) or not branches:
            raise unsupported("discriminator", discriminator)
        for _ in range(MAX_DEPTH):
            resolved = [self._resolved(branch) for branch in branches]
            for branch in resolved:
                if not {"oneOf", "anyOf"} & branch.keys():
                    self._tags[id(branch)] = (branch, tag)
            branches = [inner for branch in resolved for name in ("oneOf", "anyOf") for inner in branch.get(name) or ()]

    def _check_exclusive(self, branches: Sequence[Any]) -> None:
        """Raise UserError if a value might be valid under two branches of oneOf: the grammar enforces only one."""
        resolved = [self._resolved(branch) for branch in branches]
        listed = [_values(branch) for branch in resolved]
        keys = [_key(value) for values in listed for value in values or ()]
        if None not in listed and len(set(keys)) == len(keys):
            return
        if len(branches) > _MAX_BRANCHES:
            raise UserError(f"oneOf of the JSON schema has more than {_MAX_BRANCHES} branches, use anyOf")
        for one, other in itertools.combinations(resolved, 2):
            if not self._are_exclusive(one, other, 8):
                how = "use anyOf, or give each branch a required property with a different const"
                raise UserError(f"two branches of oneOf in the JSON schema may allow the same value: {how}")

    def _are_exclusive(self, one: Any, other: Any, depth: int) -> bool:
        """Return whether certainly no value is valid under both schemas."""
        one, other = self._resolved(one), self._resolved(other)
        if not depth or not one or not other:
            return False
        for first, second in ((one, other), (other, one)):
            if first.get("not") in ({}, True):
                return True
            for name, enough in (("allOf", any), ("anyOf", all), ("oneOf", all)):
                inner = first.get(name)
                if inner and enough(self._are_exclusive(branch, second, depth - 1) for branch in inner):
                    return True
        if not _types(one) & _types(other):
            return True
        values = [_values(one), _values(other)]
        if None not in values:
            return not {_key(value) for value in values[0] or ()} & {_key(value) for value in values[1] or ()}
        if _types(one) & _types(other) != _TYPES["object"]:
            return False
        names = {name for schema in (one, other) for name in self._required(schema)}
        return any(self._are_exclusive(_property(one, name), _property(other, name), depth - 1) for name in names)

    def _required(self, schema: Mapping[str, Any]) -> list[str]:
        tag = self._tags.get(id(schema))
        required = schema.get("required")
        return [*(required if isinstance(required, list) else ()), *([tag[1]] if tag else ())]

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follow references, ignoring the keywords next to them; return an empty schema if that is impossible."""
        found = resolved(schema, self._root)
        if isinstance(found, bool):
            return {} if found else {"not": {}}
        return found if isinstance(found, Mapping) and "$ref" not in found else {}


def _resembles(keyword: str) -> str | None:
    """Return the value-limiting keyword that an unknown keyword resembles, or None."""
    lower = keyword.lower()[:60]
    if keyword.startswith(_OWN) or lower in _HARMLESS:
        return None
    near = [lower] if lower in _LIMITING else difflib.get_close_matches(lower, _LONG_ENOUGH, 1, _ALIKE)
    return _LIMITING[near[0]] if near else None


def _is_redundant(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword with its value limits nothing in this schema."""
    value = schema[keyword]
    if keyword in _OF_TYPE and "type" in schema and _OF_TYPE[keyword] not in _listed(schema["type"]):
        return True
    match keyword:
        case "format" if isinstance(value, str):
            return value not in (*_KNOWN_FORMATS, *_NARROWER, *_FORMATS)
        case "minimum" | "maximum":
            return value in (-sys.float_info.max, sys.float_info.max) and (value > 0) == (keyword == "maximum")
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "not" | "nullable":
            return value is False
        case "if":
            return not {"then", "else"} & schema.keys()
        case "then" | "else":
            return "if" not in schema or _limits_nothing(value)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or (value == 0 and keyword == "minContains")
        case "dependencies" | "dependentSchemas" | "dependentRequired" if isinstance(value, Mapping):
            return all(inner == [] or _limits_nothing(inner) for inner in value.values())
        case "unevaluatedItems":
            return _limits_nothing(value)
        case "propertyNames" if isinstance(value, Mapping):
            without_type = {name: inner for name, inner in value.items() if name != "type"}
            return "string" in _listed(value.get("type", "string")) and _limits_nothing(without_type)
        case "propertyNames":
            return value is True
    return False


def _limits_nothing(schema: Any) -> bool:
    is_object = isinstance(schema, Mapping)
    return schema is True or (is_object and all(one in _ANNOTATIONS or _is_redundant(one, schema) for one in schema))


def _checked(keyword: str, value: Any) -> Any:
    """Return a keyword's value in a form that llguidance accepts; raise UserError if it is invalid."""
    if keyword in ("const", "enum"):
        _check_numbers(keyword, value)
    if keyword in _COUNTS:
        is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
        return int(value) if is_count else _refuse(keyword, value, "a non-negative integer")
    if keyword in (*_MINIMA, *_MAXIMA, "multipleOf"):
        if isinstance(value, bool) and keyword.startswith("exclusive"):  # of draft 4
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(keyword, value, "a number")
        return value if keyword == "multipleOf" else _bound(keyword, value)
    if keyword in _TEXTS and not isinstance(value, str):
        _refuse(keyword, value, "a string")
    if keyword in MAPS and not isinstance(value, Mapping):
        _refuse(keyword, value, "an object")
    if keyword in (*LISTS, "enum") and not (isinstance(value, list) and value):
        _refuse(keyword, value, "a non-empty list")
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        _refuse(keyword, value, "a list of property names")
    if keyword == "type" and not all(isinstance(name, str) and name in _TYPES for name in _listed(value) or [None]):
        _refuse(keyword, value, f"one or several of {', '.join(sorted(_TYPES))}")
    return value


def _refuse(keyword: str, value: Any, allowed: str) -> Any:
    raise UserError(f"{keyword} of the JSON schema is {reprlib.repr(value)}, it must be {allowed}")


def _bound(keyword: str, value: float) -> float:
    """Return a bound that the grammar represents exactly, narrowed slightly if necessary."""
    if 0 < abs(value) < _SMALLEST:
        _refuse(keyword, value, f"0 or at least {_SMALLEST}")
    if abs(value) <= _EXACT:
        return value
    inward = math.inf if keyword in _MINIMA else -math.inf
    if abs(value) > _LARGEST:
        if (value > 0) == (inward > 0):
            _refuse(keyword, value, f"within {_LARGEST} of 0")
        return _LARGEST if value > 0 else -_LARGEST
    held = float(value)
    return int(math.nextafter(held, inward) if (held < value if inward > 0 else held > value) else held)


def _check_numbers(keyword: str, value: Any) -> None:
    """Raise UserError for an integer that a double cannot represent: the grammar would contain another number."""
    if isinstance(value, int) and abs(value) > _EXACT and (abs(value) > 10**308 or int(float(value)) != value):
        raise UserError(f"{keyword} of the JSON schema has {value!r:.40}, a number with too many digits")
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_numbers(keyword, inner)


def _with_formats(kept: dict[str, Any]) -> dict[str, Any]:
    """Rewrite formats and patterns to those that llguidance supports."""
    patterns = []
    if (name := kept.pop("format", None)) is not None:
        known = _NARROWER.get(name, name)
        if known in _KNOWN_FORMATS:
            kept["format"] = known
        else:
            patterns.append(_FORMATS[name])
    if (pattern := kept.pop("pattern", None)) is not None:
        patterns += _plain_patterns(pattern)
    if kept.get("patternProperties"):
        kept["patternProperties"] = {
            with_plain_classes(name): inner for name, inner in kept["patternProperties"].items()
        }
    if patterns:
        kept["pattern"] = patterns[0]
    if more := [{"pattern": pattern} for pattern in patterns[1:]]:
        kept["allOf"] = [*kept.get("allOf", ()), *more]
    return kept


def _plain_patterns(pattern: str) -> list[str]:
    """Return patterns without lookahead that all have to match where the given one does."""
    for begin, others in _LOOKAHEADS:
        if pattern.startswith(begin) and not has_lookaround(rest := "^" + pattern[len(begin) :]):
            return [with_plain_classes(rest), *others]
    return list(map(with_plain_classes, without_lookaheads(pattern)))


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    """Return a pattern that is equivalent to all limits of property names, or None."""
    match names:
        case {"pattern": str(pattern), **rest} if not rest or set(rest) == {"format"}:
            return pattern
        case {"format": str(name), **rest} if not rest:
            return _FORMATS.get(name)
    if set(names) <= {"minLength", "maxLength"}:
        min_length, max_length = names.get("minLength", 0), names.get("maxLength", "")
        return f"^[\\s\\S]{{{min_length},{max_length}}}$"
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema may allow, possibly too many."""
    found = ALL_TYPES
    if schema.get("type") is not None:
        names = [*_listed(schema["type"]), *(["null"] if schema.get("nullable") else [])]
        found = frozenset().union(*(_TYPES.get(name, ALL_TYPES) for name in names))
    if (values := _values(schema)) is not None:
        found &= frozenset().union(*(_type(value) for value in values))
    return found


def _type(value: Any) -> frozenset[str]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return _TYPES[names.get(type(value), "null")]


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _key(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: those of 1 and 1.0 are equal, that of true is not."""
    if isinstance(value, list):
        return tuple(map(_key, value))
    if isinstance(value, Mapping):
        return frozenset((name, _key(inner)) for name, inner in value.items())
    return (isinstance(value, bool), value)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a property; an empty schema if it depends on patterns."""
    properties = schema.get("properties") or {}
    if name in properties:
        return properties[name]
    return {} if schema.get("patternProperties") else schema.get("additionalProperties", {})


def types_of(schema: Any, root: Any, depth: int = 8) -> frozenset[str]:
    """Return the JSON types that a schema allows; all types if it does not limit them. `root` has its definitions."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return ALL_TYPES
    for keyword in ("anyOf", "oneOf"):
        if "type" not in schema and isinstance(several := schema.get(keyword), list):
            return frozenset().union(*(types_of(one, root, depth - 1) for one in several))
    return _types(schema)


def resolved(schema: Any, root: Any) -> Any:
    """Follow references within the document `root`; return the schema itself if it is not a reference."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or (reference := schema.get("$ref")) is None:
            break
        is_inner = isinstance(reference, str) and reference.startswith("#")
        found = at_pointer(root, reference[1:]) if is_inner else None
        schema = {} if found is None else found
    return schema
