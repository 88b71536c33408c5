"""Many schemas: every finished answer validates by another validator, and drafting does not change it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from doubles import QuickToy, decode, make_drafter, make_request
from files import folder_of, write_gguf
from schemas import schema_by

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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    where = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(folder_of(write_gguf(where / "model.gguf"), where / "folder"))


def check(tokenizer: Tokenizer, seeds: range) -> None:
    target, grammars, finished, forced = QuickToy(tokenizer.size, 2, 0), Grammars(tokenizer), 0, 0
    for seed in seeds:
        schema = schema_by(seed)
        asked = schema_of(schema, compact=seed % 2 == 0)
        method, rule, options = WAYS[seed % len(WAYS)]

        def request(asked: Any = asked, seed: int = seed, rule: str = rule, options: Any = options) -> Any:
            constraint = grammars.constraint(asked, len(PROMPT))
            return make_request(PROMPT, rule, MOST, seed=seed, constraint=constraint, **options)

        plain = decode([request()], target=target, engine=ROOM, check_storage=False)
        drafter = SharedTree([grammar.build(grammar.Options()), make_drafter("both", target)])
        worker = "inline" if find("decoders", method).drafting == "parallel" else None
        drafted = decode([request()], method, drafter, worker=worker, target=target, engine=ROOM, check_storage=False)
        assert drafted.texts == plain.texts, (seed, schema)
        assert drafted.reasons == plain.reasons
        forced += drafted.figures.accepted
        if plain.reasons == ["stop"]:
            finished += 1
            text = tokenizer.decode(plain.texts[0])
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert finished > 0.9 * len(seeds)
    assert forced > len(seeds)


def test_answers_validate_and_drafts_do_not_change_them(tokenizer: Tokenizer) -> None:
    check(tokenizer, range(4))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_schemas(tokenizer: Tokenizer, first: int) -> None:
    check(tokenizer, range(first, first + 100))
