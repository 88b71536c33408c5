"""Builds the tokenizer described by GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`, `gemma4`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.errors import UserError, unknown
from outpace.models.files.tokenizer_folder import MARKS

if TYPE_CHECKING:
    import tokenizers

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # values of tokenizer.ggml.token_type
SPECIAL = (UNKNOWN, CONTROL)
SPACE = "\u2581"  # SentencePiece's character for a space
LONGEST_PIECE = 1000  # characters per token; the search for merges is quadratic

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
LLAMA3_SPLIT = (
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# words with their combining marks
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
CAPITAL, SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CAPITAL}]*[{SMALL}]+|[^\r\n\p{{L}}\p{{N}}]?[{CAPITAL}]+[{SMALL}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = rf"(?i:{CONTRACTIONS})?"
O200K_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CAPITAL}]*[{SMALL}]+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[{CAPITAL}]+[{SMALL}]*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
SPLITS = {  # by the name of the pre-tokenizer; those of two others are in `pre_tokenizer`
    "llama-bpe": (LLAMA3_SPLIT,),
    "smaug-bpe": (LLAMA3_SPLIT,),
    "qwen2": (QWEN2_SPLIT,),
    "qwen35": (QWEN35_SPLIT,),
    "tekken": (TEKKEN_SPLIT,),
    "gpt-4o": (O200K_SPLIT,),
    "default": DEFAULT_SPLITS,  # of a file that names none, as in llama.cpp
}
# llama.cpp's other names for the same pre-tokenizers.
SAME_PRE = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    "dbrx": "smaug-bpe",
    "llama4": "gpt-4o",
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not split by merges
COMPOSING = ("qwen2", "qwen35")  # the text is normalised to composed characters
EATING = ("phi3",)  # architectures whose special tokens, except PLAIN, absorb following white space
PLAIN = ("<unk>", "<s>", "<|endoftext|>")
LLAMA3_MARK = "<|start_header_id|>"  # a token of Llama 3's vocabulary
SPECIAL_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
TEMPLATE = "tokenizer.chat_template"  # the default one; others have their name appended, after a dot
# Fields of tokenizer.ggml that are refused if set, because they would change the tokens of prompts or answers.
REFUSED = ("add_sep_token", "normalizer.lowercase", "normalizer.strip_accents", "suppress_tokens")
INFILL_IDS = {  # fields of tokenizer.ggml by token, older names last
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "repository": ("fim_rep_token_id",),
    "separator": ("fim_sep_token_id",),
}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, its number of ids, and its fields of tokenizer_config.json and config.json."""

    tokenizer: tokenizers.Tokenizer
    size: int
    settings: dict[str, Any]
    special_ids: dict[str, Any]


def cut_vocabulary(metadata: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """Return the metadata without added tokens at the vocabulary's end for which the embedding has no rows.

    They belong to a vision or audio model; a text that holds them is tokenized as if they did not exist.
    """
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores")]
    lists = {key: metadata[key] for key in keys if isinstance(metadata.get(key), list)}
    beyond = lists.get(keys[1], [])[rows:]
    if not beyond or not {*beyond} <= {CONTROL, USER_DEFINED, UNUSED}:
        return metadata
    return {**metadata, **{key: values[:rows] for key, values in lists.items()}}


def special_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's fields for special tokens, without building the tokenizer."""
    return _Vocabulary(path, metadata).special_ids()


def build(path: Path, metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer in the metadata of `path`; UserError names the field that is missing or not supported."""
    from tokenizers import AddedToken

    vocabulary = _Vocabulary(path, metadata)
    kind = vocabulary.field("model", str)
    builders: dict[str, Callable[[_Vocabulary], tokenizers.Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentence_piece,
        "gemma4": _sentence_piece,
    }
    if kind not in builders:
        raise UserError(f"{path}: {unknown('tokenizer.ggml.model', kind, builders)}")
    try:
        tokenizer = builders[kind](vocabulary)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, for example for a merge of unknown tokens
        raise UserError(f"{path}: the tokenizer cannot be built ({error!s:.200})") from error
    eats = kind == "llama" and metadata.get("general.architecture") in EATING
    whole, later = (*SPECIAL, USER_DEFINED), {*vocabulary.texts("added_tokens", [])}  # added after training
    added = [
        AddedToken(token, special=is_a in SPECIAL, normalized=False, rstrip=eats and token not in PLAIN)
        for token, is_a in zip(vocabulary.tokens, vocabulary.types(), strict=True)
        if token and (is_a in whole or token in later)
    ]
    tokenizer.add_tokens(added)
    adds = {"bos": vocabulary.field("add_bos_token", bool, kind != "gpt2" or vocabulary.pre in WHOLE_WORDS)}
    adds["eos"] = vocabulary.field("add_eos_token", bool, False)
    put = {name: vocabulary.token_at(SPECIAL_IDS[name]) if is_put else None for name, is_put in adds.items()}
    _add_around(tokenizer, put["bos"], put["eos"])
    settings = vocabulary.settings() | {f"add_{name}_token": token is not None for name, token in put.items()}
    return GgufTokenizer(tokenizer, len(vocabulary.tokens), settings, vocabulary.special_ids())


class _Vocabulary:
    """The fields tokenizer.ggml.* of a file, checked when they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, metadata
        self.tokens = self.texts("tokens")
        if not self.tokens:
            raise UserError(f"{self.path}: tokenizer.ggml.tokens is empty")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise UserError(f"{self.path}: tokenizer.ggml.tokens names {twice!r:.100} twice")
        for name in REFUSED:
            value = metadata.get(f"tokenizer.ggml.{name}")
            if value:
                raise UserError(f"{self.path}: tokenizer.ggml.{name} {value!r:.50} is not supported")
        pre = self.field("pre", str, "default")
        if pre == "default" and LLAMA3_MARK in self.ids:  # the first files of Llama 3 left it out
            pre = "llama-bpe"
        self.pre = SAME_PRE.get(pre, pre)

    def field(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is missing")
        if not isinstance(value, kind):
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is {value!r:.50}, it must be a {kind.__name__}")
        return value

    def texts(self, name: str, default: Any = None) -> list[str]:
        values = self.field(name, list, default)
        if not {*map(type, values)} <= {str}:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} must hold texts")
        return values

    def numbers(self, name: str, default: Any = None) -> list[Any]:
        """Return a field that has one number for each token."""
        values = self.field(name, list, default)
        if len(values) != len(self.tokens) or not {*map(type, values)} <= {int, float, bool}:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} must hold one number for each token")
        return values

    def types(self) -> list[int]:
        """Return the type of each token: control for known texts of special tokens, whatever the file says."""
        types = [*self.numbers("token_type", [1] * len(self.tokens))]
        for text in MARKS & self.ids.keys():
            types[self.ids[text]] = CONTROL
        return types

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self.texts("merges")]
        if not {*map(len, pairs)} <= {2}:
            wrong = next(pair for pair in pairs if len(pair) != 2)
            raise UserError(f"{self.path}: tokenizer.ggml.merges holds {' '.join(wrong)!r:.100}, it must be two tokens")
        return pairs  # type: ignore[return-value]

    def token_at(self, name: str) -> tuple[str, int] | None:
        """Return the token and id that an id field names; None if the field is missing or unset."""
        index = self.metadata.get(f"tokenizer.ggml.{name}")
        if index is None or index in (-1, 2**32 - 1):
            return None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.tokens):
            allowed = f"at least 0 and below {len(self.tokens)}"
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is {index!r:.50}, it must be {allowed}")
        return self.tokens[index], index

    def settings(self) -> dict[str, Any]:
        """Return the fields of tokenizer_config.json that the file decides alone."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        found = {f"{name}_token": self.token_at(field) for name, field in SPECIAL_IDS.items()}
        for name, fields in INFILL_IDS.items():
            found[f"{name}_token"] = next((one for one in map(self.token_at, fields) if one is not None), None)
        settings |= {name: one[0] for name, one in found.items() if one is not None}
        templates = {}
        for key, text in self.metadata.items():
            if key == TEMPLATE or key.startswith(TEMPLATE + "."):
                if not isinstance(text, str):
                    raise UserError(f"{self.path}: {key} is {text!r:.50}, it must be a string")
                templates[key.removeprefix(TEMPLATE)[1:] or "default"] = text
        if [*templates] == ["default"]:
            settings["chat_template"] = templates["default"]
        elif templates:
            settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        return settings

    def special_ids(self) -> dict[str, Any]:
        """Return the ids in config.json and generation_config.json; several end tokens make a list."""
        found = {f"{name}_token_id": self.token_at(SPECIAL_IDS[name]) for name in ("bos", "eos", "pad")}
        ids: dict[str, Any] = {name: one[1] for name, one in found.items() if one is not None}
        ends = [self.token_at(name) for name in END_IDS]
        end_ids = list(dict.fromkeys(one[1] for one in ends if one is not None))
        if end_ids:
            ids["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
        return ids


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name, known = vocabulary.pre, ("smollm", "gpt-2", *SPLITS)
    if name not in known:
        raise UserError(f"{vocabulary.path}: {unknown('tokenizer.ggml.pre', name, known)}")
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=name in WHOLE_WORDS))
    if name in COMPOSING:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(name, vocabulary.field("add_space_prefix", bool, False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(name: str, has_prefix: bool) -> Any:
    """Build the pre-tokenizer of byte-level BPE with this name; `has_prefix`: it puts a space before a text."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS.get(name, ())]
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=name not in SPLITS)
    return pre_tokenizers.Sequence([*steps, byte_level])


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    has_merges = "tokenizer.ggml.merges" in vocabulary.metadata
    merges = vocabulary.merges() if has_merges else _merges_by_score(vocabulary)
    unk = vocabulary.token_at(SPECIAL_IDS["unk"])
    # byte tokens are named <0x00> to <0xFF> there as here
    options = {"unk_token": unk[0] if unk else None, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    replace = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.field("add_space_prefix", bool, vocabulary.field("model", str) == "llama"):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """List all ways to join two tokens to a third, highest score first, as SentencePiece merges.

    Kept as integers until sorted: a vocabulary of 262,144 tokens has half a million.
    """
    ids, tokens = vocabulary.ids, vocabulary.tokens
    joined, lefts, rights = array("i"), array("i"), array("i")
    for token, index in ids.items():
        if len(token) > LONGEST_PIECE:
            allowed = f"at most {LONGEST_PIECE} are"
            raise UserError(f"{vocabulary.path}: a token of {len(token)} characters is not supported, {allowed}")
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                joined.append(index)
                lefts.append(left)
                rights.append(right)
    scores = np.array(vocabulary.numbers("scores"), np.float64)[np.asarray(joined)]
    order = np.lexsort([np.asarray(rights), np.asarray(lefts), np.asarray(joined), -scores])
    return [(tokens[lefts[place]], tokens[rights[place]]) for place in order.tolist()]


def _add_around(tokenizer: tokenizers.Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make `tokenizer` add these tokens before and after a text; None: no such token."""
    from tokenizers import processors

    if bos is None and eos is None:
        return
    single = [*([f"{bos[0]}:0"] if bos else ()), "$A:0", *([f"{eos[0]}:0"] if eos else ())]
    special = [token for token in (bos, eos) if token is not None]
    template = processors.TemplateProcessing(single=single, special_tokens=special)
    steps = [processors.ByteLevel(trim_offsets=False), template] if tokenizer.pre_tokenizer is not None else [template]
    tokenizer.post_processor = processors.Sequence(steps)
