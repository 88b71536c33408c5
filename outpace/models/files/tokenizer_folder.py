"""Reads the files of a model folder that complete tokenizer.json, as transformers does; knows usual tokens and marks.

Special and added tokens may be named only in tokenizer_config.json, or in files of older versions of transformers:
special_tokens_map.json and added_tokens.json. Chat templates have files of their own or are in tokenizer_config.json.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from outpace.core.errors import UserError
from outpace.models.files.reading import read_optional_json, read_text

if TYPE_CHECKING:
    import tokenizers

CONFIG, OLD_SPECIAL, OLD_ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"  # field of CONFIG: added tokens by id
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")  # files from which tokenizer.json can be made
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("extra_special_tokens", "additional_special_tokens")  # fields with several special tokens
NAMED = "model_specific_special_tokens"  # field with special tokens by name, which templates may use
BYTE_LEVEL, SENTENCE_PIECE = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"), ("LlamaTokenizer",)
CLASSES = {"qwen3": "Qwen2Tokenizer"}  # classes of tokenizers by model type, if a folder names none
ANY_CLASS = {"qwen2": "Qwen2Tokenizer", "mistral": "", "phi3": ""}  # whatever class a folder names
SPACE_FIELDS = ("add_prefix_space", "legacy", "tokenizer_class", "model_type")  # what `set_prefix_space` reads
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"

# Known texts of special tokens find them in models whose files do not say what they are for.
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
TAG = r"<[^\s<>{}'\"]{1,40}>|\[[^\s\[\]{}()'\".,:;]{1,40}\]|◁[^\s◁▷]{1,40}▷"  # a mark in brackets


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json, and those of special_tokens_map.json unless it lists added tokens."""
    own = read_optional_json(folder / CONFIG)
    return own if DECODER in own else {**own, **read_optional_json(folder / OLD_SPECIAL)}


class NamedToken(NamedTuple):
    """A token named by another file than tokenizer.json: the fields of its tokenizers.AddedToken, and its id if given.

    `overrides`: these fields replace those in tokenizer.json.
    """

    fields: dict[str, Any]
    token_id: int | None = None
    overrides: bool = False


def read_added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[NamedToken]:
    """List the tokens named by other files than tokenizer.json. UserError for entries that are no tokens."""
    extra = _listed(settings)
    names = [*named_tokens(settings).values(), *(extra if isinstance(extra, list) else ())]
    special = [_token(folder / CONFIG, name) | {"special": True} for name in names]
    overrides, file = DECODER in settings, folder / (CONFIG if DECODER in settings else OLD_ADDED)
    if overrides:
        by_id = settings[DECODER]
    else:
        texts = {token["content"] for token in special}
        found = read_optional_json(file).items()
        by_id = {
            index: {"content": text, "special": text in texts, "normalized": text not in texts} for text, index in found
        }
    if not isinstance(by_id, Mapping) or not all(str(index).isdecimal() for index in by_id):
        raise UserError(f"{file}: the ids of added tokens are {[*by_id]!r:.200}, they must be whole numbers")
    named = {*map(token_text, named_tokens(settings).values())}
    tokens = {int(index): _token(file, token) for index, token in by_id.items()}
    for token in tokens.values():
        if token["content"] in named:
            token["special"] = True
    return [*(NamedToken(tokens[index], index, overrides) for index in sorted(tokens)), *map(NamedToken, special)]


def add_tokens(folder: Path, tokenizer: tokenizers.Tokenizer, named: Sequence[NamedToken]) -> None:
    """Add the named tokens that `tokenizer` lacks. UserError if one of them gets another id than the folder says."""
    from tokenizers import AddedToken

    there = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    new: list[AddedToken] = []
    for fields, _, overrides in named:
        token = AddedToken(**fields)
        if token.content not in there or (overrides and repr(token) != there[token.content]):
            there[token.content] = repr(token)
            new.append(token)
    tokenizer.add_tokens(new)
    for fields, token_id, _ in named:
        text = fields["content"]
        if token_id is not None and tokenizer.token_to_id(text) != token_id:
            other = tokenizer.id_to_token(token_id)
            contradiction = f"that is the id of {other!r:.100}" if other else "there is no such id"
            raise UserError(
                f"{folder}: its files give {text!r:.100} the id {token_id}, in tokenizer.json {contradiction}"
            )


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from their own files (newer folders) or from tokenizer_config.json."""
    files = {
        "default": folder / TEMPLATE,
        **{file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))},
    }
    found = {name: read_text(file) for name, file in files.items() if os.path.lexists(file)}
    single = read_optional_json(folder / "chat_template.json").get("chat_template")  # of models with a processor
    return found or named_templates(single or settings.get("chat_template"))


def named_templates(value: Any) -> dict[str, str]:
    """Return the chat templates in a field `chat_template`: a text, or a list of objects with `name` and `template`."""
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
    named = value if isinstance(value, Mapping) else {"default": value}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def token_text(value: Any) -> str | None:
    """Return a special token's text, given as text or as an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def named_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that have names, in the order in which transformers gives them ids.

    As in transformers 5, NAMED counts only if no other field names a token of the model's own. Raises UserError if it
    is no object.
    """
    usual = {name: settings[name] for name in SPECIAL_NAMES if token_text(settings.get(name))}
    own = {name: value for name, value in settings.items() if name.endswith("_token") and token_text(value)}
    extra = _listed(settings)
    own |= extra if isinstance(extra, Mapping) else {}
    if not isinstance(given := settings.get(NAMED) or {}, Mapping):
        raise UserError(f"{CONFIG}: {NAMED} is {given!r:.200}, it must be an object of names and tokens")
    return usual | ({name: value for name, value in own.items() if name not in usual} or dict(given))


def _listed(settings: Mapping[str, Any]) -> Any:
    return next((settings[name] for name in LISTED if settings.get(name)), [])


def _token(file: Path, value: Any) -> dict[str, Any]:
    """Return the fields of a token that is given as text or as an object; UserError if it is neither."""
    text = token_text(value)
    given = value if isinstance(value, Mapping) else {}
    flags = {name: given[name] for name in FLAGS if name in given}
    if not text or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(f"{file}: {value!r:.200} is no token, it must be a string or an object with content and flags")
    return {"content": text, **flags}


def set_prefix_space(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Make a text begin with a space, or not, if tokenizer_config.json says so and its class reads the field.

    In transformers 5 these classes build their steps anew. SentencePiece's space follows special tokens too if
    `legacy` is true. UserError if the field is no boolean.
    """
    from tokenizers import decoders, pre_tokenizers

    is_added, name = settings.get("add_prefix_space"), _tokenizer_class(settings, config)
    if is_added is None:
        return
    if not isinstance(is_added, bool):
        raise UserError(f"{CONFIG}: add_prefix_space is {is_added!r:.50}, it must be true or false")
    whole = tokenizer.pre_tokenizer
    steps = list(cast(Any, whole)) if isinstance(whole, pre_tokenizers.Sequence) else [whole]
    by_bytes = [step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)]
    if name in BYTE_LEVEL:
        for step in by_bytes:
            step.add_prefix_space = is_added
    elif name in SENTENCE_PIECE and not by_bytes:
        scheme = "never" if not is_added else "always" if settings.get("legacy") else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        decoded = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*decoded, *([decoders.Strip(" ", 1, 0)] if is_added else [])])


def _tokenizer_class(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the class that transformers chooses, without the ending Fast; "" if it loads tokenizer.json as it is."""
    model_type = str(config.get("model_type"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if model_type in ANY_CLASS:
        return ANY_CLASS[model_type]
    return str(named or CLASSES.get(model_type, "")).removesuffix("Fast")


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


class Thought(Enum):
    """Whether an answer begins within a thought."""

    NONE = "none"  # no, and it will have none
    OPTIONAL = "optional"  # no, but the model may begin one
    BEGUN = "begun"  # the chat template has begun one
    CONTINUED = "continued"  # the last message, which the answer continues, has begun one

    @property
    def is_open(self) -> bool:
        return self in (Thought.BEGUN, Thought.CONTINUED)


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks that a model writes around a thought, and around the answer after it.

    A thought is between `start` and `end`. `begins` may begin a part of the answer, and `ends` may end one: they belong
    neither to the thought nor to the answer's text.
    """

    start: str
    end: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.start, self.end, *self.begins, *self.ends)

    @property
    def heads(self) -> tuple[str, ...]:
        """The first tags of the marks that go on after one: a text that ends there is cut within a mark."""
        found = [(mark, re.match(TAG, mark)) for mark in (self.start, *self.begins)]
        return tuple(tag[0] for mark, tag in found if tag and tag[0] != mark)


THINK = ThoughtMarks("<think>", "</think>")
# Marks whose texts do not show what begins and what ends, or whose answers have several parts.
KNOWN_MARKS = (
    ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        ("<|end|>",),
    ),
    ThoughtMarks("<|channel>thought", "<channel|>"),
    ThoughtMarks("Here is my thought process:", "Here is my response:"),
)
