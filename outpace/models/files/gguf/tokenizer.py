"""Builds the tokenizer described by GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.errors import UserError, unknown

if TYPE_CHECKING:
    import tokenizers

    from outpace.models.files.gguf.config import GgufModel
    from outpace.models.files.gguf.header import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # SentencePiece's character for a space
LONGEST_PIECE = 1000  # characters per token; the search for merges is quadratic

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
LLAMA3_SPLIT = (
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
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
# A file without a pre-tokenizer's name is split as in llama.cpp.
DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# llama.cpp's other names for the same pre-tokenizers.
SAME_PRE = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    "dbrx": "smaug-bpe",
    "llama4": "gpt-4o",
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not split by merges
EATING = ("phi3",)  # architectures whose special tokens, except PLAIN, absorb following white space
PLAIN = ("<unk>", "<s>", "<|endoftext|>")
SPECIAL_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
END_OF_TURN_IDS = ("eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, its number of ids, and its fields of tokenizer_config.json and config.json."""

    tokenizer: tokenizers.Tokenizer
    size: int
    settings: dict[str, Any]
    special_ids: dict[str, Any]


def build_for(header: GgufHeader, model: GgufModel) -> GgufTokenizer:
    """Build the model's tokenizer; UserError if it names more tokens than the embedding has rows."""
    built, rows = build(header.path, header.metadata), model.config.vocab_size
    if built.size > rows:
        raise UserError(f"{header.path} names {built.size} tokens, its embedding has {rows} rows")
    return built


def special_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's fields for special tokens, without building the tokenizer."""
    return _special_ids(_Vocabulary(path, metadata))


def build(path: Path, metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer in the metadata of `path`; UserError names the field that is missing or not supported."""
    from tokenizers import AddedToken

    vocabulary = _Vocabulary(path, metadata)
    kind = vocabulary.field("model", str)
    builders: dict[str, Callable[[_Vocabulary], tokenizers.Tokenizer]] = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise UserError(f"{path}: {unknown('tokenizer.ggml.model', kind, builders)}")
    try:
        tokenizer = builders[kind](vocabulary)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, for example for a merge of unknown tokens
        raise UserError(f"{path}: the tokenizer cannot be built ({error!s:.200})") from error
    typed = vocabulary.typed((UNKNOWN, CONTROL, USER_DEFINED))
    special = {token for token, is_a in typed if is_a != USER_DEFINED}
    added = [token for token, _ in typed if token]
    eats = kind == "llama" and metadata.get("general.architecture") in EATING
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token in special, normalized=False, rstrip=eats and token not in PLAIN)
            for token in added
        ]
    )
    bos = vocabulary.special("bos")
    add_bos = vocabulary.flag("add_bos_token", kind == "llama" or vocabulary.pre in WHOLE_WORDS) and bos is not None
    if add_bos and bos is not None:
        _put_bos_first(tokenizer, *bos)
    return GgufTokenizer(tokenizer, len(vocabulary.tokens), _settings(vocabulary, add_bos), _special_ids(vocabulary))


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
        pre = self.field("pre", str, "default")
        self.pre = SAME_PRE.get(pre, pre)

    def field(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is missing")
        if not isinstance(value, kind):
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is {value!r:.50}, it must be a {kind.__name__}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self.field(name, bool, default)

    def texts(self, name: str) -> list[str]:
        values = self.field(name, list)
        if not {*map(type, values)} <= {str}:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} must hold texts")
        return values

    def numbers(self, name: str, default: Any = None) -> list[Any]:
        """One number a token."""
        values = self.field(name, list, default)
        if len(values) != len(self.tokens) or not {*map(type, values)} <= {int, float, bool}:
            raise UserError(f"{self.path}: tokenizer.ggml.{name} must hold one number for each token")
        return values

    def typed(self, kinds: tuple[int, ...]) -> list[tuple[str, int]]:
        types = self.numbers("token_type", [1] * len(self.tokens))
        return [(token, kind) for token, kind in zip(self.tokens, types, strict=True) if kind in kinds]

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self.texts("merges")]
        if not {*map(len, pairs)} <= {2}:
            wrong = next(pair for pair in pairs if len(pair) != 2)
            raise UserError(f"{self.path}: tokenizer.ggml.merges holds {' '.join(wrong)!r:.100}, it must be two tokens")
        return pairs  # type: ignore[return-value]

    def special(self, name: str) -> tuple[str, int] | None:
        return self.token_at(SPECIAL_IDS[name])

    def token_at(self, name: str) -> tuple[str, int] | None:
        """Return the token and id that an id field names; None if the field is missing or unset."""
        index = self.metadata.get(f"tokenizer.ggml.{name}")
        if index is None or index in (-1, 2**32 - 1):
            return None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.tokens):
            allowed = f"at least 0 and below {len(self.tokens)}"
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is {index!r:.50}, it must be {allowed}")
        return self.tokens[index], index


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    splits = {
        "smollm": _digits_first,
        "gpt-2": lambda space: _split((), True, space),
        "llama-bpe": lambda space: _split((LLAMA3_SPLIT,), False, space),
        "smaug-bpe": lambda space: _split((LLAMA3_SPLIT,), False, space),
        "qwen2": lambda space: _split((QWEN2_SPLIT,), False, space),
        "tekken": lambda space: _split((TEKKEN_SPLIT,), False, space),
        "gpt-4o": lambda space: _split((O200K_SPLIT,), False, space),
        "default": lambda space: _split(DEFAULT_SPLITS, False, space),
    }
    if vocabulary.pre not in splits:
        raise UserError(f"{vocabulary.path}: {unknown('tokenizer.ggml.pre', vocabulary.pre, splits)}")
    whole_words = vocabulary.pre in WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=whole_words))
    if vocabulary.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splits[vocabulary.pre](vocabulary.flag("add_space_prefix", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _digits_first(space: bool) -> Any:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)])


def _split(patterns: tuple[str, ...], use_regex: bool, space: bool) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=use_regex)])


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    known = "tokenizer.ggml.merges" in vocabulary.metadata
    merges = vocabulary.merges() if known else _merges_by_score(vocabulary)
    unk = vocabulary.special("unk")
    model = models.BPE(
        vocabulary.ids, merges, unk_token=unk[0] if unk else None, fuse_unk=True, byte_fallback=True
    )  # byte tokens are named <0x00> to <0xFF> there as here
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
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


def _put_bos_first(tokenizer: tokenizers.Tokenizer, token: str, index: int) -> None:
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, index)]
    )
    steps = [processors.ByteLevel(trim_offsets=False), template] if tokenizer.pre_tokenizer is not None else [template]
    tokenizer.post_processor = processors.Sequence(steps)


def _settings(vocabulary: _Vocabulary, add_bos: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
    }
    for name in SPECIAL_IDS:
        found = vocabulary.special(name)
        if found is not None:
            settings[f"{name}_token"] = found[0]
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def _special_ids(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the ids in config.json and generation_config.json; several end tokens make a list."""
    named = {name: vocabulary.special(name) for name in ("bos", "eos", "pad")}
    ids: dict[str, Any] = {f"{name}_token_id": found[1] for name, found in named.items() if found is not None}
    ends = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    for name in END_OF_TURN_IDS:
        found = vocabulary.token_at(name)
        if found is not None and found[1] not in ends:
            ends.append(found[1])
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids
