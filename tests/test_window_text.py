"""Streams over a decoder that nothing is known of: the pieces of whole decoding, and few ids decoded for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from test_tokenizer import BYTES
from tokenizers import Tokenizer, decoders, models

from outpace.models.text.text_stream import REPLACEMENT, WINDOW_KEPT, WINDOW_MAX, WindowStream, byte_alphabet

Decode = Callable[[Sequence[int]], str]


class WholeText:
    """The slow twin: decodes all ids with each new one."""

    def __init__(self, decode: Decode) -> None:
        self._decode, self._ids, self._sent = decode, list[int](), ""

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        return self._since(self._decode(self._ids).rstrip(REPLACEMENT))

    def finish(self) -> str:
        return self._since(self._decode(self._ids))

    def _since(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def rust(words: Iterable[str], decoder: decoders.Decoder) -> Decode:
    """What a tokenizer with these words and one special token, its last, decodes."""
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["</s>"])
    return lambda ids: tokenizer.decode(list(ids))


def dropped_bytes(ids: Sequence[int]) -> str:
    """As ByT5: what is no whole character is left out."""
    return bytes(index for index in ids if index < 256).decode(errors="ignore")


def joined(ids: Sequence[int]) -> str:
    """As CTRL and GPT-1: spaces at both ends of a text are taken away."""
    return "".join(("a", "b ", " ", "c</w>")[index % 4] for index in ids).replace("</w>", " ").strip()


def numbered(ids: Sequence[int]) -> str:
    """Every token's text depends on all tokens before it."""
    return "".join(f"{place}:{index} " for place, index in enumerate(ids))


UTF8 = [*range(97, 105), *"é日😀".encode()]
DECODERS: dict[str, tuple[Decode, list[int]]] = {
    "WordPiece": (rust(["a", "##b", "c", ".", "'", "s", "do", "n't", "##é"], decoders.WordPiece()), [*range(10)]),
    "Metaspace": (rust(["▁a", "b", "▁", "c", "▁▁", "é"], decoders.Metaspace()), [*range(7)]),
    "BPEDecoder": (rust(["a</w>", "b", "c</w>", "é"], decoders.BPEDecoder()), [*range(5)]),
    "CTC": (rust(["a", "b", "<pad>", "|"], decoders.CTC()), [*range(5)]),
    "ByteLevel": (rust(byte_alphabet(), decoders.ByteLevel()), [*range(257)]),
    "ByteFallback": (
        rust([*BYTES, "▁a", "b"], decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
        [*UTF8, 256, 257, 256, 257],
    ),
    "dropped bytes": (dropped_bytes, [*UTF8, 300]),
    "joined": (joined, [*range(4)]),
    "numbered": (numbered, [*range(9)]),
}


def texts(name: str, count: int, longest: int) -> Iterable[tuple[list[int], int]]:
    """Ids, many of them halves of characters, and by how many of them the text grows at a time."""
    chance, pool = random.Random(name), DECODERS[name][1]
    for _ in range(count):
        yield [chance.choice(pool) for _ in range(chance.randint(0, longest))], chance.choice([1, 1, 1, 2, 5])


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", DECODERS)
def test_each_piece_is_that_of_whole_decoding(name: str, count: int) -> None:
    """And they add up, where the text of damaged bytes is never revised."""
    decode = DECODERS[name][0]
    for ids, step in texts(name, count, 6 * WINDOW_MAX):
        windowed, whole, pieces = WindowStream(decode), WholeText(decode), []
        for at in range(0, len(ids), step):
            pieces.append(windowed.push(ids[at : at + step]))
            assert pieces[-1] == whole.push(ids[at : at + step]), ids[: at + step]
        pieces.append(windowed.finish())
        assert pieces[-1] == whole.finish(), ids
        assert name in ("ByteLevel", "ByteFallback") or "".join(pieces) == decode(ids), ids


class Counted:
    """A decoder that counts the ids which it is given."""

    def __init__(self, decode: Decode) -> None:
        self._decode, self.ids = decode, 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.ids += len(ids)
        return self._decode(ids)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "numbered"])
@pytest.mark.parametrize("count", [1000, 4000])
def test_decoded_ids_for_a_token_do_not_grow_with_the_text(name: str, count: int) -> None:
    decode, pool = DECODERS[name]
    chance, counted = random.Random(0), Counted(decode)
    stream = WindowStream(counted)
    for _ in range(count):
        stream.push([chance.choice(pool)])
    assert counted.ids <= (WINDOW_MAX + WINDOW_KEPT) * count
    before = counted.ids
    stream.finish()
    assert counted.ids - before <= 2 * count
