"""Special tokens: which of them end an answer though no file says so, and for which a model has no row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outpace.core.errors import UserError

if TYPE_CHECKING:
    import tokenizers

# Ends of a turn in the families that run here: they end an answer, whether or not the model's files say so.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
# An end of a turn too (Phi), but not where an answer has several messages (gpt-oss), which these tokens tell.
MESSAGE_END, ANSWER_ENDS = "<|end|>", ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>")
# Ends of a document. They count only where the files name no end at all: in SmolLM2, for one, <|endoftext|> is padding
# too, its generation_config.json leaves it out, and stopping there would write another text than transformers does.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")


def turn_ends(special: Mapping[str, int]) -> set[int]:
    """Of a vocabulary's special tokens, by their texts, those that end a turn."""
    ends = TURN_ENDS if any(end in special for end in ANSWER_ENDS) else (*TURN_ENDS, MESSAGE_END)
    return {special[end] for end in ends if end in special}


def text_ends(special: Mapping[str, int]) -> set[int]:
    """Those that end a document."""
    return {special[end] for end in TEXT_ENDS if end in special}


def without_rows(tokenizer: tokenizers.Tokenizer, size: int, rows: int) -> dict[int, str]:
    """The tokens of a vocabulary of `size` ids for which an embedding of so many rows has none. UserError unless all of
    them were added to it, as Gemma 3's token for images, which its models without a vision model know not."""
    added = tokenizer.get_added_tokens_decoder()
    beyond = {index: token.content for index, token in added.items() if index >= rows}
    if len(beyond) < size - rows:
        raise UserError(f"it names ids up to {size - 1}, the model's embedding has {rows} rows")
    return beyond


def check_rows(ids: Sequence[int], beyond: Mapping[int, str]) -> None:
    """UserError for a text that holds one of the tokens `beyond` the embedding."""
    if beyond and not beyond.keys().isdisjoint(ids):
        token = next(beyond[index] for index in ids if index in beyond)
        raise UserError(f"the text holds {token!r}, a token for which the model's embedding has no row")
