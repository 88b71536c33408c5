"""A model's vocabulary as llguidance reads it: the bytes of every token, which are special, which end an answer."""

from __future__ import annotations

from typing import Any

from outpace.models.text.tokenizer import Tokenizer


class Vocabulary:
    """Has the fields and the call that `llguidance.LLTokenizer` asks of a tokenizer that is Python code."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Ids that stand for no bytes are special tokens that nothing names; where no token ends an answer, one more
        id stands for the end, which no model has."""
        known, special = tokenizer.bytes_by_id(), tokenizer.special_ids
        self._tokenizer = tokenizer
        self.tokens = [known.get(index) or f"<|no bytes {index}|>".encode() for index in range(tokenizer.size)]
        self.special_token_ids = sorted(special | {i for i in range(tokenizer.size) if not known.get(i)})
        self.stop_ids = sorted(tokenizer.stop_ids) or [tokenizer.size]
        if not tokenizer.stop_ids:
            self.tokens.append(b"<|end|>")
            self.special_token_ids.append(tokenizer.size)
        self.eos_token_id = self.stop_ids[0]
        self._by_bytes = {written: index for index, written in known.items() if index not in special}

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that the model would most likely cut a text into, in the middle of another."""
        text = text.decode() if isinstance(text, bytes) else text
        ids = self._tokenizer.continuation(text)
        if ids and self._spelled(ids) == b" " + text.encode():  # a tokenizer that puts a space before every text
            bare = self.tokens[ids[0]][1:]
            ids = [*([self._by_bytes[bare]] if bare in self._by_bytes else []), *ids[1:]]
        return ids if self._spelled(ids) == text.encode() else []

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[index] for index in ids)


def tokenizer_of(tokenizer: Tokenizer) -> Any:
    """The vocabulary inside llguidance; takes a tenth of a second, and serves all grammars."""
    import llguidance

    vocabulary: Any = Vocabulary(tokenizer)
    return llguidance.LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.stop_ids)
