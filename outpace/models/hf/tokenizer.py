"""Wraps a tokenizer of transformers: by its fast backend if it has one, otherwise as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from outpace.core.errors import UserError
from outpace.models.files.tokenizer_folder import SPECIAL_NAMES, named_templates
from outpace.models.text.text_stream import TextStream, WindowStream
from outpace.models.text.tokenizer import Tokenizer


class PythonBackend:
    """The methods of `tokenizers.Tokenizer` that outpace calls, implemented with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._tokens = {index: token for token, index in self._ids.items()}

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [index for index in ids if index in self._tokens]
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(known, **options))

    def no_truncation(self) -> None:
        """Do nothing: `encode` does not truncate."""

    def no_padding(self) -> None:
        """Do nothing: `encode` does not pad."""

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self._tokens.get(index)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._ids

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._tokenizer.added_tokens_decoder)


class SlowTokenizer(Tokenizer):
    """A tokenizer written in Python, or whose decoder `text_stream` does not support: slower, with the same text."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        super().__init__(PythonBackend(tokenizer), _special(tokenizer), stop_ids, _templates(tokenizer))

    @cached_property
    def _anchor(self) -> list[int]:
        return self.continuation("a")[-1:]

    def _stream_factory(self) -> Callable[[bool], TextStream]:
        return lambda skip_special: WindowStream(partial(self.decode, skip_special=skip_special))

    def spelled(self, token: int) -> bytes:
        return self.decode([token], skip_special=False).encode()

    def _added_bytes(self, token: int) -> bytes:
        """Return what the token adds to another one's text, because decoders join tokens by their own rules.

        Partial characters are U+FFFD here, so a ban does not see characters that such a tokenizer splits.
        """
        alone, both = self.decode(self._anchor), self.decode([*self._anchor, token])
        return (both[len(alone) :] if both.startswith(alone) else self.decode([token])).encode()


def wrap_tokenizer(tokenizer: Any, stop_ids: Sequence[int]) -> Tokenizer:
    """Wrap the tokenizer, without changing it; `stop_ids` end an answer in addition to its own."""
    import tokenizers

    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "all_special_ids"):
        raise UserError(f"{type(tokenizer).__name__} is not a tokenizer of transformers, AutoTokenizer gives one")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        try:
            return Tokenizer(copy, _special(tokenizer), stop_ids, _templates(tokenizer))
        except UserError:  # a decoder that text_stream does not support
            pass
    return SlowTokenizer(tokenizer, stop_ids)


def _special(tokenizer: Any) -> dict[str, str]:
    found = {name: getattr(tokenizer, name, None) for name in SPECIAL_NAMES}
    return {name: str(text) for name, text in found.items() if text is not None}


def _templates(tokenizer: Any) -> dict[str, str]:
    return named_templates(getattr(tokenizer, "chat_template", None))
