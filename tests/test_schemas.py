"""Many schemas: every finished answer validates by another validator, and drafting does not change it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from doubles import QuickToy, decode, make_drafter, make_request

from outpace.core.registry import find
from outpace.drafters import grammar
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import EngineOptions
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import schema_of
from outpace.models.text.tokenizer import Tokenizer

PROMPT = (40, 41, 42)
MOST = 600  # tokens
ROOM = EngineOptions(nodes=12, rows=64, chunk=16)
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("speculative", "greedy", {}),
    ("auto", "gumbel", {"temperature": 1.5}),
    ("speculative", "gumbel", {"temperature": 1.0, "top_k": 12}),
    ("card", "gumbel", {"temperature": 1.0}),
    ("speculative", "match", {"temperature": 1.0}),
]


PATTERNS = ("^[A-Z]{3}-[0-9]{2}$", "^(red|green)$", "^\\d{1,4}$", "^(?=.*[A-Z])(?=.*\\d).{2,6}$")
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
        schema.pop("minProperties", None)  # it was chosen for the other properties
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _string, _number, _number, _plain, _enum, _formatted]
    return chance.choice([*kinds, _object, _array, _either, _tagged, _mapped] if depth else kinds)(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 4))
    required = sorted(chance.sample(names, chance.randint(1, len(names))))
    counts = {"minProperties": chance.choice((len(required), min(len(required) + 1, len(names)), len(names)))}
    return {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": required,
        chance.choice(("additionalProperties", "unevaluatedProperties")): False,
        **(counts if chance.random() < 0.3 else {}),
        **({"title": "A thing", "description": "Of some kind."} if chance.random() < 0.2 else {}),
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.2:
        first = [_any(chance, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2, "maxItems": 2}
    least = chance.randint(0, 2)
    most = least + chance.randint(0, 2)
    return {"type": "array", "minItems": least, "maxItems": most, "items": _any(chance, depth - 1)}


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(2)]}


def _tagged(chance: random.Random, depth: int) -> dict[str, Any]:
    branches = [_object(chance, depth) for _ in range(2)]
    for number, branch in enumerate(branches):
        branch.pop("minProperties", None)
        branch["properties"]["kind"] = {"const": chance.choice((number, f"kind {number}"))}
    if chance.random() < 0.5:
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
    return {"oneOf": [{**branch, "required": [*branch["required"], "kind"]} for branch in branches]}


def _mapped(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.choice(
        ({"enum": ["a", "ü"]}, {"pattern": "^[a-c]{1,2}$"}, {"type": "string", "minLength": 1, "maxLength": 3})
    )
    return {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": _any(chance, depth - 1),
        "maxProperties": 2,
    }


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    least = chance.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _formatted(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(("date", "ipv4", "uuid", "uuid4", "base64", "password"))}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    within = {"minimum": low, "maximum": low + chance.randint(0, 1000)}
    open_within = {"exclusiveMinimum": 0, "exclusiveMaximum": 100, "multipleOf": chance.choice((1, 5))}
    return {"type": "integer", **chance.choice((within, open_within))}


def _plain(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(("boolean", "null", ["boolean", "null"]))}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"const": chance.choice(("fixed", 7, None, ["a", 1]))}
    return {"enum": chance.sample(["red", "green", 3, 4.5, None, True, "ü\n"], 3)}


def without_closing(schema: Any) -> Any:
    """Return a schema of the same answers whose objects are closed because they have properties."""
    if isinstance(schema, list):
        return [without_closing(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closing = ("additionalProperties", "unevaluatedProperties") if "properties" in schema else ()
    return {name: without_closing(inner) for name, inner in schema.items() if name not in closing}


def check(tokenizer: Tokenizer, seeds: range) -> None:
    target, grammars, finished, forced = QuickToy(tokenizer.size, 2, 0), Grammars(tokenizer), 0, 0
    for seed in seeds:
        schema = schema_by(seed)
        asked = schema_of(without_closing(schema) if seed % 3 else schema, compact=seed % 2 == 0)
        method, rule, options = WAYS[seed % len(WAYS)]

        def request(asked: Any = asked, seed: int = seed, rule: str = rule, options: Any = options) -> Any:
            constraint = grammars.constraint(asked, len(PROMPT))
            return make_request(PROMPT, rule, MOST, seed=seed, constraint=constraint, **options)

        plain = decode([request()], target=target, engine=ROOM, check_storage=False)
        drafter = SharedTree([grammar.GrammarDrafter(grammar.Options()), make_drafter("both", target)])
        worker = "inline" if find("decoders", method).drafting == "parallel" else None
        drafted = decode([request()], method, drafter, worker=worker, target=target, engine=ROOM, check_storage=False)
        assert drafted.texts == plain.texts, (seed, schema)
        assert drafted.reasons == plain.reasons
        forced += drafted.figures.accepted
        if plain.reasons == ["stop"]:
            finished += 1
            text = tokenizer.decode(plain.texts[0])
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert finished > 0.8 * len(seeds)
    assert forced > len(seeds)


def test_answers_validate_and_drafts_do_not_change_them(tokenizer: Tokenizer) -> None:
    check(tokenizer, range(4))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_hundreds_of_schemas(tokenizer: Tokenizer, first: int) -> None:
    check(tokenizer, range(first, first + 100))
