"""Read prompts: a text, chat messages or token ids, one prompt or several; and write fill-in-the-middle prompts."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.arrays import to_python
from outpace.core.errors import UserError, unknown
from outpace.models.files.tokenizer_folder import InfillTokens
from outpace.models.text.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]  # text, messages for the chat template, or token ids
ROLES = ("system", "developer", "user", "assistant", "tool")
_BYTES = (bytes, bytearray, memoryview)  # sequences of integers that are not token ids
REPOSITORY, FILE = "myproject\n", "filename\n"  # names in prompts with several files, as in llama.cpp
SNIPPET = "\n\n--- snippet ---\n\n"  # before a file's text, for models without a token that separates files


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages, and how they are rendered: options of `Tokenizer.render`."""

    messages: Sequence[Mapping[str, Any]]
    rendering: Mapping[str, bool] = field(default_factory=dict)

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        is_prefix = bool(self.messages and self.messages[-1].get("prefix"))
        return is_prefix or self.rendering.get("continue_final_message", False)


def chat_prompt_of(prompt: Prompt | ChatPrompt) -> ChatPrompt | None:
    """Return a prompt that is a list of messages as a conversation; None for other prompts."""
    if isinstance(prompt, ChatPrompt):
        return prompt
    items = _items(prompt)
    return ChatPrompt(items) if items and _are_messages(items) else None


def tokens_of(prompt: Prompt | ChatPrompt, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt; UserError for anything that is not a prompt."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    if conversation := chat_prompt_of(prompt):
        return chat_tokens(conversation, tokenizer)
    items = _items(prompt)
    if items is not None and _are_tokens(items):
        return items
    raise UserError(f"the prompt is {reprlib.repr(prompt)}, it must be text or a list of chat messages or token ids")


def chat_tokens(conversation: ChatPrompt, tokenizer: Any) -> list[int]:
    """Return the token ids of a conversation; UserError for a role that is neither a standard one nor named by the chat
    template.

    A last message with "prefix": True is continued too, as in the APIs of DeepSeek and Mistral.
    """
    for role in (str(message.get("role", "")) for message in conversation.messages):
        # Many templates would silently write any role.
        if role not in ROLES and not (role and re.search(rf"(['\"]){re.escape(role)}\1", tokenizer.template_text)):
            raise unknown("role", role, ROLES)
    rendering = {**conversation.rendering, **({"continue_final_message": True} if conversation.continues else {})}
    ids: list[int] = tokenizer.chat(conversation.messages, **rendering)
    return ids


def prompts_of(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Return the prompts as a list. A list of whole numbers is one prompt, and so is a list of messages."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and (_are_tokens(items) or _are_messages(items)):
        return [items]
    if items is None and (not isinstance(prompts, Iterable) or isinstance(prompts, (Mapping, set, frozenset, *_BYTES))):
        raise UserError(f"prompts is {reprlib.repr(prompts)}, it must be a prompt or a list of prompts")
    return list(prompts) if items is None else items


def messages_of(messages: str | Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the messages of a conversation; a text is the user's first message."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    items = _items(messages)
    if not items or not _are_messages(items):
        raise UserError(
            f"messages is {reprlib.repr(messages)}, it must be a string or a list of messages,"
            " each with role and content"
        )
    return items


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> list[int]:
    """Return the prompt for the text between `prefix` and `suffix`. `files` are names and texts of other files.

    A prompt of more than `max_tokens` tokens is cut: at the first files, the beginning of the prefix, and the end of
    the suffix, which keeps at least a quarter of them. Raises UserError if the model has no tokens for such prompts.
    """
    marks = tokenizer.infill_tokens
    if marks is None:
        raise UserError("this model has no fill-in-the-middle tokens, such as <|fim_prefix|>: it cannot take a suffix")
    begin = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    before = tokenizer.literal(prefix) if isinstance(prefix, str) else list(prefix)
    after = tokenizer.literal(suffix, is_inner=True)
    others = _files(tokenizer, marks, files) if files else []
    if max_tokens is not None:
        left = max(max_tokens - len(begin) - 3, 0)
        after = after[: max(left - len(before), left // 4)]
        before = _last(before, left - len(after))
        others = _last(others, left - len(after) - len(before))
    return [*begin, *others, marks.prefix, *before, marks.suffix, *after, marks.middle]


def _files(tokenizer: Tokenizer, marks: InfillTokens, files: Sequence[tuple[str, str]]) -> list[int]:
    """Return the tokens of other files and of the file's own name, in the repository format of Qwen2.5-Coder."""
    if marks.separator is None:
        return [token for _, text in files for token in tokenizer.literal(SNIPPET + text)]
    found = [] if marks.repository is None else [marks.repository, *tokenizer.literal(REPOSITORY, is_inner=True)]
    for part in (*(f"{name}\n{text}" for name, text in files), FILE):
        found += [marks.separator, *tokenizer.literal(part, is_inner=True)]
    return found


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[max(len(tokens) - count, 0) :]


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list or an array, numbers as Python's own; None for anything else."""
    given = to_python(value)
    if not isinstance(given, Sequence) or isinstance(given, (str, *_BYTES)):
        return None
    return [to_python(item) for item in given]


def _are_tokens(items: Sequence[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _are_messages(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in items)
