"""Every keyword of JSON Schema is ignored because it has no effect, enforced, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from test_grammar import accepts

from outpace.core.errors import UserError
from outpace.grammar import schema
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import schema_of
from outpace.models.text.tokenizer import Tokenizer

OBJECT = {"type": "object"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["n"]}
DOG = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "wolf"]}, "pack": {"type": "array", "items": {"$ref": "#/$defs/pet"}}},
    "required": ["pack"],
}
PET = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
PETS = {"$ref": "#/$defs/pet", "$defs": {"pet": PET, "cat": CAT, "dog": DOG}}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**AB, "additionalProperties": False}
DOUBLING = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)} | {"d20": {"required": ["a"]}}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


NOTHING: dict[str, list[dict[str, Any]]] = {
    "$schema": [{"$schema": "https://json-schema.org/draft/2020-12/schema"}, {"$schema": "http://example.org/own"}],
    "$id": [{"$id": "https://example.org/x"}],
    "$anchor": [{"$anchor": "here"}],
    "$dynamicAnchor": [{"$dynamicAnchor": "here"}],
    "$recursiveAnchor": [{"$recursiveAnchor": True}],
    "$comment": [{"$comment": "?"}],
    "$vocabulary": [{"$vocabulary": {}}],
    "$defs": [{"$defs": {"a": {"type": "string"}}}],
    "definitions": [{"definitions": {"a": {"type": "string"}}}],
    **{name: [{name: "?"}] for name in ("title", "description", "default", "contentEncoding", "contentMediaType")},
    **{name: [{name: True}] for name in ("deprecated", "readOnly", "writeOnly", "examples")},
    "contentSchema": [{"contentSchema": {"not": {"type": "null"}}}],
    "uniqueItems": [
        {"uniqueItems": False},
        {"type": "object", "uniqueItems": True},
        {"uniqueItems": True, "maxItems": 1},
    ],
    "contains": [{"contains": {"type": "null"}, "minContains": 0}, {"type": "object", "contains": {"const": 1}}],
    "minContains": [{"minContains": 2}],
    "maxContains": [{"maxContains": 2}],
    "if": [{"if": {"required": ["a"]}}],
    "then": [{"then": {"required": ["a"]}}],
    "else": [{"else": {"required": ["a"]}}],
    "not": [{"not": False}],
    "dependentRequired": [{"dependentRequired": {}}, {"dependentRequired": {"a": []}}],
    "dependentSchemas": [{"dependentSchemas": {"a": True}}],
    "dependencies": [{"dependencies": {"a": []}}],
    "propertyNames": [
        *(
            {"propertyNames": names}
            for names in (True, {}, {"type": "string"}, {"type": ["string", "null"], "title": "?"})
        ),
        {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}},
    ],
    "unevaluatedProperties": [{"unevaluatedProperties": {}}],
    "unevaluatedItems": [{"unevaluatedItems": True}],
    "minProperties": [{"minProperties": 0}],
    "minimum": [{"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}],  # zod's float64
    "nullable": [{"nullable": False}, {"nullable": True}],
    "format": [{"type": "object", "format": "zzz"}, {"propertyNames": {"format": "regex"}}],
    "x-order": [{"x-order": 1}, {"version": 3}],
}
NULLS = dict.fromkeys(("title", "type", "enum", "format", "minimum", "required", "not", "anyOf", "$ref", "items"))

ENFORCED: dict[str, list[tuple[Any, list[str], list[str]]]] = {
    "type": [({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5"])],
    "const": [({"const": None}, ["null"], ["1"]), ({"const": {"a": [1]}}, ['{"a":[1]}'], ['{"a":[2]}'])],
    "enum": [({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"])],
    "multipleOf": [({"type": "integer", "multipleOf": 5}, ["10"], ["7"])],
    "minimum": [({"type": "integer", "minimum": 3}, ["3"], ["2"])],
    "exclusiveMinimum": [({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3"])],
    "maximum": [
        ({"type": "integer", "maximum": 3}, ["3"], ["4"]),
        ({"type": "integer", "maximum": 2**64 - 1}, ["9223372036854774784"], ["18446744073709551616"]),
    ],
    "exclusiveMaximum": [
        ({"type": "number", "exclusiveMaximum": 3.4028234663852886e38}, ["1.5", "-3"], ['"a"']),
        ({"type": "integer", "exclusiveMaximum": 3}, ["2"], ["3"]),
    ],
    "minLength": [({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"'])],
    "maxLength": [({"type": "string", "maxLength": 2}, ['"ab"'], ['"abc"'])],
    "pattern": [
        ({"type": "string", "pattern": r"^\d+$"}, ['"12"'], ['"𝟗"', '"a"']),
        ({"type": "string", "pattern": "^[[&&a]$"}, ['"["', '"&"', '"a"'], ['"b"']),
        (
            {"type": "string", "pattern": r"^(?=.*[A-Z])(?=[^)]*\d).{3,}$"},
            ['"aA1"', '"1Ab"'],
            ['"aa1"', '"aAb"', '"A1"'],
        ),
        ({"type": "string", "pattern": "^(?=.{1,3}$)(a|b)+$"}, ['"aba"'], ['"abab"', '"c"', '""']),
        ({"type": "string", "pattern": DECIMAL}, ['"-1.5"', '"7."'], ['"-."', '"a"']),
        (
            {"type": "string", "format": "email", "pattern": EMAIL},
            ['"a.b@c.de"'],
            ['"a..b@c.de"', '".a@c.de"', '"a@b"'],
        ),
        ({"type": "string", "pattern": EMAIL}, ['"a.b@c.de"'], ['"a..b@c.de"', '".a@c.de"', '"a@b"']),
    ],
    "format": [
        (
            {"type": "string", "format": "includes", "allOf": [{"pattern": "^a"}, {"pattern": "b"}]},  # zod's
            ['"acb"'],
            ['"ac"', '"b"'],
        ),
        ({"type": "string", "format": "jwt"}, ['"a.b.c"'], ['"a.b"', '"?.b.c"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"']),
        ({"type": "string", "format": "iri"}, ['"https://a.b/c"'], ['"a b"']),
        ({"type": "string", "format": "base64"}, ['"aGk="', '""'], ['"aGk"', '"?"']),
        ({"type": "string", "format": "base64url"}, ['"aGk"', '"aGk="'], ['"a+k"']),
        (
            {"type": "string", "format": "uuid4"},
            ['"01234567-89ab-4def-8123-456789abcdef"'],
            ['"01234567-89ab-1def-8123-456789abcdef"'],
        ),
        ({"type": "string", "format": "json-pointer"}, ['"/a~1b/0"', '""'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "password"}, ['"a b"'], ["1"]),
        ({"type": "string", "format": "cuid", "pattern": "^c[a-z]+$"}, ['"cab"'], ['"x"']),  # zod's: the pattern limits
    ],
    "items": [({"type": "array", "items": {"type": "integer"}}, ["[1]"], ['["a"]'])],
    "prefixItems": [({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[1]"], ["[1,1]", "[2]"])],
    "additionalItems": [({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]"], ["[1,1]"])],
    "unevaluatedItems": [
        ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, ["[1]"], ["[1,1]"])
    ],
    "minItems": [({"type": "array", "minItems": 1}, ["[1]"], ["[]"])],
    "maxItems": [({"type": "array", "maxItems": 1}, ["[1]"], ["[1,1]"])],
    "properties": [(AB, ['{"a":1}'], ['{"a":"x"}'])],
    "patternProperties": [({"type": "object", "patternProperties": {"^a": {"const": 1}}}, ['{"ab":1}'], ['{"ab":2}'])],
    "additionalProperties": [(CLOSED, ['{"a":1,"b":2}'], ['{"c":1}'])],
    "unevaluatedProperties": [({**AB, "unevaluatedProperties": False}, ['{"a":1}'], ['{"c":1}'])],
    "required": [({**AB, "required": ["b"]}, ['{"b":1}'], ['{"a":1}'])],
    "minProperties": [
        ({**CLOSED, "minProperties": 1}, ['{"b":1}', '{"a":1}', '{"a":1,"b":1}'], ["{}"]),
        ({**AB, "minProperties": 1}, ['{"b":1}'], ["{}"]),
        ({**CLOSED, "minProperties": 2}, ['{"a":1,"b":1}'], ['{"a":1}']),
        ({**AB, "required": ["a"], "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ],
    "maxProperties": [
        ({**CLOSED, "maxProperties": 2}, ['{"a":1,"b":1}', "{}"], ['{"c":1}']),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    ],
    "propertyNames": [
        (
            {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
            ['{"x":1}', "{}", '{"x":1,"y":2}'],
            ['{"z":1}', '{"x":"a"}'],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/n"},
                "$defs": {"n": {"type": "string", "enum": ["x"]}},
            },
            ['{"x":1}'],
            ['{"z":1}'],
        ),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}}, ['{"ab":1}'], ['{"A":1}']),
        (
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
            ['{"ab":1}'],
            ['{"a":1}', '{"abcd":1}'],
        ),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, ["{}"], ['{"a":1}']),
        ({**AB, "propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"b":1}', '{"c":1}']),
    ],
    "allOf": [({"allOf": [{**AB, "required": ["a"]}, {"required": ["b"]}]}, ['{"a":1,"b":1}'], ['{"a":1}'])],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"a"'])],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"a"']),
        ({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]}, ["1", "2"], ["3"]),
        ({"oneOf": [{"type": "string", "nullable": True}, {"type": "integer"}]}, ['"a"', "1"], ["[]"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", 1]}]}, ['"a"', "1"], ['"d"']),
        ({"oneOf": [{"$ref": "#/$defs/c"}, {"type": "string"}], "$defs": {"c": {"const": 1}}}, ["1", '"a"'], ["2"]),
    ],
    "discriminator": [
        (
            PETS,
            ['{"kind":"cat","n":1}', '{"kind":"dog","pack":[{"kind":"cat","n":1}]}'],
            ['{"n":1}', '{"kind":"cow","n":1}', '{"kind":"dog","pack":[{"n":1}]}'],
        )
    ],
    "not": [
        ({"type": "object", "properties": {"a": {"not": {}}}}, ['{"b":1}', "{}"], ['{"a":1}']),  # declares none
        ({"type": "array", "items": {"not": True}}, ["[]"], ["[1]"]),
    ],
    "$ref": [
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#here", "$defs": {"a": {"$dynamicAnchor": "here", "const": 1}}}, ["1"], ["2"]),
        ({"$id": "http://a.b/c", "$ref": "d", "$defs": {"a": {"$id": "d", "const": 1}}}, ["1"], ["2"]),
        (
            {"$id": "urn:a", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#b"}, "b": {"$anchor": "b", "const": 1}}},
            ["1"],
            ["2"],
        ),
        (
            {"$ref": "e:f", "$defs": {"a": {"$id": "e:f", "$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}}},
            ["1"],
            ["2"],
        ),
        ({"items": {"$ref": "#"}, "type": "array"}, ["[[],[[]]]"], ["[1]", "1"]),
    ],
    "nullable": [({"type": "string", "nullable": True}, ['"a"', "null"], ["1"])],
}

REFUSED: dict[str, list[tuple[Any, str]]] = {
    "$dynamicRef": [({"$dynamicRef": "#a"}, "'$dynamicRef'")],
    "$recursiveRef": [({"$recursiveRef": "#"}, "'$recursiveRef'")],
    "if": [({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if'")],
    "not": [({"not": {"type": "null"}}, "'not'")],
    "contains": [
        ({"contains": {"const": 1}}, "'contains'"),
        ({"contains": {}, "minContains": 0, "maxContains": 1}, "'contains'"),
    ],
    "uniqueItems": [({"type": "array", "uniqueItems": True}, "'uniqueItems'")],
    "dependentRequired": [({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'")],
    "dependentSchemas": [({"dependentSchemas": {"a": {"required": ["b"]}}}, "'dependentSchemas'")],
    "dependencies": [({"dependencies": {"a": ["b"]}}, "'dependencies'")],
    "propertyNames": [
        ({**AB, "propertyNames": {"pattern": "^a"}}, "'propertyNames'"),
        ({"propertyNames": {"not": {"const": "a"}}}, "'propertyNames'"),
        ({"propertyNames": {"type": "integer"}}, "'propertyNames'"),
        ({"propertyNames": {"$ref": "other.json"}}, "'propertyNames'"),
    ],
    "unevaluatedProperties": [
        ({"allOf": [AB], "unevaluatedProperties": {"type": "null"}}, "'unevaluatedProperties'"),
        ({"allOf": [{"anyOf": [AB], "unevaluatedProperties": False}]}, "'unevaluatedProperties'"),
    ],
    "unevaluatedItems": [({"anyOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, "'unevaluatedItems'")],
    "minProperties": [
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({**AB, "minProperties": 3}, "min/maxProperties only supported when all keys"),
    ],
    "maxProperties": [({**AB, "maxProperties": 1}, "'maxProperties'")],
    "oneOf": [
        ({"oneOf": [AB, CAT]}, "oneOf"),
        ({"oneOf": [{"type": "string", "nullable": True}, {"type": "null"}]}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
    "discriminator": [({"type": "object", "discriminator": {"propertyName": "a"}}, "'discriminator'")],
    "pattern": [
        ({"type": "string", "pattern": "^a(?=b)b"}, "look-ahead and look-behind, is not supported"),
        ({"type": "string", "pattern": "^(?!a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "^(?=a)a|b"}, "look-ahead"),
        ({"type": "string", "pattern": r"\bfoo"}, r"WordUnicode in regex /\bfoo/"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
    ],
    "patternProperties": [({"patternProperties": {"^a": {}, "b$": {}}}, "/^a/ and /b$/ are not disjoint")],
    "format": [({"type": "string", "format": 3}, "format of the JSON schema is 3, it must be a string")],
    "const": [({"const": 2**53 + 1}, "too many digits")],
    "enum": [({"enum": [{"a": [-(2**53) - 1]}]}, "too many digits"), ({"enum": []}, "enum of the JSON schema is []")],
    "multipleOf": [
        ({"type": "number", "multipleOf": 0}, "invalid multiple of"),
        ({"multipleOf": "2"}, "must be a number"),
    ],
    "type": [({"type": "int"}, "type of the JSON schema is 'int'"), ({"type": []}, "type of the JSON schema is []")],
    "required": [({"required": True}, "required of the JSON schema is True, it must be a list of property names")],
    "minLength": [
        ({"minLength": -1}, "minLength"),
        ({"minLength": 1.5}, "minLength"),
        ({"minLength": True}, "minLength"),
    ],
    "minimum": [
        ({"minimum": "1"}, "must be a number"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable schema"),
    ],
    "properties": [({"properties": ["a"]}, "must be an object")],
    "anyOf": [({"anyOf": []}, "must be a non-empty list")],
    "allOf": [({"allOf": [{"type": "object"}, {"type": "string"}]}, "Unsatisfiable schema")],
    "$ref": [
        ({"$ref": "#/$defs/a"}, "$ref leads to #/$defs/a, which does not exist"),
        ({"$ref": "http://example.org/x"}, "$ref leads to http://example.org/x, outside"),
        ({"$ref": "http://[/x"}, "$ref leads to http://[/x, outside"),
        ({"$ref": "#here"}, "$ref leads to #here, which does not exist"),
        ({"$ref": 3}, "$ref of the JSON schema is 3"),
    ],
    "bsonType": [({"bsonType": "int"}, "'bsonType'")],
}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
IN_A = {"properties": {"x": A}}
CLOSED_OBJECTS: list[tuple[Any, list[str], list[str]]] = [  # good and bad answers
    (AB, ['{"a":1}', "{}"], ['{"c":1}', '{"a":1,"c":1}']),
    ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
    (
        {"properties": {"x": {"properties": {"y": A}}}},
        ['{"x":{"y":{"a":1}}}', "3"],
        ['{"x":{"y":{"b":1}}}', '{"x":{"b":1}}'],
    ),
    ({**A, "additionalProperties": None}, ['{"a":1}'], ['{"b":1}']),
    ({"type": "object", "properties": {}}, ["{}", '{"b":1}'], []),
    ({"type": "object"}, ["{}", '{"b":1}'], []),
    ({**A, "additionalProperties": True}, ['{"a":1,"b":1}'], ['{"a":"x"}']),
    ({**A, "additionalProperties": {"type": "null"}}, ['{"a":1,"b":null}'], ['{"b":1}']),
    ({**A, "unevaluatedProperties": True}, ['{"a":1,"b":1}'], ['{"a":"x"}']),
    ({**A, "required": ["z"]}, ['{"a":1,"z":[2]}', '{"z":1}'], ['{"a":1}', '{"z":1,"y":1}']),
    ({**A, "patternProperties": {"^n": {"type": "null"}}}, ['{"a":1,"n1":null}'], ['{"n1":1}', '{"b":null}']),
    ({"enum": [{"a": 1, "c": 2}], **A}, ['{"a":1,"c":2}'], ['{"a":1}']),
    # the merged object is closed
    ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"b":1}'], ['{"c":1}', '{"a":1,"c":1}']),
    ({"allOf": [A], **B}, ['{"a":1,"b":1}'], ['{"c":1}']),
    ({"$ref": "#/$defs/a", **B, "$defs": {"a": A}}, ['{"a":1,"b":1}'], ['{"c":1}']),
    ({"allOf": [A, {"required": ["b"]}]}, ['{"a":1,"b":"x"}'], ['{"a":1}', '{"b":1,"c":1}']),
    ({"allOf": [A, {"patternProperties": {"^n": {}}}]}, ['{"a":1,"n":1}'], ['{"b":1}']),
    ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"b":1,"c":1}'], ['{"a":"x"}']),
    ({"allOf": [A, {**B, "additionalProperties": False}]}, ['{"b":1}'], ['{"a":1}', '{"c":1}']),
    ({"allOf": [A, B], "unevaluatedProperties": True}, ['{"a":1,"b":1,"c":1}'], ['{"b":"x"}']),
    ({"allOf": [A, B], "unevaluatedProperties": False}, ['{"a":1,"b":1}'], ['{"c":1}']),
    ({"allOf": [IN_A, {"properties": {"x": B}}]}, ['{"x":{"a":1,"b":1}}'], ['{"x":{"c":1}}', '{"y":1}']),
    ({"type": "array", "items": A, "allOf": [{"items": B}]}, ['[{"a":1,"b":1}]'], ['[{"c":1}]']),
    ({"allOf": [A, B], "minProperties": 1}, ['{"a":1}', '{"b":1}'], ["{}", '{"c":1}']),
    # each branch has the properties next to it
    ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
    ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"c":1}', "1"]),
    ({**A, "anyOf": [B, {"required": ["c"]}]}, ['{"a":1,"b":1}', '{"a":1,"c":1}'], ['{"b":1,"c":1}', '{"d":1}']),
    (
        {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"a":1,"b":1}'],
        ["{}", '{"a":1,"c":1}'],
    ),
    (
        PETS | {"required": ["z"]},
        ['{"kind":"cat","n":1,"z":1}'],
        ['{"kind":"cat","n":1}', '{"kind":"cat","n":1,"z":1,"y":1}'],
    ),
    (
        {**IN_A, "anyOf": [{"properties": {"x": B}}, B]},
        ['{"x":{"a":1,"b":1}}', '{"x":{"a":1},"b":1}'],
        ['{"x":{"c":1}}'],
    ),
    # recursive schemas
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, ['{"v":1,"next":{"v":2,"next":{}}}'], ['{"next":{"w":1}}']),
    ({**A, "properties": {"x": {"$ref": "#"}}}, ['{"x":{"x":{}}}'], ['{"x":{"x":{"a":1}}}']),
    (
        {"$defs": {"node": {"allOf": [{"$ref": "#/$defs/a"}, NODE]}, "a": A}, "$ref": "#/$defs/node"},
        *(['{"a":1,"v":1,"next":{"a":2}}'], ['{"next":{"b":1}}']),
    ),
]
FORMATS: list[tuple[Any, list[str], list[str]]] = [  # that JSON Schema does not list, or that no grammar can enforce
    ({"type": "string", "format": "phone"}, ['"a"'], ["1"]),
    ({"type": "string", "format": "regex", "maxLength": 2}, ['"("'], ["1", '"abc"']),
    ({"type": "string", "format": "datetime"}, ['"x"'], ["1"]),
    ({"type": "integer", "format": "int32"}, ["1"], ['"a"', "1.5"]),
    ({"type": ["number", "null"], "format": "decimal"}, ["1.5", "null"], ['"a"']),
    ({"type": "array", "items": {"type": "string", "format": "color"}}, ['["a"]'], ["[1]"]),
    ({"anyOf": [{"type": "string", "format": "ipv4network"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
    ({"$ref": "#/$defs/u", "$defs": {"u": {"type": "string", "format": "uri-template"}}}, ['"{x}"'], ["1"]),
    ({"format": "cuid", "pattern": "^c"}, ['"ca"', "1"], ['"a"']),
    ({"format": "zzz"}, ['"a"', "1", "[]"], []),
    ({"type": "object", "propertyNames": {"format": "zzz", "minLength": 2}}, ['{"ab":1}'], ['{"a":1}']),
]
DRAFT_2020_12 = {
    *("$schema", "$id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$defs", "$comment", "$vocabulary"),
    *(
        "prefixItems",
        "items",
        "contains",
        "additionalProperties",
        "properties",
        "patternProperties",
        "dependentSchemas",
    ),
    *(
        "propertyNames",
        "if",
        "then",
        "else",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "unevaluatedItems",
        "unevaluatedProperties",
    ),
    *("type", "const", "enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength"),
    *("minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains", "maxProperties"),
    *(
        "minProperties",
        "required",
        "dependentRequired",
        "format",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ),
    *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"),
}


def test_the_tables_have_all_keywords_of_the_draft() -> None:
    assert {*NOTHING, *ENFORCED, *REFUSED} >= DRAFT_2020_12


@pytest.mark.parametrize("given", [one for many in NOTHING.values() for one in many] + [NULLS], ids=json.dumps)
def test_a_keyword_without_effect_is_left_out(given: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> None:
    asked = schema_of({**OBJECT, **given, "type": "object"})
    assert accepts(grammars, asked, tokenizer, '{"a":[1,1],"b":null}')
    assert not accepts(grammars, asked, tokenizer, "[]")


@pytest.mark.parametrize(("given", "good", "bad"), [one for many in ENFORCED.values() for one in many], ids=json.dumps)
def test_an_enforced_keyword_allows_what_validators_allow(
    given: Any, good: list[str], bad: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = schema_of(given)
    assert [text for text in [*good, *bad] if accepts(grammars, asked, tokenizer, text)] == good
    draft = jsonschema.Draft7Validator if "additionalItems" in given else jsonschema.Draft202012Validator
    validator = draft(given)
    if "nullable" not in given:
        assert all(validator.is_valid(json.loads(text)) for text in good)


@pytest.mark.parametrize(("given", "good", "bad"), CLOSED_OBJECTS, ids=json.dumps)
def test_objects_with_declared_properties_are_closed(
    given: Any, good: list[str], bad: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = schema_of(given)
    assert [text for text in [*good, *bad] if accepts(grammars, asked, tokenizer, text)] == good
    assert all(
        jsonschema.Draft202012Validator(given | {"discriminator": 0}).is_valid(json.loads(text)) for text in good
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"$ref": "#"}, "leads back to itself"),
        ({**A, "anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "leads back to itself"),
        ({**A, "$ref": "#/$defs/d0", "$defs": DOUBLING}, "more than 20000 parts after"),
    ],
    ids=["root", "branch", "definition", "doubling"],
)
def test_the_size_of_a_merged_schema_is_bounded(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        schema.enforceable(given)


@pytest.mark.parametrize(("given", "good", "bad"), FORMATS, ids=json.dumps)
def test_an_unknown_format_is_an_annotation(
    given: Any, good: list[str], bad: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = schema_of(given)
    assert [text for text in [*good, *bad] if accepts(grammars, asked, tokenizer, text)] == good


@pytest.mark.parametrize(("given", "words"), [one for many in REFUSED.values() for one in many], ids=json.dumps)
def test_what_cannot_be_enforced_is_refused_by_name(given: Any, words: str, grammars: Grammars) -> None:
    for where in (given, {"type": "object", "properties": {"x": given}, "required": ["x"]}):
        with pytest.raises(UserError) as raised:
            grammars.compile(schema_of(where))
        assert words in str(raised.value)
        leaks = {"json_schema", "coerce_one_of", "Unimplemented", "f64", "AnyOf", "<"}
        assert not [word for word in leaks if word in str(raised.value)]
