"""Tokenizers: round trips, streaming, chat templates, and whether two vocabularies name the same tokens."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from files import MERGES, SPECIAL, folder_of, set_fields, smollm2_file, tokens, write_gguf
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from outpace.core.errors import UserError
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.header import open_gguf
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! It's a test.",
    "def f(x):\n    return x**2  # ok\n\n\n\tif y:",
    "12345 and 3.14159",
    "日本語のテスト、こんにちは",
    "emoji 😀👩‍👩‍👧 done",
    "  leading  and trailing  ",
    "½ ² ٣٤ naïve Ünïcödé",
    "",
]
USER = [{"role": "user", "content": "Hi"}]
WORDS = ["▁", "a", "b", "c", "▁a", "▁ab", "ab", "bc", "▁abc", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(path: Path, **changes: Any) -> Path:
    """A tiny GGUF with a SentencePiece vocabulary of a few words and all bytes."""
    words = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    fields: dict[str, Any] = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": words,
        "scores": [float(len(word)) if word in WORDS else 0.0 for word in words],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
        "unknown_token_id": 0,
        "add_bos_token": None,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items()}
    return write_gguf(path, metadata)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(folder_of(smollm2_file(), tmp_path_factory.mktemp("smollm2") / "folder"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return folder_of(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")


@pytest.fixture
def pieces(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder_of(sentence_piece(tmp_path / "sp.gguf"), tmp_path / "sp"))


def streamed(tokenizer: Tokenizer, ids: list[int], step: int, skip_special: bool) -> str:
    stream = tokenizer.stream(skip_special)
    return "".join(stream.push(ids[at : at + step]) for at in range(0, len(ids), step)) + stream.finish()


def check_streams(tokenizer: Tokenizer, pools: list[list[int]], trials: int) -> None:
    """Random ids, many of them halves of characters: the pieces must add up to what decode shows."""
    chance = random.Random(0)
    for _ in range(trials):
        pool, step = chance.choice(pools), chance.randint(1, 4)
        ids = [chance.choice(pool) for _ in range(chance.randint(0, 25))]
        for skip_special in (True, False):
            assert streamed(tokenizer, ids, step, skip_special) == tokenizer.decode(ids, skip_special), ids


@pytest.mark.smollm2
def test_smollm2_facts(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text
        assert streamed(smollm2, ids, 1, True) == text
    assert smollm2.size == 49152
    ends = {smollm2.words[index] for index in smollm2.stop_ids}  # the file names <|im_end|> alone
    assert ends == {"<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>", "<reponame>", "<file_sep>"}
    assert [smollm2.decode([index]) for index in smollm2.encode("12345")] == list("12345")
    assert smollm2.encode("<|im_start|>user")[0] == 1
    assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"
    assert smollm2.decode([1], skip_special=False) == "<|im_start|>"


@pytest.mark.smollm2
def test_smollm2_chat(smollm2: Tokenizer) -> None:
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.render(USER) == text
    ids = smollm2.chat(USER)
    assert smollm2.decode(ids, skip_special=False) == text
    assert ids[0] == 1
    assert ids[1] != 1


@pytest.mark.smollm2
def test_smollm2_streams(smollm2: Tokenizer) -> None:
    single = [index for index in range(smollm2.size) if len(smollm2.decode([index], skip_special=False)) == 1]
    check_streams(smollm2, [list(range(smollm2.size)), single, [*single, *range(20)]], 2000)
    stream, text = smollm2.stream(), "😀日本👩‍👩‍👧é"
    shown = ""
    for index in smollm2.encode(text):
        shown += stream.push([index])
        assert text.startswith(shown)
    assert shown + stream.finish() == text


def test_tiny_streams(tiny: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    check_streams(tokenizer, [list(range(tokenizer.size + 5)), list(range(130, 259)), list(range(200, 259))], 3000)
    ids = tokenizer.encode("a😀")
    stream = tokenizer.stream()
    assert stream.push(ids[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_pieces(pieces: Tokenizer) -> None:
    assert pieces.encode("abc")[:1] == [1]  # SentencePiece models want the begin-of-text token
    for text in ("abc", "ab a  bc", "日本 abc", " a", "é😀", "", "line\nbreak"):
        assert pieces.decode(pieces.encode(text)) == text
        assert streamed(pieces, pieces.encode(text), 1, True) == text
    assert pieces.encode("abc") == [1, 259 + WORDS.index("▁abc")]
    assert 2 in pieces.stop_ids
    japanese = [3 + byte for byte in "日本".encode()]
    check_streams(pieces, [list(range(pieces.size)), [*japanese, 259, 260], [*japanese, 0, 1, 3 + 255]], 3000)


def test_pieces_without_a_first_space(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path / "sp.gguf", add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_folder(folder_of(path, tmp_path / "sp"))
    assert tokenizer.encode("abc") == [259 + WORDS.index("ab"), 259 + WORDS.index("c")]
    check_streams(tokenizer, [list(range(tokenizer.size)), [259, 260, 261]], 500)


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        *(("smollm", "1|2|3|4|5"), ("gpt-2", "12|3|4|5"), ("tekken", "1|2|3|4|5")),
        *(("llama-bpe", "12|3|4|5"), ("llama3", "12|3|4|5"), ("smaug-bpe", "12|3|4|5")),
        *(("qwen2", "1|2|3|4|5"), ("deepseek-r1-qwen", "1|2|3|4|5")),
        *(("dbrx", "12|3|4|5"), ("gpt-4o", "12|3|4|5"), ("llama4", "12|3|4|5")),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, digits: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.pre": pre})
    tokenizer = Tokenizer.from_folder(folder_of(path, tmp_path / "tiny"))
    assert [tokenizer.decode([index]) for index in tokenizer.encode("12345")] == digits.split("|")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [("gpt-4o", "Hello|WORLDfoo| it's| x|/\n"), ("dbrx", "HelloWORLDfoo| it|'s| x|/\n"), ("tekken", None)],
)
def test_words_of_pre_tokenizers(tmp_path: Path, pre: str, words: str | None) -> None:
    header = open_gguf(write_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.pre": pre}))
    splits = gguf_tokenizer.build(header.path, header.metadata).tokenizer.pre_tokenizer
    found = [word for word, _ in splits.pre_tokenize_str("HelloWORLDfoo it's x/\n")]
    plain = "|".join(found).replace("Ġ", " ").replace("Ċ", "\n")
    assert plain == (words or "Hello|WORLDfoo| it|'s| x|/\n")


@pytest.mark.parametrize(("architecture", "eats"), [("phi3", True), ("llama", False)])
def test_white_space_after_special_tokens(tmp_path: Path, architecture: str, eats: bool) -> None:
    """As in Phi-3's own tokenizer; not after <s>, which begins a text."""
    header = open_gguf(sentence_piece(tmp_path / "sp.gguf", add_bos_token=False))
    metadata = header.metadata | {"general.architecture": architecture}
    built = gguf_tokenizer.build(Path("sp.gguf"), metadata).tokenizer
    abc = 259 + WORDS.index("▁abc")
    assert (built.encode("</s>\nabc").ids == [2, abc]) == eats
    assert built.encode("</s>abc").ids == [2, abc]
    assert built.encode("<s>\nabc").ids != [1, abc]


def test_default_pre_tokenizer_splits_digits_by_three(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", {"tokenizer.ggml.pre": None, "tokenizer.ggml.merges": [*MERGES[:-1], "3 4"]}
    )
    with pytest.raises(UserError, match="cannot be built"):
        gguf_tokenizer.build(path, open_gguf(path).metadata)  # "34" is no token
    words = [word if word != "12" else "34" for word in tokens()]
    path = write_gguf(
        tmp_path / "tiny.gguf",
        {"tokenizer.ggml.pre": None, "tokenizer.ggml.merges": [*MERGES[:-1], "3 4"], "tokenizer.ggml.tokens": words},
    )
    tokenizer = Tokenizer.from_folder(folder_of(path, tmp_path / "tiny"))
    assert [tokenizer.decode([index]) for index in tokenizer.encode("123412345")] == [*"123412", "34", "5"]


def test_bos(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.from_folder(folder_of(path, tmp_path / "tiny"))
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("<|im_start|>a") == tokenizer.encode("a")
    assert tokenizer.chat(USER).count(1) == 1
    raw = RawTokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert raw.encode("a").ids == tokenizer.encode("a")


def test_stop_ids(tiny: Path) -> None:
    """Answers end at the ids that the files name, at known ends, and at the begin-of-text token."""
    known, h = {0, 1, 2}, tokens().index("h")
    assert set_fields(tiny, eos_token={"content": "h"}).stop_ids == {*known, h}
    (tiny / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert Tokenizer.from_folder(tiny).stop_ids == {*known, h}  # generation_config.json comes first
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, -1, 10**30]}))
    assert Tokenizer.from_folder(tiny).stop_ids == {*known, 9, h}
    (tiny / "generation_config.json").unlink()
    assert {7, 8} <= Tokenizer.from_folder(tiny).stop_ids
    (tiny / "config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(UserError, match="eos_token_id"):
        Tokenizer.from_folder(tiny)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({"eos_token_id": 20}, []),
        ({"eos_token_id": 20, "eot_token_id": 21, "eom_token_id": 22}, []),
        ({"fim_pad_token_id": 23, "fim_rep_token_id": 24, "fim_sep_token_id": 25}, []),
        ({"eos_token_id": 20}, ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]),
        ({}, ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"]),
        ({}, ["<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_of_text|>"]),
        ({}, ["<end_of_turn>", "<eos>", "<start_of_turn>", "<EOT>", "▁<EOT>"]),
        ({}, ["<|return|>", "<|call|>"]),
        ({}, ["<|end|>"]),
    ],
)
def test_ends_of_a_gguf(tmp_path: Path, named: dict[str, int], ends: list[str], kind: int) -> None:
    """As in llama.cpp, ends are named by the metadata or known by their texts, whatever type the file gives them."""
    words = ["<a>", "<b>", "<c>", *tokens()[3 : 272 - len(ends)], *ends]
    metadata = {
        "tokens": words,
        "merges": list(MERGES[:3]),
        "token_type": [3] * 3 + [1] * (269 - len(ends)) + [kind] * len(ends),
        **dict.fromkeys(("eos_token_id", "bos_token_id", "padding_token_id")),
        **named,
    }
    path = write_gguf(tmp_path / "a.gguf", {f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    tokenizer = load_model(path, runtime="llama").tokenizer
    assert tokenizer.stop_ids == {*named.values(), *map(words.index, ends)}
    a = tokenizer.encode("a")
    assert all(tokenizer.encode(f"a{end}a") == [*a, words.index(end), *a] for end in ends)
    assert tokenizer.decode([*a, *map(words.index, ends)]) == "a"


def test_stop_ids_of_files_that_name_none(tmp_path: Path) -> None:
    words = [word.replace("<|im_end|>", "<|other|>").replace("<|im_start|>", "<bos>") for word in tokens()]
    fields = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.tokens": words}
    tiny = folder_of(write_gguf(tmp_path / "tiny.gguf", fields), tmp_path / "tiny")
    (tiny / "generation_config.json").unlink()
    assert Tokenizer.from_folder(tiny).stop_ids == {0}  # <|endoftext|>


def test_a_message_ends_a_turn_where_an_answer_has_one_message(tiny: Path) -> None:
    """Phi ends turns by <|end|>, gpt-oss by other tokens only the messages before the last."""
    file = tiny / "tokenizer.json"
    for added, ends in ((["<|end|>"], {272}), (["<|end|>", "<|return|>"], {273}), (["</s>"], {272})):
        data = json.loads(file.read_text())
        entry = data["added_tokens"][0]
        more = [entry | {"id": 272 + place, "content": token} for place, token in enumerate(added)]
        known = [one for one in data["added_tokens"] if one["id"] < 272]
        file.write_text(json.dumps(data | {"added_tokens": known + more}))
        (tiny / "config.json").unlink(missing_ok=True)
        assert Tokenizer.from_folder(tiny).stop_ids == {0, 1, 2} | ends
    more[0]["special"] = False  # in Gemma, </s> is the HTML tag
    file.write_text(json.dumps(data | {"added_tokens": known + more}))
    assert Tokenizer.from_folder(tiny).stop_ids == {0, 1, 2}


def test_added_tokens_without_a_row_are_refused_in_texts_alone(tiny: Path) -> None:
    """Gemma 3's smaller models have one for images."""
    file, config = tiny / "tokenizer.json", tiny / "config.json"
    data = json.loads(file.read_text())
    more = [data["added_tokens"][0] | {"id": 272, "content": "<image>"}]
    file.write_text(json.dumps(data | {"added_tokens": data["added_tokens"] + more}))
    config.write_text(json.dumps({"vocab_size": 272}))
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.size == 272
    assert tokenizer.encode("hello")
    with pytest.raises(
        UserError, match=r"the text holds '<image>', a token for which the model's embedding has no row"
    ):
        tokenizer.encode("hello <image>")


def test_special_tokens_map(tiny: Path) -> None:
    """As in transformers, it overrides a tokenizer_config.json that lists no added tokens, and is otherwise ignored."""
    (tiny / "special_tokens_map.json").write_text(json.dumps({"bos_token": "h", "eos_token": "e"}))
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.bos_id == tokens().index("h")
    assert tokens().index("e") in tokenizer.stop_ids
    assert set_fields(tiny, added_tokens_decoder={}).bos_id == 1


def test_ids_beyond_the_embedding(tiny: Path) -> None:
    for rows in (len(tokens()), len(tokens()) + 64):  # embeddings are often padded
        (tiny / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert Tokenizer.from_folder(tiny).size == len(tokens())
    (tiny / "config.json").write_text(json.dumps({"vocab_size": len(tokens()) - 1}))
    with pytest.raises(UserError, match=rf"ids up to {len(tokens()) - 1}.*has {len(tokens()) - 1} rows"):
        Tokenizer.from_folder(tiny)


def changed(tokenizer: Path, words: list[str]) -> Tokenizer:
    """The tiny tokenizer with other strings, in another folder."""
    path = write_gguf(
        tokenizer.parent / "other.gguf", {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": None}
    )
    shutil.rmtree(tokenizer.parent / "other", ignore_errors=True)
    return Tokenizer.from_folder(folder_of(path, tokenizer.parent / "other"))


def test_tokens_differ(tiny: Path) -> None:
    mine, words = Tokenizer.from_folder(tiny), tokens()
    assert mine.tokens_differ(mine) is None
    assert mine.tokens_differ(changed(tiny, [*words, "[PAD a]", "[PAD b]"])) is None
    assert changed(tiny, words[:-1]).tokens_differ(mine) is None
    swapped = [*words[:-2], words[-1], words[-2]]
    phrase = mine.tokens_differ(changed(tiny, swapped))
    assert phrase == f"id {len(words) - 2} is {words[-2]!r} in one and {words[-1]!r} in the other"


def test_damaged_files_and_other_decoders_are_refused(tiny: Path) -> None:
    file = tiny / "tokenizer.json"
    for content in (file.read_text()[:100], "[]", None):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tiny)
    raw = RawTokenizer(models.BPE({"a": 0}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    raw.save(str(tiny / "tokenizer.json"))
    with pytest.raises(UserError, match="WordPiece"):
        Tokenizer.from_folder(tiny)


def test_training_settings_are_ignored(tiny: Path) -> None:
    raw = RawTokenizer.from_file(str(tiny / "tokenizer.json"))
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    raw.save(str(tiny / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]
    with pytest.raises(UserError, match="surrogate"):
        tokenizer.encode("a\ud83d")
