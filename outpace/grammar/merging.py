"""Merges the schemas that apply to one value, and closes objects: those with declared properties have no others.

A value's schemas are a schema, those in its `allOf`, that of its `$ref`, and a branch of its `anyOf` or `oneOf`. An
object may have the properties of all of them, so it can be closed only after they are merged.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urljoin

from outpace.core.errors import UserError

MAX_DEPTH = 64  # of nested schemas
MAX_MERGED = 20_000  # schemas and properties after merging
NAMES = frozenset(("$id", "id", "$anchor", "$dynamicAnchor"))  # names that references use
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
ONES = ("items", "additionalItems", "additionalProperties")
_FIELDS, _DEFINITIONS, _BRANCHES = MAPS[:2], MAPS[2:], LISTS[:2]
_OF_OTHERS = frozenset(("$ref", "allOf", *_BRANCHES, *_DEFINITIONS, *NAMES))
_OF_OBJECTS = frozenset((*_FIELDS, "additionalProperties", "required", "minProperties", "maxProperties"))
_COMPOUND = frozenset((*_OF_OTHERS, *_OF_OBJECTS, *LISTS, *ONES))


def unsupported(keyword: str, value: Any) -> UserError:
    """Return the error for a keyword that cannot be enforced."""
    return UserError(f"the JSON schema has {keyword!r} ({reprlib.repr(value)}), which is not supported")


def merged(root: Mapping[str, Any]) -> Any:
    """Return a reduced schema with closed objects; its references lead to its `$defs`.

    Raises UserError if a reference leads nowhere or to itself, or if merging makes the schema too large.
    """
    return _Merger(root).whole()


class _Merger:
    """Merges the schemas of each place: of the whole answer, a property, or an item."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._bases: dict[int, str] = {}  # by id(): the URI of a schema's document
        self._by_uri: dict[str, Any] = {"": root}
        self._find_names(root, "")
        self._known: dict[int, bool] = {}  # by id(): whether a schema limits objects
        self._definitions: dict[tuple[int, ...], str] = {}  # by id() of the schemas of a place: its name
        self._waiting: list[tuple[str, Sequence[Any]]] = []  # definitions to write
        self._merged = 0

    def whole(self) -> Any:
        found, definitions = self._merge([self._root]), {}
        while self._waiting:
            name, schemas = self._waiting.pop()
            definitions[name] = self._merge(schemas)
        return {**found, "$defs": definitions} if definitions and found is not False else found

    def _find_names(self, schema: Any, base: str) -> None:
        """Record the names of a schema and those in it."""
        if not isinstance(schema, Mapping):
            return
        if "$id" in schema:
            uri = _joined_uri(base, schema["$id"])
            base = uri.partition("#")[0]
            self._by_uri[uri] = schema
        if "$anchor" in schema:
            self._by_uri[f"{base}#{schema['$anchor']}"] = schema
        self._bases[id(schema)] = base
        for inner in _inner(schema).values():
            self._find_names(inner, base)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema to which `$ref` leads."""
        reference, base = schema["$ref"], self._bases[id(schema)]
        uri = _joined_uri(base, reference)
        document, _, pointer = uri.partition("#")
        where = "outside of the schema"
        if (found := self._by_uri.get(uri)) is None and document in self._by_uri:
            found, where = at_pointer(self._by_uri[document], pointer), "which does not exist"
        if not isinstance(found, Mapping | bool):
            raise UserError(f"the JSON schema cannot be enforced: $ref leads to {reference[:200]}, {where}")
        return found

    def _place(self, schemas: Sequence[Any]) -> Any:
        """Return what schemas allow together. With references it becomes a definition, which may refer to itself."""
        if len(schemas) == 1 and (isinstance(schemas[0], bool) or not schemas[0].keys() & _COMPOUND):
            return schemas[0]  # as most are
        found: dict[int, Any] = {}
        for schema in schemas:
            for _ in range(MAX_DEPTH):
                if isinstance(schema, bool) or schema.keys() - NAMES != {"$ref"}:
                    break
                schema = self._target(schema)
            found[id(schema)] = schema
        if not any(map(_refers, schemas)):
            return self._merge(list(found.values()))
        key = tuple(found)
        if key not in self._definitions:
            self._definitions[key] = str(len(self._definitions))
            self._waiting.append((self._definitions[key], list(found.values())))
        return {"$ref": f"#/$defs/{self._definitions[key]}"}

    def _merge(self, schemas: Sequence[Any]) -> Any:
        parts = [part for schema in schemas for part in self._parts(schema, len(schemas) - 1)]
        closing = [part for part in parts if part and "unevaluatedProperties" in part]
        for part in closing:
            del part["unevaluatedProperties"]
        return self._written([part for part in parts if part != {}], bool(closing), 0)

    def _parts(self, schema: Any, depth: int) -> list[Any]:
        """Split a schema into those that apply to the same value, in the order in which they declare properties.

        They have no `$ref` and `allOf`, and `anyOf` and `oneOf` alone. `depth` is 0 for the schema of a place.
        """
        if isinstance(schema, bool):
            return [] if schema else [False]
        self._count(1, depth)
        rest = {keyword: value for keyword, value in schema.items() if keyword not in _OF_OTHERS}
        if depth and "unevaluatedProperties" in rest:
            raise unsupported("unevaluatedProperties", False)
        found = [rest] if rest and "properties" not in rest else []
        for keyword, value in schema.items():
            if keyword == "properties":
                found.append(rest)
            elif keyword == "$ref":
                found += self._parts(self._target(schema), depth + 1)
            elif keyword == "allOf":
                found += [part for one in value for part in self._parts(one, depth + 1)]
            elif keyword in _BRANCHES:
                found.append({keyword: value})
        return found

    def _written(self, parts: Sequence[Any], is_strict: bool, depth: int) -> Any:
        """Return what all parts allow. `is_strict`: an object has declared properties only, even if it requires others.

        Branches are merged with the other parts if both limit objects.
        """
        if False in parts:
            return False
        of_objects = [self._limits_objects(part, depth) for part in parts]
        for number, part in enumerate(parts):
            keyword = next(iter(part))
            if keyword in _BRANCHES and of_objects[number] and sum(of_objects) > 1:
                before, after = parts[:number], parts[number + 1 :]
                branches = [[*before, *self._parts(one, depth + 1), *after] for one in part[keyword]]
                return {keyword: [self._written(branch, is_strict, depth + 1) for branch in branches]}
        return _joined(self._with_places(parts), is_strict)

    def _limits_objects(self, schema: Any, depth: int) -> bool:
        """Return whether a schema limits objects, itself or by those that it applies to the same value."""
        self._count(0, depth)
        if isinstance(schema, bool) or (schema.keys() & _OF_OBJECTS):
            return not isinstance(schema, bool)
        if id(schema) not in self._bases or id(schema) not in self._known:
            self._known[id(schema)] = False  # if it leads back to itself
            inner = [one for keyword in ("allOf", *_BRANCHES) for one in schema.get(keyword, ())]
            inner += [self._target(schema)] if "$ref" in schema else []
            self._known[id(schema)] = any(self._limits_objects(one, depth + 1) for one in inner)
        return self._known[id(schema)]

    def _with_places(self, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the parts with merged properties and items.

        If several parts limit objects in one place, the first of them has all these limits.
        """
        self._count(sum(1 + len(part.get("properties", ())) for part in parts), 0)
        has_first = any("prefixItems" in part or isinstance(part.get("items"), list) for part in parts)
        together: dict[tuple[str, Any], list[Any]] = {}
        for place, inner in (pair for part in parts for pair in _inner(part).items()):
            if place[0] in (*_FIELDS, "items") and self._limits_objects(inner, 0):
                together.setdefault(place, []).append(inner)
        shared = {
            place for place, several in together.items() if len(several) > 1 and (place[0] != "items" or not has_first)
        }
        found = []
        for part in parts:
            new = {}
            for place, inner in _inner(part).items():
                is_shared = place in shared and self._limits_objects(inner, 0)
                new[place] = self._place(together.pop(place, ()) if is_shared else [inner])
            found.append(_replaced(part, new))
        return found

    def _count(self, number: int, depth: int) -> None:
        self._merged += number
        if depth > MAX_DEPTH:
            why = f"more than {MAX_DEPTH} levels of allOf, anyOf, oneOf and $ref, or a $ref that leads back to itself"
            raise UserError(f"the JSON schema has {why}")
        if self._merged > MAX_MERGED:
            raise UserError(f"the JSON schema has more than {MAX_MERGED} parts after allOf, anyOf and $ref are merged")


def _joined(parts: Sequence[dict[str, Any]], is_strict: bool) -> dict[str, Any]:
    """Return one schema for several, which no longer have branches of objects, and close it.

    `additionalProperties` is about the properties of its own part, so such parts remain in `allOf`.
    """
    is_declared = any("additionalProperties" in part for part in parts)
    is_listed = any(part.keys() & {"const", "enum"} for part in parts)
    has_properties = any(inner is not False for part in parts for inner in part.get("properties", {}).values())
    is_closed = not is_declared and (is_strict or (has_properties and not is_listed))
    is_separate = is_declared and sum(bool(part.keys() & {*_FIELDS, "additionalProperties"}) for part in parts) > 1
    joinable = {*_BRANCHES, "minProperties", "maxProperties"} | (set() if is_separate else {"additionalProperties"})
    first: dict[str, Any] = {}
    others = []
    for number, part in enumerate(parts):
        for keyword in () if is_separate else _FIELDS:
            for name, inner in part.pop(keyword, {}).items():
                if first.setdefault(keyword, {}).setdefault(name, inner) is not inner and inner != {}:
                    part.setdefault(keyword, {})[name] = inner
        if required := [*first.get("required", ()), *part.pop("required", ())]:
            first["required"] = list(dict.fromkeys(required))
        same = {"type"} if first.get("type", part.get("type")) == part.get("type") else set()
        is_joinable = part.keys() - same <= joinable - first.keys() and not first.keys() & {"const", "enum"}
        if number == 0 or not part or is_joinable:  # next to values, llguidance refuses what contradicts them
            first |= part
        else:
            others.append(_with_counts(part))
    if is_closed:
        for name in () if is_strict else first.get("required", ()):
            first.setdefault("properties", {}).setdefault(name, {})
        first["additionalProperties"] = False
    first = _with_counts(first)
    return {**first, "allOf": [*first.get("allOf", ()), *others]} if others else first


def _with_counts(kept: dict[str, Any]) -> dict[str, Any]:
    """Rewrite minProperties and maxProperties: llguidance supports them only if all properties are required.

    It would count a repeated name twice, so at most one property beyond the required ones can be demanded.
    """
    properties, required = kept.get("properties", {}), kept.get("required", ())
    is_closed = kept.get("additionalProperties") is False and not kept.get("patternProperties")
    optional = [name for name in properties if name not in required]
    min_count, max_count = kept.get("minProperties", 0) - len(required), kept.get("maxProperties", math.inf)
    if min_count <= 0:
        kept.pop("minProperties", None)
    if is_closed and max_count >= len(required) + len(optional):
        kept.pop("maxProperties", None)
    if optional and min_count == len(optional) and is_closed:
        del kept["minProperties"]
        kept["required"] = [*required, *optional]
    elif optional and min_count == 1:
        del kept["minProperties"]
        kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": [{"required": [name]} for name in optional]}]
    elif min_count > 1 and not optional:
        raise unsupported("minProperties", min_count + len(required))
    if "maxProperties" in kept and optional:
        raise unsupported("maxProperties", max_count)
    return kept


def _inner(schema: Mapping[str, Any]) -> dict[tuple[str, Any], Any]:
    """Return the inner schemas by keyword and name in it, number in it, or None if the keyword has one."""
    found: dict[tuple[str, Any], Any] = {}
    for keyword in (*MAPS, *LISTS, *ONES):
        value = schema.get(keyword)
        if keyword in MAPS:
            found |= {(keyword, name): inner for name, inner in (value or {}).items()}
        elif isinstance(value, list):
            found |= {(keyword, number): inner for number, inner in enumerate(value)}
        elif value is not None:
            found[keyword, None] = value
    return found


def _replaced(schema: Mapping[str, Any], new: Mapping[tuple[str, Any], Any]) -> dict[str, Any]:
    """Return a schema with other inner schemas."""
    found = {keyword: {} if keyword in MAPS else value for keyword, value in schema.items()}
    for (keyword, name), inner in new.items():
        if keyword in MAPS:
            found[keyword][name] = inner
        else:
            found[keyword] = inner if name is None else [*found[keyword][:name], inner, *found[keyword][name + 1 :]]
    return found


def _joined_uri(base: str, reference: str) -> str:
    if reference.startswith("#"):  # urljoin would forget a base such as urn:uuid:...
        return (base + reference).rstrip("#")
    try:
        return urljoin(base, reference).rstrip("#")
    except ValueError:
        return reference


def _refers(schema: Any) -> bool:
    """Return whether a reference in a schema applies to the schema's own value."""
    if isinstance(schema, bool):
        return False
    inner = (one for keyword in ("allOf", *_BRANCHES) for one in schema.get(keyword, ()))
    return "$ref" in schema or any(map(_refers, inner))


def at_pointer(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer; None if there is none."""
    first, *others = pointer.split("/")
    found = None if first else document
    for part in others:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found
