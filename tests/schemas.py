"""JSON schemas by chance, of the keywords that people use; every document that they allow is finite."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[A-Z]{3}-[0-9]{2}$", "^(red|green)$", "^\\d{1,4}$")
NAMES = ("id", "name", "type", "größe", "items", "a b", "x", 'q"', "value", "url")


def schema_by(seed: int) -> dict[str, Any]:
    """An object's schema; the same one for the same number."""
    chance = random.Random(seed)
    schema = _object(chance, 3)
    if chance.random() < 0.3:
        schema["$defs"] = {"part": _any(chance, 1)}
        name = chance.choice(NAMES)
        schema["properties"][name] = {"$ref": "#/$defs/part"}
        schema["required"] = sorted({*schema["required"], name})
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _string, _integer, _number, _plain, _enum, _formatted]
    kinds += [_object, _array, _either] if depth else []
    return chance.choice(kinds)(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": sorted(chance.sample(names, chance.randint(1, len(names)))),
        "additionalProperties": False,
    }
    if chance.random() < 0.2:
        schema |= {"title": "A thing", "description": "Of some kind."}
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + chance.randint(0, 2)}
    if chance.random() < 0.2:
        first = [_any(chance, depth - 1) for _ in range(2)]
        return schema | {"prefixItems": first, "items": False, "minItems": 2, "maxItems": 2}
    return schema | {"items": _any(chance, depth - 1)}


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(2)]}


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        pattern = chance.choice(PATTERNS)
        return {"type": "string", "pattern": pattern}
    least = chance.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _formatted(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(("date", "ipv4", "uuid"))}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100, "multipleOf": chance.choice((1, 5))}


def _plain(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(("boolean", "null", ["boolean", "null"]))}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"const": chance.choice(("fixed", 7, None, ["a", 1]))}
    return {"enum": chance.sample(["red", "green", 3, 4.5, None, True, "ü\n"], 3)}
