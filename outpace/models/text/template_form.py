"""Puts conversations in the form that a chat template renders; the form is found by rendering short probes once.

Templates differ in what they take: content as text or as a list of parts, arguments of calls as objects or as JSON
text, an empty content or none next to calls, thoughts under one of several names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from outpace.core.errors import UserError

Message = Mapping[str, Any]
FIRST, SECOND, THOUGHT, RESULT = "zqfirst", "zqsecond", "zqthought", "zqresult"  # texts of probes
NAME, KEY, VALUE, CALL_ID = "zqname", "zqkey", "zqvalue", "zq1234567"  # a call's; Mistral's ids have nine characters
ARGUMENTS = json.dumps({KEY: VALUE})
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
THINKING = "thinking"  # the type of a part that is a thought, and its field, as in Mistral's templates
USER: Message = {"role": "user", "content": FIRST}
PROBED_TOOL = {"type": "function", "function": {"name": NAME, "description": "", "parameters": {"type": "object"}}}


class Render(Protocol):
    """Renders messages as they are; raises UserError if the template refuses them."""

    def __call__(self, messages: Sequence[Message], /, add_generation_prompt: bool = True) -> str: ...


class ContentForm(NamedTuple):
    """Which contents of a role's messages are shown: a text, a list of one part, a list of several parts."""

    text: bool
    part: bool
    parts: bool


class CallForm(NamedTuple):
    """How calls are given: arguments as JSON text instead of an object; a content without text null instead of empty;
    the text of the same message in a message of its own."""

    is_text: bool = False
    is_null: bool = False
    is_split: bool = False


class ThoughtForm(NamedTuple):
    """How thoughts are given: the name of a message's field, or None for a part of the content. `shown`: a rendered
    conversation whose last answer has a thought."""

    field: str | None
    shown: str


class TemplateForm:
    """The form of the messages that one chat template renders."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._contents: dict[str, ContentForm] = {}

    def rendered(self, messages: Sequence[Message], render: Render) -> str:
        """Render a conversation in the template's form.

        If the template refuses it, or does not show all of it, a stricter form is tried. Raises UserError for the
        first refusal if no form is rendered.
        """
        found: str | None = None
        refusal: UserError | None = None
        for attempt in self._attempts(messages):
            try:
                text = render(attempt)
            except UserError as error:
                refusal = refusal or error
                continue
            if next(_missing(messages, text), None) is None:
                return text
            found = text if found is None else found
        if found is None:
            raise refusal or UserError("there are no messages")
        return found

    def check_shown(self, messages: Sequence[Message], rendered: str) -> None:
        """Raise UserError if a message's text is not in the rendered conversation since no form of it is shown."""
        for number in _missing(messages, rendered):
            role = str(messages[number].get("role"))
            if not any(self._content_form(role)):
                why = f"shows no content of the role {role!r}, as text or as parts"
                raise UserError(f"the text of messages.{number} would be lost: the model's chat template {why}")

    @cached_property
    def thought_form(self) -> ThoughtForm | None:
        """How thoughts in earlier answers are given; None if the template does not show them."""
        for field in (*THOUGHT_FIELDS, None):
            answer = _with_thought(self.answer(SECOND), THOUGHT, field)
            calling = self._adapted_call({**answer, "tool_calls": [_call()]}, self._call_form)
            for messages in ([USER, answer], [USER, *calling, _result()]):
                shown = self.try_render(messages, add_generation_prompt=False) or ""
                if re.search(rf"(?<!['\"]){THOUGHT}", shown):
                    return ThoughtForm(field, shown)
        return None

    def answer(self, text: str) -> dict[str, Any]:
        """Return an answer in the template's form."""
        return {"role": "assistant", "content": self._content("assistant", text, 0)}

    def try_render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str | None:
        """Render messages as they are; return None if the template refuses them."""
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt)
        except UserError:
            return None

    def _attempts(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Yield the conversation in the template's form, then in others that a strict template may take."""
        given: Sequence[Message] = list(messages)
        yield from self._variants(given)
        for adapt in (_for_strict_template, partial(merged, roles=("user", "assistant"))):
            before, given = given, adapt(given)
            if given != before:
                yield from self._variants(given)

    def _variants(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        if not any(map(_calls_of, messages)):
            yield self._adapted(messages, CallForm())
            return
        own = self._call_form
        for is_split, is_text in itertools.product((own.is_split, not own.is_split), (own.is_text, not own.is_text)):
            yield self._adapted(messages, own._replace(is_split=is_split, is_text=is_text))

    def _adapted(self, messages: Sequence[Message], form: CallForm) -> list[Message]:
        found: list[Message] = []
        for number, given in enumerate(messages):
            message = {name: value for name, value in given.items() if value is not None or name == "content"}
            thought = next((message[name] for name in THOUGHT_FIELDS if message.get(name)), None)
            if message.get("role") == "assistant" and isinstance(thought, str) and self.thought_form:
                message = {name: value for name, value in message.items() if name not in THOUGHT_FIELDS}
            else:
                thought = None
            has_calls = bool(_calls_of(message))
            if "content" in message and not (has_calls and message["content"] is None):
                message["content"] = self._content(str(message.get("role")), message["content"], number)
            if thought is not None and self.thought_form:
                message = _with_thought(message, thought, self.thought_form.field)
            found += self._adapted_call(message, form) if has_calls else [message]
        return found

    def _content(self, role: str, content: Any, number: int) -> Any:
        """Return a content in a form that the template shows: as it is if possible. `number`: of the message."""
        if content is None:
            return ""
        if not isinstance(content, str | list | tuple):
            return content
        form = self._content_form(role)
        if isinstance(content, str):
            return [_part(content)] if form.part and not form.text else content
        parts = list(content)
        if form.parts or (form.part and len(parts) < 2) or not any(form):
            return content
        other = next((part for part in parts if not _is_text(part)), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, Mapping) else other
            why = f"has a part of type {kind!r:.60}, this model's chat template takes text only"
            raise UserError(f"content of messages.{number} {why}")
        text = text_of(parts)
        return text if form.text else [_part(text)]

    def _content_form(self, role: str) -> ContentForm:
        if role not in self._contents:
            parts = [_part(FIRST), _part(SECOND)]
            self._contents[role] = ContentForm(*(self._shows(role, one) for one in (FIRST, parts[:1], parts)))
        return self._contents[role]

    def _shows(self, role: str, content: Any) -> bool:
        """Return whether the template shows a message's content completely, and not as a program's value."""
        message, asked = {"role": role, "content": content}, {"role": "user", "content": "?"}
        contexts: list[list[Message]] = [[message, asked] if role in ("system", "developer") else [asked, message]]
        if role == "user":
            contexts = [[message]]
        elif role == "tool":
            answer = {"role": "assistant", "content": "", "tool_calls": [_call()]}
            calling = self._adapted_call(answer, self._call_form)
            contexts.insert(0, [asked, *calling, {**message, "tool_call_id": CALL_ID, "name": NAME}])
        shown = next(filter(None, map(self.try_render, contexts)), "")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        return all(text in shown for text in texts) and not re.search(rf"""['"]text['"]\s*:\s*['"]{FIRST}""", shown)

    @cached_property
    def opening(self) -> str | None:
        """A user's message and the beginning of its answer, rendered; None if the template refuses it."""
        return self.try_render([USER])

    @cached_property
    def _call_form(self) -> CallForm:
        """The form in which the template shows calls and their arguments, not as Python's dict or quoted twice."""
        after: tuple[list[Message], ...] = ([_result()], [])  # some templates refuse results of tools
        for results, is_text in itertools.product(after, (False, True)):
            for content in (None, ""):  # null first: it is how the APIs say that there is no text
                if self._shows_call(content, is_text, results):
                    both = self._shows_call(self.answer(SECOND)["content"], is_text, results)
                    return CallForm(is_text, content is None, is_split=not both)
        return CallForm()

    def _shows_call(self, content: Any, is_text: bool, results: Sequence[Message]) -> bool:
        """Return whether the template shows a call with this content; null must not be shown as a word."""
        call = _with_arguments(_call(), is_text)
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        shown = self.try_render([USER, answer, *results]) or ""
        if NAME not in shown or (content and SECOND not in shown):
            return False
        if content is None and any(shown.count(word) > (self.opening or "").count(word) for word in ("None", "null")):
            return False
        return ARGUMENTS in shown if is_text else VALUE in shown and f"'{KEY}'" not in shown

    def _adapted_call(self, message: Message, form: CallForm) -> list[Message]:
        """Return an answer with calls in the given form; its text before it if the template shows only one of them."""
        calls, content = [_with_arguments(call, form.is_text) for call in message["tool_calls"]], message.get("content")
        none = None if form.is_null else ""
        if not content or not form.is_split or not text_of(content):
            return [{**message, "content": content or none, "tool_calls": calls}]
        alone = {name: value for name, value in message.items() if name not in ("tool_calls", *THOUGHT_FIELDS)}
        return [alone, {**message, "content": none, "tool_calls": calls}]


def text_of(content: Any) -> str:
    """Return the text of a content: null, a text, or a list of parts."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else ""
    return "\n".join(part["text"] for part in content if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call() -> dict[str, Any]:
    return {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}


def _result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": CALL_ID, "name": NAME, "content": RESULT}


def _with_thought(message: Message, thought: str, field: str | None) -> dict[str, Any]:
    """Return an answer with its thought in a field, or as the first part of its content."""
    if field is not None:
        return {**message, field: thought}
    content = message.get("content") or []
    parts = [_part(content)] if isinstance(content, str) else content
    return {**message, "content": [{"type": THINKING, THINKING: thought}, *parts]}


def _with_arguments(call: Any, is_text: bool) -> Any:
    """Return a call with its arguments as JSON text or as an object; a text that is no JSON object stays as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}  # clients send null or an empty string too
    if is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not is_text and isinstance(arguments, str):
        arguments = _object_of(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _object_of(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # raises ValueError for numbers that JSON does not have
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _missing(messages: Sequence[Message], rendered: str) -> Iterator[int]:
    """Yield the numbers of the messages with a text that is not in a rendered conversation. Of answers, templates drop
    thoughts."""
    end = 0  # of the text found last: most texts are in the order of the messages
    for number, message in enumerate(messages):
        content = message.get("content") if message.get("role") != "assistant" else None
        for part in [content] if isinstance(content, str) else content if isinstance(content, list | tuple) else []:
            text = text_of(part if isinstance(part, str) else [part]).strip()
            place = rendered.find(text, end)
            if place < 0 and text not in rendered and json.dumps(text, ensure_ascii=False)[1:-1] not in rendered:
                yield number
                break
            end = end if place < 0 else place + len(text)


def _for_strict_template(messages: Sequence[Message]) -> list[Message]:
    """Adapt a conversation to strict templates.

    They accept one system message, at the beginning, and (Mistral's) only call ids of nine letters and digits.
    """
    roles = ("system", "developer")
    system = "\n\n".join(text_of(message.get("content")) for message in messages if message.get("role") in roles)
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if message.get("role") in roles:
            continue
        changed = dict(message)
        if calls := _calls_of(message):
            changed["tool_calls"] = [
                {**call, "id": _short_id(call.get("id"))} if isinstance(call, Mapping) else call for call in calls
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        found.append(changed)
    return found


def merged(messages: Sequence[Message], roles: Collection[str]) -> list[dict[str, Any]]:
    """Merge consecutive messages of one of these roles: their texts or parts, thoughts and calls."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        is_same = last.get("role") == message.get("role") in roles
        if not is_same or not all(isinstance(one.get("content") or "", str | list) for one in (last, message)):
            found.append({**message})
            continue
        for name in THOUGHT_FIELDS:
            if thoughts := [str(value) for one in (last, message) if (value := one.get(name))]:
                last[name] = "\n".join(thoughts)
        contents = [content for one in (last, message) if (content := one.get("content"))]
        if any(isinstance(content, list) for content in contents):
            lists = ([_part(content)] if isinstance(content, str) else content for content in contents)
            last["content"] = [*itertools.chain.from_iterable(lists)]
        elif contents:
            last["content"] = "\n".join(contents)
        if calls := [*_calls_of(last), *_calls_of(message)]:
            last["tool_calls"] = calls
    return found


def _calls_of(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else []


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    return text if re.fullmatch("[A-Za-z0-9]{9}", text) else hashlib.sha256(text.encode()).hexdigest()[:9]
