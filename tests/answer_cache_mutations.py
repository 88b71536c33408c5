"""Mistakes in what is recalled of earlier texts: each must fail a test of the suite, named here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing

from outpace.core.types import Request
from outpace.engine import answer_cache
from outpace.engine.answer_cache import AnswerCache


def of_all_keys(find: Original) -> Original:
    return lambda known, request: find(known, replace(request, cache_salt=None))


def from_the_beginning(find: Original) -> Original:
    def mutated(known: AnswerCache, request: Request) -> tuple[int, ...]:
        found = find(known, request)
        return (*request.prompt, *found) if found else ()

    return mutated


def picked_anyhow(_: Original) -> Any:
    return lambda request: ()


RECALL_MUTATIONS: list[Mutation] = [
    mutation("recall: nothing is kept", AnswerCache, "store", nothing, "test_answer_cache.py::test_memory_is_bounded"),
    mutation(
        "recall: another key's texts are offered",
        AnswerCache,
        "find",
        of_all_keys,
        "test_answer_cache.py::test_others_are_offered_nothing",
    ),
    mutation(
        "recall: what was typed is offered again",
        AnswerCache,
        "find",
        from_the_beginning,
        "test_answer_cache.py::test_who_types_on_what_was_written_is_offered_the_rest",
    ),
    mutation(
        "recall: texts that were picked by other noise are offered",
        answer_cache,
        "_way",
        picked_anyhow,
        "test_answer_cache.py::test_others_are_offered_nothing",
    ),
]
