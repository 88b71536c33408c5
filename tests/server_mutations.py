"""Mistakes in the server, templates, thoughts, grammars and tool calls. Each must fail the tests named here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mutation_checks import Original
from part_mutations import mutation, nothing, unchanged

from outpace.card import wire
from outpace.card.wire import LevelLimit, SentRequest
from outpace.core.types import Row
from outpace.engine import target_runner
from outpace.grammar import matcher, merging, schema
from outpace.models.text import template_form, thought_marks
from outpace.models.text.template_form import TemplateForm
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
from outpace.tools import call_grammar, reasoning
from outpace.tools.call_scanners import CallScanner
from outpace.tools.calls import CallParser, merge_deltas
from outpace.tools.reasoning import ReasoningParser


def to_one_another(reduce_apart: Original, logits: Any, rows: Sequence[Row]) -> list[Any]:
    """Give the decisions of one request's rows to the others."""
    picks = list(reduce_apart(logits, rows))
    return picks[::-1] if len({id(row.request) for row in rows}) > 1 else picks


def as_internal_error(error: Original, self: Any, message: Any, code: Any) -> Any:
    return ApiError(500, message, code=code)


def of_the_first(hashes: Original, text: Any, tag: Any) -> Any:
    """Allow the first block of each kind alone."""
    return hashes(text, tag).split(" ")[0]


def of_the_queue_alone(max_waiting: Original, self: Any, running: Any) -> Any:
    return self._limits.max_queue


def at_each_chunk(push: Original, self: Any, text: Any) -> Any:
    """Flush a possible tool call as text at the end of each chunk."""
    return merge_deltas([*push(self, text), *self.finish()])


def of_any_text(holds: Original, self: Any, text: Any, path: Any) -> Any:
    return len(text) + len(path) == self.length + len(self.path)


def limits_nothing(is_redundant: Original, keyword: Any, schema: Any) -> Any:
    return True


def known_format(is_redundant: Original, keyword: Any, schema: Any) -> Any:
    return keyword != "format" and is_redundant(keyword, schema)


def by_authorization(authenticate: Original, self: Any, path: str, headers: Any) -> Any:
    """Check the first credential alone."""
    left_out = b"x-api-key" if b"authorization" in headers else b""
    return authenticate(self, path, {name: value for name, value in headers.items() if name != left_out})


def part_by_part(joined: Original, parts: Sequence[Any], is_strict: bool) -> Any:
    """Close each part of a merged object instead of the whole."""
    return {"allOf": [joined([part], is_strict) for part in parts]} if len(parts) > 1 else joined(parts, is_strict)


def left_open(joined: Original, parts: Any, is_strict: Any) -> Any:
    return joined([{"additionalProperties": True}, *parts], is_strict)


def without_objects(limits_objects: Original, self: Any, schema: Any, depth: Any) -> Any:
    return False


def unlimited(limited: Original, self: Any, mask: Any) -> Any:
    return mask


def single_braces(push: Original, self: CallScanner, character: str) -> None:
    self._last = ""
    push(self, character)


def as_calls(emit: Original, self: CallParser, text: str) -> None:
    """Take a fenced example for calls."""
    self._take_fenced()
    emit(self, text)


def of_any_length(read: Original, self: SentRequest, message: Any, own: Any) -> Any:
    """Take a correction whatever the text's length was before it."""
    self._length = message.length - len(message.tokens)
    return read(self, message, own)


def no_text(texts_in: Original, *given: Any) -> Any:
    return ""


def of_the_answer(merge: Original, messages: Any, roles: Any) -> list[dict[str, Any]]:
    """Merge texts and calls only."""
    return [{name: one[name] for name in one if name != "reasoning_content"} for one in merge(messages, roles)]


def of_chats_only(convert: Original, body: Any, service: Any) -> Any:
    """Convert tools for answers, and not for /tokenize."""
    return convert(
        body if isinstance(body, chat_completions.ChatBody) else body.model_copy(update={"tools": None}), service
    )


def alone(render_within: Original, self: Any, most: Any) -> Any:
    """Keep only the last turn of a conversation that is too long."""
    return render_within(self, 1)


def without_penalties(refuse_others: Original, unknown: Any, fields: Any, penalties: Any) -> Any:
    return refuse_others(unknown, fields, {})


def without_salt(prepare: Original, llm: Any, prompt: Any, choice: Any, request: Any, key: Any) -> Any:
    return prepare(llm, prompt, choice, replace(request, cache_salt=None), key)


def by_the_own_name(with_own_names: Original, given: Any, fields: Any) -> Any:
    return ({**given}, {})


def as_sent(content: Original, self: Any, role: Any, value: Any, number: Any) -> Any:
    return value


def whole(adapt: Original, self: Any, message: Any, form: Any) -> Any:
    """Keep the text and the calls of an answer in one message."""
    return adapt(self, message, form._replace(is_split=False))


def none(find: Original, *given: Any, **named: Any) -> Any:
    return None


def of_thoughts_only(read: Original, self: Any, begun: Any) -> Any:
    """Know no marks around answers."""
    return False if self._marks.begins else read(self, begun)


REMOTE, HISTORIES = "test_remote.py::test_", "test_histories.py::test_"
FIELDS, FORMS, THOUGHTS = (f"test_{name}.py::test_" for name in ("other_fields", "template_form", "thoughts"))
FIELD = "thoughts_of_earlier_answers_have_the_name_that_the_template_knows"
NO_VALUES = ("template_values", lambda read, body: {})
ERRORS, KEYWORDS, TOOLS = (f"test_{name}.py::test_" for name in ("server_errors", "schema_keywords", "tools"))
SPLITS = TOOLS + "every_split_of_a_transcript_gives_the_same_deltas"
LIFE, ADMISSION, GRAMMAR = "test_server_life.py::test_", "test_server_life.py::test_", "test_grammar.py::test_"
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
    (FIELDS, "a_seed_of_minus_one_is_drawn", request_body.secrets, "randbelow", lambda draw, most: 7),
    (FIELDS, "a_cache_salt_separates_requests", generation_request, "_prepare", without_salt),
    (FIELDS, "a_long_conversation_is_shortened_on_request", generation_request.Conversation, "render_within", alone),
    ("test_client_fields.py::test_", "the_effort_of_reasoning_reaches_the_template", chat_completions, *NO_VALUES),
    (REMOTE, "an_invalid_level_is_refused", wire, "check", nothing),
    (REMOTE, "a_million_nodes_are_refused", LevelLimit, "count", nothing),
    (REMOTE, "an_invalid_correction_is_refused", SentRequest, "_read_correction", of_any_length),
    (GRAMMAR, "a_question_is_asked_once", matcher._CachedResult, "holds", of_any_text),
    (FORMS, "a_content_is_rendered_as_the_template_takes_it", TemplateForm, "_content", as_sent),
    (FORMS, "arguments_are_objects_or_text_as_the_template_takes_them", template_form, "_with_arguments", unchanged),
    (FORMS, "the_text_of_an_answer_with_calls_is_kept", TemplateForm, "_adapted_call", whole),
    (FORMS, FIELD, template_form, "_with_thought", unchanged),
    (FORMS, "a_text_that_no_form_shows_is_an_error", TemplateForm, "check_shown", nothing),
    (FORMS, "strict_templates_get_one_system_message_and_short_ids", template_form, "_for_strict_template", unchanged),
    (THOUGHTS, "marks_are_found_by_the_template", thought_marks, "_by_name", none),
    (THOUGHTS, "marks_are_found_by_the_template", thought_marks, "_next_to_field", none),
    (THOUGHTS, "marks_are_found_by_the_template", thought_marks._Shown, "around_thought", none),
    (THOUGHTS, "all_marks_are_read_for_every_split_of_the_text", ReasoningParser, "_may_begin", of_thoughts_only),
    (THOUGHTS, "structures_and_calls_follow_a_thought", call_grammar, "after_thought", unchanged),
    (THOUGHTS, "the_prompt_begins_or_closes_a_thought", reasoning, "has_begun_text", none),
]
SERVER_MUTATIONS = [
    mutation(f"server: {owner.__name__}.{attribute} by {change.__name__}", owner, attribute, change, file + test)
    for file, test, owner, attribute, change in MISTAKES
]
