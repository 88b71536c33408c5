"""SentencePiece tokenizer.model files, where a folder has no tokenizer.json: read as the same tokenizer, or refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from files import folder_of
from test_tokenizer import BYTES, TEXTS, WORDS, check_streams, sentence_piece

from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer


@pytest.fixture
def pieces(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder_of(sentence_piece(tmp_path / "sp.gguf"), tmp_path / "sp"))


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    value %= 2**64
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def message(*fields: tuple[int, int | float | bytes | str]) -> bytes:
    """A protocol buffer's message of (number, value) fields."""
    data = b""
    for number, value in fields:
        if isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            body = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(body)) + body
    return data


SPECIAL_PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((word, 6) for word in BYTES)]
TRAINER: list[tuple[int, int | float | bytes | str]] = [(3, 2), (35, 1), (40, 0), (41, 1), (42, 2), (43, -1)]
NORMALIZER: list[tuple[int, int | float | bytes | str]] = [(1, "identity"), (3, 1), (4, 0), (5, 1)]


def sentence_piece_model(**changes: Any) -> bytes:
    """A tokenizer.model with the vocabulary of `sentence_piece`."""
    scored = [(word, 1, float(len(word))) for word in WORDS]
    pieces = [*((word, kind, 0.0) for word, kind in SPECIAL_PIECES), *scored]
    parts = [(1, message((1, word), (2, score), (3, kind))) for word, kind, score in pieces]
    trainer = {**dict(TRAINER), **changes.get("trainer", {})}
    normalizer = {**dict(NORMALIZER), **changes.get("normalizer", {})}
    return message(*parts, (2, message(*trainer.items())), (3, message(*normalizer.items())))


@pytest.fixture
def model_only(tmp_path: Path) -> Path:
    folder = tmp_path / "model only"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentence_piece_model())
    return folder


def test_tokenizer_model(model_only: Path, pieces: Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(model_only)
    assert tokenizer.size == pieces.size
    assert tokenizer.tokens_differ(pieces) is None
    for text in (*TEXTS, "abc", "ab a  bc", " a", "a</s>b"):
        assert tokenizer.encode(text) == pieces.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == pieces.decode(pieces.encode(text))
    check_streams(tokenizer, [list(range(tokenizer.size))], 300)
    assert tokenizer.stop_ids == {2}
    (model_only / "tokenizer.model").write_bytes(sentence_piece_model(normalizer={3: 0}))
    assert Tokenizer.from_folder(model_only).encode("abc") == [1, 259 + WORDS.index("ab"), 259 + WORDS.index("c")]


def test_tokens_added_to_a_tokenizer_model(model_only: Path) -> None:
    size = Tokenizer.from_folder(model_only).size
    added = {str(size + 1): {"content": "<|im_end|>", "special": True}, "2": {"content": "</s>", "special": True}}
    (model_only / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "add_bos_token": False})
    )
    (model_only / "added_tokens.json").write_text(json.dumps({"<tool>": size, "</s>": 2}))
    tokenizer = Tokenizer.from_folder(model_only)
    assert tokenizer.encode("<tool><|im_end|>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"
    assert size + 1 in tokenizer.stop_ids
    (model_only / "added_tokens.json").unlink()
    with pytest.raises(UserError, match="do not follow"):
        Tokenizer.from_folder(model_only)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sentence_piece_model(trainer={3: 1}), "not a BPE model"),
        (sentence_piece_model(normalizer={2: b"map"}), "rewrites the text"),
        (sentence_piece_model(normalizer={4: 1}), "rewrites the text"),
        (sentence_piece_model()[:-3], "not a whole SentencePiece"),
        (b"IQ== 0\nIg== 1\n", "SentencePiece"),  # the format of Llama 3's file of this name
        (b"\x80" * 30, "not a whole"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "not a whole"),
        (b"", "not a SentencePiece"),
    ],
)
def test_damaged_tokenizer_models(model_only: Path, data: bytes, words: str) -> None:
    (model_only / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        Tokenizer.from_folder(model_only)
    assert "save_pretrained" in str(caught.value)
    assert "sentencepiece, protobuf and tiktoken" in str(caught.value)  # without them that line raises


def written(folder: Path, data: bytes) -> Path:
    (folder / "tokenizer.model").write_bytes(data)
    return folder


def test_a_tokenizer_model_is_refused_wherever_it_is_cut(model_only: Path) -> None:
    whole = sentence_piece_model()
    for size in [*range(0, len(whole), 11), *range(len(whole) - 20, len(whole))]:
        with pytest.raises(UserError, match=r"not a whole|not a SentencePiece|not a BPE|rewrites the text"):
            Tokenizer.from_folder(written(model_only, whole[:size]))
    assert Tokenizer.from_folder(written(model_only, whole)).size == len(SPECIAL_PIECES) + len(WORDS)


@pytest.mark.parametrize("word", ["<0x41>", "▁ab", "bc"])
def test_a_changed_text_is_another_token_and_nothing_else(model_only: Path, word: str) -> None:
    """Nobody can tell such a damage from a vocabulary that was trained so: to refuse all files is no answer."""
    whole = sentence_piece_model()
    pieces = [text for text, _ in SPECIAL_PIECES] + WORDS
    place = whole.index(message((1, word), (2, float(len(word)) if word in WORDS else 0.0))) + 2
    other = word[:-1] + "~"
    damaged = whole[:place] + other.encode() + whole[place + len(other.encode()) :]
    tokenizer = Tokenizer.from_folder(written(model_only, damaged))
    assert tokenizer.size == len(pieces)
    assert tokenizer.decode([pieces.index(word)], skip_special=False).strip() == other.replace("▁", "")


@pytest.mark.parametrize("trials", [300, pytest.param(5000, marks=pytest.mark.long)])
def test_torn_tokenizer_models_never_crash(model_only: Path, trials: int) -> None:
    whole, chance = sentence_piece_model(), random.Random(0)
    taken = 0
    for _ in range(trials):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 127, 128, 255])
        try:
            tokenizer = Tokenizer.from_folder(written(model_only, bytes(data)))
        except UserError:
            continue
        taken += 1
        assert 0 <= len(SPECIAL_PIECES) + len(WORDS) - tokenizer.size <= 4  # a piece may become a field unknown
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))
    assert 0.1 < taken / trials < 0.5  # of texts and scores; more, and the damage is no test


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json and no tokenizer\.model.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
