"""Mistakes in what reaches chat templates, and in the separation of thoughts. Each must fail the tests named here."""

from __future__ import annotations

from typing import Any

from mutation_checks import Original
from part_mutations import mutation, nothing
from server_mutations import unchanged

from outpace.models.text import template_form, thought_marks
from outpace.models.text.template_form import TemplateForm
from outpace.tools import call_grammar, reasoning
from outpace.tools.reasoning import ReasoningParser


def as_sent(content: Original) -> Original:
    return lambda self, role, value, number: value


def whole(adapt: Original) -> Original:
    """Keep the text and the calls of an answer in one message."""
    return lambda self, message, form: adapt(self, message, form._replace(is_split=False))


def none(find: Original) -> Original:
    return lambda *given, **named: None


def of_thoughts_only(read: Original) -> Original:
    """Know no marks around answers."""
    return lambda self, begun: False if self._marks.begins else read(self, begun)


FORMS, THOUGHTS = "test_template_form.py::test_", "test_thoughts.py::test_"
FIELD = "thoughts_of_earlier_answers_have_the_name_that_the_template_knows"
MISTAKES: list[tuple[str, Any, str, Any]] = [
    (FORMS + "a_content_is_rendered_as_the_template_takes_it", TemplateForm, "_content", as_sent),
    (FORMS + "arguments_are_objects_or_text_as_the_template_takes_them", template_form, "_with_arguments", unchanged),
    (FORMS + "the_text_of_an_answer_with_calls_is_kept", TemplateForm, "_adapted_call", whole),
    (FORMS + FIELD, template_form, "_with_thought", unchanged),
    (FORMS + "a_text_that_no_form_shows_is_an_error", TemplateForm, "check_shown", nothing),
    (FORMS + "strict_templates_get_one_system_message_and_short_ids", template_form, "_for_strict_template", unchanged),
    (THOUGHTS + "marks_are_found_by_the_template", thought_marks, "_by_name", none),
    (THOUGHTS + "marks_are_found_by_the_template", thought_marks, "_next_to_field", none),
    (THOUGHTS + "marks_are_found_by_the_template", thought_marks._Shown, "around_thought", none),
    (THOUGHTS + "all_marks_are_read_for_every_split_of_the_text", ReasoningParser, "_may_begin", of_thoughts_only),
    (THOUGHTS + "structures_and_calls_follow_a_thought", call_grammar, "after_thought", unchanged),
    (THOUGHTS + "the_prompt_begins_or_closes_a_thought", reasoning, "has_begun_text", none),
]
TEMPLATE_MUTATIONS = [
    mutation(f"templates: {owner.__name__}.{attribute} by {change.__name__}", owner, attribute, change, test)
    for test, owner, attribute, change in MISTAKES
]
