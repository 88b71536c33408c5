"""Banned strings: exactly the tokens that would complete one are forbidden, in any vocabulary, after any text."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import make_request
from files import folder_of, write_gguf
from test_tokenizer import sentence_piece
from twins import completes

from outpace.core.adjust import adjust_logits
from outpace.core.constraints import BannedText, TokenTexts
from outpace.core.types import Adjustments, Row
from outpace.models.hf.load import SlowTokenizer
from outpace.models.text.tokenizer import Tokenizer


def forbidden(ban: BannedText, tokens: list[int]) -> set[int]:
    return {*ban.always.tolist(), *ban.after(reversed(tokens))}


@pytest.mark.parametrize("seed", range(4))
def test_any_ban_in_any_vocabulary_equals_the_slow_twins(seed: int) -> None:
    chance = random.Random(seed)
    sometimes = 0
    for _ in range(400):
        letters = "ab" if chance.random() < 0.5 else "abé€"
        spelt = "".join(chance.choices(letters, k=40)).encode()
        cuts = [(start := chance.randrange(40), start + chance.randint(0, 5)) for _ in range(12)]
        texts = [b"", *(spelt[start:end] for start, end in cuts), *(bytes([byte]) for byte in sorted(set(spelt)))]
        strings = tuple("".join(chance.choices(letters, k=chance.randint(1, 4))) for _ in range(chance.randint(1, 3)))
        ban = TokenTexts(texts).ban(strings)
        for _ in range(8):
            before = chance.choices(range(len(texts)), k=chance.randint(0, 8))
            found = forbidden(ban, before)
            expected = {
                token for token in range(len(texts)) if completes(strings, [texts[t] for t in before], texts[token])
            }
            assert found == expected, (texts, strings, before)
            sometimes += bool(found) and found != set(ban.always.tolist())
    assert sometimes > 300


def test_a_row_is_judged_by_its_own_answer_and_not_by_the_prompt() -> None:
    texts = TokenTexts([b"a", b"b", b"c"])
    request = make_request((0,), adjustments=Adjustments(banned=texts.ban(("ab",))))
    rows = [Row(request, (0,)), Row(request, (0,), (0,)), Row(request, (0, 0)), Row(request, (0, 0), (2,))]
    logits = adjust_logits(torch.zeros(4, 3), rows)
    assert logits.isinf().nonzero().tolist() == [[1, 1], [2, 1]]
    assert adjust_logits(torch.zeros(4, 1), rows).isfinite().all(), "a smaller vocabulary has no such token"


def test_a_ban_crosses_to_another_process() -> None:
    ban = TokenTexts([b"a", b"b", b"ab", *(b"%d" % number for number in range(50_000))]).ban(("ab",))
    data = pickle.dumps(ban)
    assert len(data) < 2000, "the whole vocabulary goes with it"
    assert forbidden(pickle.loads(data), [0]) == {1, 2}


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    where = tmp_path_factory.mktemp("tokenizer")
    file = write_gguf(where / "m.gguf") if request.param == "bytes" else sentence_piece(where / "m.gguf")
    return Tokenizer.from_folder(folder_of(file, where / "tokenizer"))


def test_the_tokens_bytes_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    chance, texts = random.Random(3), tokenizer.texts
    assert len(texts) == tokenizer.size
    assert tokenizer.stop_ids
    assert all(texts[token] == b"" for token in tokenizer.stop_ids)
    shown = [token for token in range(tokenizer.size) if token not in tokenizer.stop_ids]
    for _ in range(200):
        ids = chance.choices(shown, k=chance.randint(1, 20))
        text, read = b"".join(texts[token] for token in ids), tokenizer.decode(ids)
        if "\ufffd" not in read:  # where bytes are damaged, tokenizers differ in how many they show as U+FFFD
            assert read in (text.decode(), text.decode().removeprefix(" "))


def test_a_tokenizer_of_unknown_kind_finds_what_a_token_adds() -> None:
    """Words that are joined by spaces, parts of words that are not: as WordPiece does."""
    other = SlowTokenizer(Joined(("a", "colour", "##s", "col", "##our", "[END]")), [5])
    assert [other.texts[token] for token in range(6)] == [b" a", b" colour", b"s", b" col", b"our", b""]
    assert forbidden(other.texts.ban(("colour",)), [0, 3]) == {1, 4}


class Joined:
    """The methods of a tokenizer of transformers that are called."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._tokens = tokens
        self.added_tokens_decoder = {5: SimpleNamespace(special=True, content="[END]")}

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._tokens.index(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self._tokens[index] for index in ids).replace(" ##", "")
