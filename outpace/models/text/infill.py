"""Fill-in-the-middle prompts: a model writes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.errors import UserError
from outpace.models.files.special_tokens import InfillTokens
from outpace.models.text.tokenizer import Tokenizer

REPOSITORY, FILE = "myproject\n", "filename\n"  # names in prompts with several files, as in llama.cpp
SNIPPET = "\n\n--- snippet ---\n\n"  # before a file's text, for models without a token that separates files


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    room: int | None = None,
) -> list[int]:
    """Return the prompt for the text between `prefix` and `suffix`. `files` are names and texts of other files.

    A prompt of more than `room` tokens is cut: at the first files, the beginning of the prefix, and the end of the
    suffix, which keeps at least a quarter of the room. Raises UserError if the model has no tokens for such prompts.
    """
    marks = tokenizer.infill_tokens
    if marks is None:
        raise UserError("this model has no fill-in-the-middle tokens, such as <|fim_prefix|>: it cannot take a suffix")
    begin = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    before = tokenizer.literal(prefix) if isinstance(prefix, str) else list(prefix)
    after = tokenizer.literal(suffix, is_inner=True)
    others = _files(tokenizer, marks, files) if files else []
    if room is not None:
        left = max(room - len(begin) - 3, 0)
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
