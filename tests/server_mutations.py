"""Mistakes in the server, in grammars and in tool calls: each must fail tests of the suite, named here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutation_checks import Original
from part_mutations import mutation, nothing

from outpace.core.types import Row
from outpace.engine import target_runner
from outpace.grammar import matcher, schema
from outpace.server import reading
from outpace.server.admission import Admission, Place
from outpace.server.engine_thread import EngineThread
from outpace.server.errors import ApiError
from outpace.tools.calls import CallParser, merge_deltas


def to_one_another(reduce_apart: Original) -> Original:
    """What one request's rows decide is handed to the others."""

    def mutated(logits: Any, rows: Sequence[Row]) -> list[Any]:
        picks = list(reduce_apart(logits, rows))
        return picks[::-1] if len({id(row.request) for row in rows}) > 1 else picks

    return mutated


def as_a_fault(later: Original) -> Original:
    return lambda self, want: ApiError(500, want.why, code=want.code)


def at_once(begins_in: Original) -> Original:
    return lambda self, counts: 0.0


def at_each_chunk(push: Original) -> Original:
    """What may still become a call is told as text where a chunk ends."""
    return lambda self, text: merge_deltas([*push(self, text), *self.finish()])


def of_any_text(holds: Original) -> Original:
    return lambda self, text, path: len(text) + len(path) == self.length + len(self.path)


SERVER_MUTATIONS = [
    mutation(
        "server: a text under load differs",
        target_runner,
        "reduce_apart",
        to_one_another,
        "test_server_life.py::test_many_at_once_get_the_texts_that_each_gets_alone",
    ),
    mutation(
        "server: nothing ends for who leaves",
        EngineThread,
        "abort",
        nothing,
        "test_server_life.py::test_who_leaves_ends_the_work",
    ),
    mutation(
        "server: a full queue is a fault",
        Admission,
        "_later",
        as_a_fault,
        "test_server_admission.py::test_what_is_being_tokenised_has_a_place_in_the_queue",
    ),
    mutation(
        "server: who cannot begin in time waits",
        Admission,
        "_begins_in",
        at_once,
        "test_server_admission.py::test_who_cannot_begin_in_time_is_refused_at_once",
    ),
    mutation(
        "server: a refused request keeps its place",
        Place,
        "leave",
        nothing,
        "test_server_queue.py::test_a_wrong_request_gives_its_place_back",
    ),
    mutation(
        "grammar: a rule that is not enforced is taken for an annotation",
        schema,
        "_has_meaning",
        lambda f: lambda keyword: False,
        "test_grammar.py::test_what_cannot_be_enforced_is_refused_by_name",
    ),
    mutation(
        "grammar: what was asked of one text holds for all of its length",
        matcher._Answer,
        "holds",
        of_any_text,
        "test_grammar.py::test_a_question_is_asked_once",
    ),
    mutation(
        "server: any depth of JSON is served",
        reading,
        "_check",
        nothing,
        "test_server_errors.py::test_json_as_deep_as_allowed_is_read",
    ),
    mutation(
        "server: a call is cut where its chunks are",
        CallParser,
        "push",
        at_each_chunk,
        "test_tools.py::test_every_split_of_a_transcript_gives_the_same_deltas",
    ),
]
