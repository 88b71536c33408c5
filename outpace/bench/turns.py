"""Conversations: what stands before a later turn is what the target itself wrote, by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outpace.bench.tasks import Asked
from outpace.core.errors import UserError

Answer = Callable[[int, Sequence[int]], Sequence[int]]
"""The tokens that plain decoding writes in a turn (0: the first) behind a prompt."""


def check_turns(asked: Sequence[Asked], tokenizer: Any) -> None:
    """UserError where a conversation is to be measured and the model has no form for one."""
    if any(one.before for one in asked) and not tokenizer.has_template:
        raise UserError("--turns needs a model with a chat template, this one has none")


def prompt_of(asked: Asked, tokenizer: Any, answer: Answer) -> tuple[int, ...]:
    """The tokens of a prompt, those of the turns before it included."""
    if not asked.before:
        return tuple(tokenizer.encode_prompt(asked.text))
    said: list[dict[str, str]] = []
    for turn, text in enumerate(asked.before):
        said.append({"role": "user", "content": text})
        tokens = answer(turn, tokenizer.chat(said))
        written = tokenizer.decode([token for token in tokens if token not in tokenizer.stop_ids])
        said.append({"role": "assistant", "content": written})
    return tuple(tokenizer.chat([*said, {"role": "user", "content": asked.text}]))
