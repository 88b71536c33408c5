"""Mistakes in the server, in grammars and in tool calls. Each must fail the tests named here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mutation_checks import Original
from part_mutations import mutation, nothing

from outpace.card import wire
from outpace.card.wire import LevelLimit, SentRequest
from outpace.core.types import Row
from outpace.engine import target_runner
from outpace.grammar import matcher, merging, schema
from outpace.models.text import template_form
from outpace.server import (
    app,
    chat_completions,
    content,
    generation_request,
    request_body,
    responses,
    tool_calls,
)
from outpace.server.app import Middleware
from outpace.server.engine_thread import EngineThread
from outpace.server.errors import ApiError
from outpace.server.service import Admission
from outpace.tools.call_scanners import CallScanner
from outpace.tools.calls import CallParser, merge_deltas


def to_one_another(reduce_apart: Original) -> Original:
    """Give the decisions of one request's rows to the others."""

    def mutated(logits: Any, rows: Sequence[Row]) -> list[Any]:
        picks = list(reduce_apart(logits, rows))
        return picks[::-1] if len({id(row.request) for row in rows}) > 1 else picks

    return mutated


def as_internal_error(error: Original) -> Original:
    return lambda self, message, code: ApiError(500, message, code=code)


def of_the_first(hashes: Original) -> Original:
    """Allow the first block of each kind alone."""
    return lambda text, tag: hashes(text, tag).split(" ")[0]


def of_the_queue_alone(max_waiting: Original) -> Original:
    return lambda self, running: self._limits.max_queue


def at_each_chunk(push: Original) -> Original:
    """Flush a possible tool call as text at the end of each chunk."""
    return lambda self, text: merge_deltas([*push(self, text), *self.finish()])


def of_any_text(holds: Original) -> Original:
    return lambda self, text, path: len(text) + len(path) == self.length + len(self.path)


def limits_nothing(is_redundant: Original) -> Original:
    return lambda keyword, schema: True


def known_format(is_redundant: Original) -> Original:
    return lambda keyword, schema: keyword != "format" and is_redundant(keyword, schema)


def by_authorization(authenticate: Original) -> Original:
    """Check the first credential alone."""

    def mutated(self: Any, path: str, headers: Any) -> Any:
        left_out = b"x-api-key" if b"authorization" in headers else b""
        return authenticate(self, path, {name: value for name, value in headers.items() if name != left_out})

    return mutated


def part_by_part(joined: Original) -> Original:
    """Close each part of a merged object instead of the whole."""

    def mutated(parts: Sequence[Any], is_strict: bool) -> Any:
        return {"allOf": [joined([part], is_strict) for part in parts]} if len(parts) > 1 else joined(parts, is_strict)

    return mutated


def left_open(joined: Original) -> Original:
    return lambda parts, is_strict: joined([{"additionalProperties": True}, *parts], is_strict)


def without_objects(limits_objects: Original) -> Original:
    return lambda self, schema, depth: False


def unlimited(limited: Original) -> Original:
    return lambda self, mask: mask


def single_braces(push: Original) -> Original:
    def mutated(self: CallScanner, character: str) -> None:
        self._last = ""
        push(self, character)

    return mutated


def as_calls(emit: Original) -> Original:
    """Take a fenced example for calls."""

    def mutated(self: CallParser, text: str) -> None:
        self._take_fenced()
        emit(self, text)

    return mutated


def of_any_length(read: Original) -> Original:
    """Take a correction whatever the text's length was before it."""

    def mutated(self: SentRequest, message: Any, own: Any) -> Any:
        self._length = message.length - len(message.tokens)
        return read(self, message, own)

    return mutated


def no_text(texts_in: Original) -> Original:
    return lambda *given: ""


def unchanged(change: Original) -> Original:
    return lambda given, *more, **named: given


def of_the_answer(merge: Original) -> Original:
    """Merge texts and calls only."""

    def mutated(messages: Any, roles: Any) -> list[dict[str, Any]]:
        return [{name: one[name] for name in one if name != "reasoning_content"} for one in merge(messages, roles)]

    return mutated


def of_chats_only(convert: Original) -> Original:
    """Convert tools for answers, and not for /tokenize."""
    return lambda body, service: convert(
        body if isinstance(body, chat_completions.ChatBody) else body.model_copy(update={"tools": None}), service
    )


def alone(render_within: Original) -> Original:
    """Keep only the last turn of a conversation that is too long."""
    return lambda self, most: render_within(self, 1)


def without_penalties(refuse_others: Original) -> Original:
    return lambda unknown, fields, penalties: refuse_others(unknown, fields, {})


def without_salt(prepare: Original) -> Original:
    return lambda llm, prompt, choice, request, key: prepare(
        llm, prompt, choice, replace(request, cache_salt=None), key
    )


def by_the_own_name(with_own_names: Original) -> Original:
    return lambda given, fields: ({**given}, {})


REMOTE, HISTORIES = "test_remote.py::test_", "test_histories.py::test_"
FIELDS = "test_other_fields.py::test_"
NO_VALUES = ("template_values", lambda read: lambda body: {})
ERRORS, KEYWORDS, TOOLS = (f"test_{name}.py::test_" for name in ("server_errors", "schema_keywords", "tools"))
SPLITS = TOOLS + "every_split_of_a_transcript_gives_the_same_deltas"
LIFE, ADMISSION, GRAMMAR = "test_server_life.py::test_", "test_server_admission.py::test_", "test_grammar.py::test_"
MISTAKES: list[tuple[str, str, Any, str, Any]] = [
    (LIFE, "concurrent_requests_get_the_texts_of_single_ones", target_runner, "reduce_isolated", to_one_another),
    (LIFE, "a_disconnect_aborts_the_request", EngineThread, "abort", nothing),
    (LIFE, "an_invalid_request_takes_no_place", Admission, "release", nothing),
    (ADMISSION, "reserved_places_count", Admission, "_error", as_internal_error),
    (ADMISSION, "free_slots_are_filled_at_once", Admission, "_max_waiting", of_the_queue_alone),
    ("test_server_apis.py::test_", "the_page_needs_no_other_server", app, "_block_hashes", of_the_first),
    (ERRORS, "json_depth_is_bounded", request_body, "_check_json", nothing),
    (ERRORS, "any_right_credential_passes", Middleware, "_authenticate", by_authorization),
    (ERRORS, "contradictory_requests_are_refused", app, "_check_head", nothing),
    (SPLITS, "", CallParser, "push", at_each_chunk),
    (SPLITS, "", CallParser, "_emit", as_calls),
    (SPLITS, "", CallScanner, "push", single_braces),
    (KEYWORDS, "objects_with_declared_properties_are_closed", merging, "_joined", left_open),
    (KEYWORDS, "objects_with_declared_properties_are_closed", merging, "_joined", part_by_part),
    (KEYWORDS, "objects_with_declared_properties_are_closed", merging._Merger, "_limits_objects", without_objects),
    (GRAMMAR, "numbers_end_after_twenty_digits", matcher.DigitLimit, "limited", unlimited),
    (GRAMMAR, "what_cannot_be_enforced_is_refused_by_name", schema, "_is_redundant", limits_nothing),
    (KEYWORDS, "an_unknown_format_is_an_annotation", schema, "_is_redundant", known_format),
    (HISTORIES, "the_text_of_unknown_types_is_kept_and_the_rest_named", content, "_texts_in", no_text),
    (HISTORIES, "what_the_user_shows_the_model_is_refused", content, "refuse_media", nothing),
    (HISTORIES, "thoughts_reach_the_template_in_one_form", content, "_thought_in", no_text),
    (HISTORIES, "merged_items_keep_their_thoughts", responses, "merged", of_the_answer),
    (HISTORIES, "the_prefix_cache_survives_the_changing_line", tool_calls, "_without_billing", unchanged),
    (HISTORIES, "nothing_that_is_kept_locks_a_conversation", template_form, "merged", unchanged),
    (HISTORIES, "tokenize_has_the_prompt_of_a_chat", chat_completions, "conversation", of_chats_only),
    (FIELDS, "other_names_of_fields_are_taken", request_body, "with_own_names", by_the_own_name),
    (FIELDS, "values_that_would_change_the_answer_are_refused", request_body, "refuse_others", nothing),
    (FIELDS, "values_that_would_change_the_answer_are_refused", request_body, "refuse_others", without_penalties),
    (FIELDS, "a_seed_of_minus_one_is_drawn", request_body.secrets, "randbelow", lambda draw: lambda most: 7),
    (FIELDS, "a_cache_salt_separates_requests", generation_request, "_prepare", without_salt),
    (FIELDS, "a_long_conversation_is_shortened_on_request", generation_request.Conversation, "render_within", alone),
    ("test_client_fields.py::test_", "the_effort_of_reasoning_reaches_the_template", chat_completions, *NO_VALUES),
    (REMOTE, "an_invalid_level_is_refused", wire, "check", nothing),
    (REMOTE, "a_million_nodes_are_refused", LevelLimit, "count", nothing),
    (REMOTE, "an_invalid_correction_is_refused", SentRequest, "_read_correction", of_any_length),
    (GRAMMAR, "a_question_is_asked_once", matcher._CachedResult, "holds", of_any_text),
]
SERVER_MUTATIONS = [
    mutation(f"server: {owner.__name__}.{attribute} by {change.__name__}", owner, attribute, change, file + test)
    for file, test, owner, attribute, change in MISTAKES
]
