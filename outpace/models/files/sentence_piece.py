"""Reads a SentencePiece `tokenizer.model` (Llama 2, early Mistral) as the corresponding GGUF fields.

The file is a protocol buffer, of which a few fields matter:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError
from outpace.models.files.reading import MAX_TOKENIZER_BYTES, read_bytes, read_optional_json

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
PIECE, PARTS = 1, (2, 3)  # fields of the model: pieces; trainer and normalizer
TEXT, SCORE, TYPE = 1, 2, 3  # of a piece; its types are those of tokenizer.ggml.token_type
MODEL_TYPE, SPACE_LAST = 3, 24  # of the trainer
SPECIAL = {"unknown_token_id": (40, 0), "bos_token_id": (41, 1), "eos_token_id": (42, 2), "padding_token_id": (43, -1)}
CHARACTER_MAP, SPACE_FIRST, FEWER_SPACES, ESCAPE_SPACES = 2, 3, 4, 5  # of the normalizer
BPE = 2  # a model type; 1 is unigram
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
ADVICE = (
    "save it as tokenizer.json: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers,"
    " with the packages sentencepiece, protobuf and tiktoken installed"
)


def read_fields(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields tokenizer.ggml.* for the folder's tokenizer.model, including tokens added by its other files.

    Raises UserError: damaged, not SentencePiece (Llama 3 uses another format under this name), not BPE, or with a text
    normalisation that is not supported.
    """
    file = folder / "tokenizer.model"
    data = read_bytes(file, MAX_TOKENIZER_BYTES)
    try:
        fields = [(number, value) for number, kind, value in _fields(data) if kind == BYTES]
        pieces = [_piece(value) for number, value in fields if number == PIECE]
        trainer, normalizer = (_values([value for number, value in fields if number == part]) for part in PARTS)
    except (ValueError, IndexError, struct.error) as error:
        raise UserError(f"{file} is not a whole SentencePiece model; {ADVICE}") from error
    if not pieces:
        raise UserError(f"{file} is not a SentencePiece model; {ADVICE}")
    _refuse_unsupported(file, trainer, normalizer)
    added = _added(folder, settings, len(pieces))
    tokens, scores, types = ([*column] for column in zip(*pieces, *added, strict=True))
    ids = {name: _signed(trainer.get(number, default)) for name, (number, default) in SPECIAL.items()}
    space_first = bool(normalizer.get(SPACE_FIRST, 1))
    named = {"tokens": tokens, "scores": scores, "token_type": types, "add_space_prefix": space_first}
    return {f"tokenizer.ggml.{name}": value for name, value in ({"model": "llama"} | named | ids).items()}


def _refuse_unsupported(file: Path, trainer: Mapping[int, Any], normalizer: Mapping[int, Any]) -> None:
    if trainer.get(MODEL_TYPE, 1) != BPE:
        raise UserError(f"{file} is not a BPE model, others are not read; {ADVICE}")
    changes = normalizer.get(CHARACTER_MAP) or normalizer.get(FEWER_SPACES, 1) or not normalizer.get(ESCAPE_SPACES, 1)
    if changes or trainer.get(SPACE_LAST, 0):
        raise UserError(f"{file} rewrites the text before it is cut, which is not supported; {ADVICE}")


def _piece(data: bytes) -> tuple[str, float, int]:
    """Return text, score and type of one token."""
    text, score, kind = "", 0.0, NORMAL
    for number, wire, value in _fields(data):
        if (number, wire) == (TEXT, BYTES):
            text = value.decode("utf-8")
        elif (number, wire) == (SCORE, FIXED32):
            score = struct.unpack("<f", value)[0]
        elif (number, wire) == (TYPE, VARINT):
            kind = value
    return text, score, kind


def _values(messages: list[bytes]) -> dict[int, Any]:
    """Return the fields of a message, possibly split over several, by number."""
    return {number: value for message in messages for number, _, value in _fields(message)}


def _added(folder: Path, settings: Mapping[str, Any], size: int) -> list[tuple[str, float, int]]:
    """Return the tokens after the model's own, from added_tokens.json and tokenizer_config.json."""
    found: dict[int, tuple[str, int]] = {}
    file = folder / "added_tokens.json"
    for text, index in read_optional_json(file).items():
        if isinstance(index, int) and index >= size:
            found[index] = (text, USER_DEFINED)
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if key.isdecimal() and len(key) < 10 and int(key) >= size and isinstance(content, str):
            found[int(key)] = (content, CONTROL if entry.get("special") else USER_DEFINED)
    if sorted(found) != list(range(size, size + len(found))):
        raise UserError(f"{folder}: the added tokens' ids do not follow the {size} of tokenizer.model")
    return [(found[index][0], 0.0, found[index][1]) for index in sorted(found)]


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a message; ValueError or IndexError if it is malformed."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, wire, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if size > len(data) - at:
            raise ValueError("a field reaches beyond the file")
        yield tag >> 3, wire, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")


def _signed(value: Any) -> int:
    """Decode a negative number, which is stored as 64 bits."""
    return value - 2**64 if value >= 2**63 else value
