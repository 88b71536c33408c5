"""Finds the tokens that two vocabularies share, by the bytes that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from outpace.models.text.text_stream import byte_alphabet
from outpace.models.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> np.ndarray:
    """Return pairs of ids with equal bytes, (target's, draft's), sorted by the target's. int64 [tokens, 2]"""
    theirs = {spelled: index for index, spelled in _spellings(draft).items()}
    pairs = [(index, theirs[spelled]) for index, spelled in _spellings(target).items() if spelled in theirs]
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def _spellings(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each token, without special tokens, which are not text."""
    words: Mapping[int, str] = tokenizer.words
    alphabet = byte_alphabet()
    is_by_bytes = "\u0120" in words.values() or not any(word.startswith("\u2581") for word in words.values())
    found: dict[int, bytes] = {}
    for index, word in words.items():
        if index in tokenizer.special_ids:
            continue
        if is_by_bytes and all(character in alphabet for character in word):
            found[index] = bytes(alphabet[character] for character in word)
        elif one := _BYTE.fullmatch(word):
            found[index] = bytes([int(one[1], 16)])
        else:
            found[index] = word.replace("\u2581", " ").encode("utf-8", "surrogatepass")
    return found
