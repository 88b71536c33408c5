"""Mistakes in the cache of earlier answers. Each must fail the tests named here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing

from outpace.core.types import Request
from outpace.engine import earlier_texts
from outpace.engine.earlier_texts import AnswerCache


def of_all_keys(find: Original) -> Original:
    return lambda known, request: find(known, replace(request, cache_salt=None))


def with_prompt(find: Original) -> Original:
    def mutated(known: AnswerCache, request: Request) -> tuple[int, ...]:
        found = find(known, request)
        return (*request.prompt, *found) if found else ()

    return mutated


def picked_anyhow(_: Original) -> Any:
    return lambda request: ()


MISTAKES: list[tuple[str, Any, str, Any, str]] = [
    ("nothing is kept", AnswerCache, "store", nothing, "memory_is_bounded"),
    ("another key's texts are offered", AnswerCache, "find", of_all_keys, "other_requests_get_nothing"),
    ("the prompt is offered too", AnswerCache, "find", with_prompt, "a_prompt_that_continues_an_answer_gets_the_rest"),
    ("texts of other noise are offered", earlier_texts, "_sampling_key", picked_anyhow, "other_requests_get_nothing"),
]
RECALL_MUTATIONS: list[Mutation] = [
    mutation(f"recall: {name}", owner, attribute, change, f"test_answer_cache.py::test_{test}")
    for name, owner, attribute, change, test in MISTAKES
]
