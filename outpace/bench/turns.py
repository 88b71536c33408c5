"""Conversations: what stands before a later turn is what the target itself wrote, by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outpace.bench.tasks import Asked
from outpace.core.errors import UserError

Said = Callable[[Asked, int], Sequence[int]]
"""The tokens that plain decoding wrote in a turn (0: the first) of a prompt's conversation."""


def check_turns(asked: Sequence[Asked], tokenizer: Any) -> None:
    """UserError where a conversation is to be measured and the model has no form for one."""
    if any(one.before for one in asked) and not tokenizer.has_template:
        raise UserError("--turns needs a model with a chat template, this one has none")


def prompt_of(asked: Asked, tokenizer: Any, said: Said) -> tuple[int, ...]:
    """The tokens of a prompt, those of the turns before it included."""
    if not asked.before:
        return tuple(tokenizer.encode_prompt(asked.text))
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(asked.before):
        messages.append({"role": "user", "content": text})
        written = [token for token in said(asked, turn) if token not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(written)})
    return tuple(tokenizer.chat([*messages, {"role": "user", "content": asked.text}]))


def bare_length(asked: Asked, tokenizer: Any) -> int:
    """Tokens of a prompt whose answers before it are empty."""
    return len(prompt_of(asked, tokenizer, lambda *_: ()))


class Conversations:
    """The prompts of conversations where nothing is measured: an answer is written when its turn is first asked for,
    and then known."""

    def __init__(self, tokenizer: Any, answer: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """`answer`: what plain decoding writes behind a prompt."""
        self._tokenizer, self._answer = tokenizer, answer
        self._known: dict[tuple[str, str, int], Sequence[int]] = {}

    def prompt(self, asked: Asked) -> tuple[int, ...]:
        """The tokens of a prompt, behind those of the turns before it."""
        return prompt_of(asked, self._tokenizer, self._said)

    def _said(self, asked: Asked, turn: int) -> Sequence[int]:
        key = asked.task_of(0), asked.name, turn
        if key not in self._known:
            self._known[key] = self._answer(self.prompt(asked.at(turn)))
        return self._known[key]
