"""Text to token ids and back, and conversations through the model's chat template, from a model folder's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError
from outpace.models import chat_template
from outpace.models.checkpoint import read_json
from outpace.models.text_stream import TextStream, stream_maker

if TYPE_CHECKING:
    import tokenizers

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Tokens that end a turn or a text in the families that run here, whether or not the model's files say so.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")


class Tokenizer:
    """A model's vocabulary. `size` counts ids; `stop_ids` end an answer; `bos_id` is None where the model has none."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        stop_ids: Sequence[int] = (),
        template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        # Some files carry the settings of training, which would cut or fill what is encoded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._words = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
        self._special = {name: text for name in SPECIAL_NAMES if (text := _token_text(settings.get(name)))}
        self._add_bos = settings.get("add_bos_token")
        self._template = template
        self._stream = stream_maker(tokenizer)
        self.size = max(self._words, default=-1) + 1
        self.bos_id = self._id(self._special.get("bos_token"))
        named = {self._id(self._special.get("eos_token")), *map(self._id, ENDS), *stop_ids}
        self.stop_ids = frozenset(index for index in named if index is not None)

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """The tokenizer of the model folder `path`; UserError if tokenizer.json is missing or damaged."""
        import tokenizers

        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{path} holds no tokenizer.json, other tokenizer files cannot be read")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UserError(f"{file} is not a tokenizer ({error})") from error
        settings = _optional(path / "tokenizer_config.json")
        stops: list[int] = []
        for name in ("generation_config.json", "config.json"):
            stops += _ids(path / name, _optional(path / name).get("eos_token_id"))
        try:
            return cls(tokenizer, settings, stops, _template(path, settings))
        except UserError as error:
            raise UserError(f"{file}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, after the begin-of-text token where the model wants one.

        Special tokens written out in `text` become their ids, as in transformers.
        """
        ids = self._encode(text, add_special=self._add_bos is None)
        if self._add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        twice = self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if twice else ids

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any) -> str:
        """The conversation as the text that the model was trained on; `values` (tools, ...) go to the template.

        UserError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise UserError("this model has no chat template, give it plain text instead")
        values = {"tools": None, "documents": None, **self._special, **values}
        return chat_template.render(self._template, messages, add_generation_prompt=add_generation_prompt, **values)

    def chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """The ids of the conversation, ready for the model's answer; the template alone writes special tokens."""
        return self._encode(self.render(messages, **values), add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids beyond the vocabulary (a padded embedding) are empty."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> TextStream:
        """A new text to be decoded bit by bit; its pieces put together equal `decode`."""
        return self._stream(skip_special)

    def tokens_differ(self, other: Tokenizer) -> str | None:
        """None if both name the same strings for all ids that both have, else a phrase with the first that differs.

        One vocabulary may be longer than the other: rows that pad an embedding are no difference.
        """
        for index in range(min(self.size, other.size)):
            mine, others = self._words.get(index), other._words.get(index)
            if mine != others and mine is not None and others is not None:
                return f"id {index} is {mine!r} in one and {others!r} in the other"
        return None

    def _encode(self, text: str, add_special: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text holds half a character (a lone surrogate) at {error.start}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _ids(file: Path, value: Any) -> list[int]:
    """An eos_token_id field: null, an id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(index, bool) or not isinstance(index, int) for index in ids):
        raise UserError(f"{file}: eos_token_id is {value!r}, it must be an id or a list of ids")
    return ids


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a text or an object with its text in `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: newer folders keep it in a file of its own, older ones in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error})") from error
    found = _optional(path / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None
