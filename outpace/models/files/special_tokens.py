"""Known texts of special tokens, which find them in models whose files do not say what they are for."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

# Ends of turns, messages and documents, as in llama.cpp: each ends an answer, even if the model's files do not say so.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>"),
    *("<EOT>", "_<EOT>", "▁<EOT>", "[EOT]"),
)
# Also an end, but only if it is a special token: in some vocabularies it is the HTML tag.
TAG_END = "</s>"
# Also an end (Phi), except in vocabularies with answer ends, where an answer has several messages (gpt-oss).
MESSAGE_END, ANSWER_ENDS = "<|end|>", ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>")
# Beginnings of turns end an answer too: its text would hide them, and so join two turns.
TURN_BEGINS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "<|start_of_role|>")
# Tokens of fill-in-the-middle prompts, by role; each ends an answer too.
INFILL_MARKS = {
    "prefix": (
        *("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "[PAD]"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>", "<fim-repo>", "<REPO>"),
    "separator": ("<|file_sep|>", "<file_sep>", "<|file_separator|>"),
}
MARKS = frozenset(
    {*ENDS, MESSAGE_END, *ANSWER_ENDS, *TURN_BEGINS, *(text for texts in INFILL_MARKS.values() for text in texts)}
)


class InfillTokens(NamedTuple):
    """The tokens around the parts of a fill-in-the-middle prompt."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    separator: int | None = None


def ends_among(tokens: Mapping[str, int], special: Container[int]) -> set[int]:
    """Return the ids of the added `tokens` that end an answer; `special`: ids of special tokens."""
    ends = MARKS - {MESSAGE_END} if any(end in tokens for end in ANSWER_ENDS) else MARKS
    found = {tokens[end] for end in ends if end in tokens}
    return found | ({tokens[TAG_END]} if tokens.get(TAG_END) in special else set())
