"""Tokenizes text and conversations (with the model's chat template) from the files of a model."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError
from outpace.core.machine import trim_heap
from outpace.models.files import tokenizer_folder
from outpace.models.files.cache import lazy_sha256
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.files.reading import MAX_TOKENIZER_BYTES, check_downloaded, check_file, read_optional_json
from outpace.models.files.tokenizer_folder import (
    INFILL_MARKS,
    KNOWN_MARKS,
    THINK,
    InfillTokens,
    ThoughtMarks,
    ends_among,
    named_templates,
    token_text,
)
from outpace.models.text.text_stream import REPLACEMENT, TextStream, TokenStream, stream_factory

if TYPE_CHECKING:
    import tokenizers

    from outpace.core.constraints import TokenTexts
    from outpace.models.text.chat_template import ChatTemplate
    from outpace.models.text.template_form import TemplateForm


CUT = "CONTINUE_THIS_TEXT_HERE"  # marks the end of a message that is to be continued
_READING, _LAST = Lock(), list[Any]()  # what identifies the file read last, and its content


class Tokenizer:
    """A model's tokenizer. `size` counts ids; `stop_ids` end an answer; `bos_id` may be None."""

    _beyond: Mapping[int, str] = {}  # tokens without an embedding row; never modified in place

    def __init__(
        self,
        tokenizer: Any,
        settings: Mapping[str, Any],
        stop_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`tokenizer` is a tokenizers.Tokenizer, or has its methods.

        `stop_ids` are the ends named in the model's files, `templates` its chat templates by name.
        """
        self._tokenizer = tokenizer
        # Some files contain training settings, which would truncate or pad.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        named = tokenizer_folder.named_tokens(settings)
        self.special_texts = {name: text for name, token in named.items() if (text := token_text(token))}
        self._templates = dict(templates or {})
        self._renderers: dict[str, ChatTemplate] = {}
        self._forms: dict[str, TemplateForm] = {}
        self._stream = self._stream_factory()
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = self.id_of(self.special_texts.get("bos_token"))
        self.stop_ids = self._ends(stop_ids)
        self.infill_tokens = self._find_infill_tokens(settings)

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of the model folder `path`.

        Raises UserError: no tokenizer.json, damaged, or with ids beyond the model's embedding.
        """
        path = Path(path)
        settings = tokenizer_folder.read_settings(path)
        config = read_optional_json(path / "config.json")
        stops: list[int] = []
        for name in ("generation_config.json", "config.json"):
            stops = stops or _ids(path / name, read_optional_json(path / name).get("eos_token_id"))
        file = path / "tokenizer.json"
        raw = _load_backend(file, settings, config)
        rows = config.get("vocab_size")
        try:
            tokenizer = cls(raw, settings, stops, tokenizer_folder.read_templates(path, settings))
            if isinstance(rows, int) and tokenizer.size > rows:
                tokenizer._drop_ids_from(rows)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Encode `text`, after the begin-of-text token if the model uses one.

        Special tokens written out in `text` become their ids, as in transformers.
        """
        ids = self._encode(text, add_special=True)
        twice = self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if twice else ids

    def continuation(self, text: str) -> list[int]:
        """Encode a text that continues another, without adding special tokens."""
        return self._encode(text, add_special=False)

    def literal(self, text: str, is_inner: bool = False) -> list[int]:
        """Encode a text in which special tokens that are written out stay text.

        `is_inner`: the text follows other text, so SentencePiece tokenizers must not put a space before it.
        """
        cuts = [match.start() + 1 for match in self._special_words.finditer(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        first = self._inner(pieces[0]) if is_inner else self.continuation(pieces[0])
        return [*first, *(token for piece in pieces[1:] for token in self._inner(piece))]

    def split_at_added(self, text: str) -> list[str]:
        """Split a text into the added tokens that are written out in it, and what is between them."""
        return [part for part in re.split(f"({self._special_words.pattern})", text) if part]

    def _inner(self, text: str) -> list[int]:
        """Encode a text without the space that SentencePiece tokenizers put before one."""
        line = self.continuation("\n")  # no token continues a line break with other characters
        ids = self.continuation(f"\n{text}") if self._adds_space else []
        return ids[len(line) :] if ids and ids[: len(line)] == line else self.continuation(text)

    @cached_property
    def _adds_space(self) -> bool:
        return b"".join(self.spelled(index) for index in self.continuation("a")) == b" a"

    @cached_property
    def _special_words(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        words = sorted((re.escape(token.content) for token in added if token.content.strip()), key=len, reverse=True)
        return re.compile("|".join(words) or r"(?!)")

    @property
    def has_template(self) -> bool:
        """Whether the model has a default chat template."""
        return "default" in self._templates

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    @property
    def template_digest(self) -> str:
        """A short hash of the default chat template."""
        return lazy_sha256((self.chat_template or "").encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def template_text(self) -> str:
        """The texts of all chat templates, joined."""
        return "\n".join(self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,
    ) -> str:
        """Render the conversation with the chat template; `values` (tools, ...) are passed to it.

        Messages are put in the form that the template takes, see `TemplateForm`. `continue_final_message`: the answer
        continues the last message, which must be the assistant's. Raises UserError if the model has no chat template or
        the template refuses the messages.
        """
        if continue_final_message:
            return self._render_begun(messages, values)
        values = {**self._default_values, **values, "add_generation_prompt": add_generation_prompt}
        name = self._template_name(values)
        if name not in self._templates:
            others = f", only one for {', '.join(sorted(self._templates))}" if self._templates else ""
            raise UserError(f"this model has no chat template{others}: give it text as it is, --raw")
        return self._form(name).rendered(messages, partial(self._renderer(name).render, **values))

    @property
    def _default_values(self) -> dict[str, Any]:
        return {"tools": None, "documents": None, **self.special_texts}

    def _template_name(self, values: Mapping[str, Any]) -> str:
        return "tool_use" if values.get("tools") is not None and "tool_use" in self._templates else "default"

    def _renderer(self, name: str) -> ChatTemplate:
        from outpace.models.text.chat_template import ChatTemplate  # loads jinja2

        if name not in self._renderers:
            self._renderers[name] = ChatTemplate(self._templates[name])
        return self._renderers[name]

    def _form(self, name: str) -> TemplateForm:
        """Return the form of messages that the template of this name takes."""
        from outpace.models.text.template_form import PROBED_TOOL, TemplateForm

        if name not in self._forms:
            values = self._default_values | ({"tools": [PROBED_TOOL]} if name == "tool_use" else {})
            self._forms[name] = TemplateForm(partial(self._renderer(name).render, **values))
        return self._forms[name]

    @cached_property
    def thought_marks(self) -> ThoughtMarks | None:
        """The marks of the model's thoughts; None if its chat template does not show that it writes some."""
        from outpace.models.text.thought_marks import find_marks

        added = {token.content: token.special for token in self._tokenizer.get_added_tokens_decoder().values()}
        ends = {text for text in added if self.id_of(text) in self.stop_ids}
        return find_marks(self.template_text, self._form("default") if self.has_template else None, added, ends)

    @cached_property
    def thought_ids(self) -> frozenset[int]:
        """The special tokens that write the marks of thoughts; decoded text omits them by default."""
        marks = self.thought_marks.texts if self.thought_marks else ()
        words = {index: self._tokenizer.id_to_token(index) for index in self.special_ids}
        return frozenset(index for index, word in words.items() if any(word in mark or mark in word for mark in marks))

    def _render_begun(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Render a conversation up to the end of its last message's text, which the answer continues."""
        *before, last = messages or [{}]
        parts = last.get("content")
        content = [*parts] if isinstance(parts, list) else [{"type": "text", "text": parts}]
        text = content[-1].get("text") if content and isinstance(content[-1], Mapping) else None
        if last.get("role") != "assistant" or not isinstance(text, str) or last.get("tool_calls"):
            raise UserError("only a text of the assistant, without tool calls, can be continued as the last message")
        start = (self.thought_marks or THINK).start
        if text.lstrip().startswith(start):  # templates move or drop a thought in a message
            begun = self.render(before, **values)
            opened = begun.rstrip().removesuffix(start)
            return (opened if opened != begun.rstrip() else begun) + text
        content[-1] = {**content[-1], "text": text + CUT}  # so that the template trims nothing from the text's end
        marked = {**last, "content": content if isinstance(parts, list) else text + CUT}
        begun, found, _ = self.render([*before, marked], add_generation_prompt=False, **values).rpartition(CUT)
        if not found:
            raise UserError("this model's chat template does not write the last message, so it cannot be continued")
        return begun

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> list[int]:
        """Encode the conversation up to the start of the answer; only the template adds special tokens.

        Raises UserError also if the template shows no form of a message's content, so that its text would be lost.
        """
        rendered = self.render(messages, **values)
        self._form(self._template_name(values)).check_shown(messages, rendered)
        return self._encode(rendered, add_special=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode `text` as a user's message, or as plain text if no chat template accepts it."""
        if not self.has_template:
            return self.encode(text)
        try:
            return self.chat([{"role": "user", "content": text}])
        except UserError:
            return self.encode(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode `ids`; ids beyond the vocabulary (a padded embedding) are empty."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> TextStream:
        """Start a streaming decoder whose concatenated pieces equal `decode`."""
        return self._stream(skip_special)

    @cached_property
    def texts(self) -> TokenTexts:
        """What each id adds to an answer's text; special and stop tokens add nothing."""
        from outpace.core.constraints import TokenTexts  # for banned strings and structured answers

        return TokenTexts([b"" if index in self.stop_ids else self._added_bytes(index) for index in range(self.size)])

    def spelled(self, token: int) -> bytes:
        """Return the bytes of one token, special tokens as written; they may be part of a character."""
        return self._token_streams[1].bytes_of(token)

    def bytes_by_id(self) -> dict[int, bytes]:
        """Return the bytes of each id, special tokens as written; ids with unknown bytes are left out."""
        special = self.special_ids
        found = {i: word.encode() if i in special else self._added_bytes(i) for i, word in self.words.items()}
        return {index: text for index, text in found.items() if text and REPLACEMENT.encode() not in text}

    def id_of(self, token: str | None) -> int | None:
        """Return the id of a token by name, or None."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def tokens_differ(self, other: Tokenizer) -> str | None:
        """Return None if both vocabularies agree on all ids they share, else a phrase with the first difference.

        Padding rows of the longer vocabulary are no difference.
        """
        return first_difference(self.words, other.words)

    @cached_property
    def words(self) -> Mapping[int, str]:
        """All tokens as written in the vocabulary, by id; built at first use, as a large one takes 20 MB."""
        return {index: token for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and ids: equal where ids mean the same."""
        words = "\0".join(f"{index} {self.words[index]}" for index in sorted(self.words))
        return lazy_sha256(words.encode("utf-8", "surrogatepass")).hexdigest()

    def _encode(self, text: str, add_special: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text holds half a character (a lone surrogate) at {error.start}") from error
        with _panics_as_errors("cannot cut this text"):
            ids = list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
        if not self._beyond.keys().isdisjoint(ids):
            token = next(self._beyond[index] for index in ids if index in self._beyond)
            raise UserError(f"the text holds {token!r}, a token for which the model's embedding has no row")
        return ids

    def _drop_ids_from(self, rows: int) -> None:
        """Drop the ids beyond an embedding of `rows` rows.

        Raises UserError unless all are added tokens, such as Gemma 3's image token in models without vision.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        self._beyond = {index: token.content for index, token in added.items() if index >= rows}
        if len(self._beyond) < self.size - rows:
            raise UserError(f"it names ids up to {self.size - 1}, the model's embedding has {rows} rows")
        self.size = rows

    def _stream_factory(self) -> Callable[[bool], TextStream]:
        return stream_factory(self._tokenizer)

    @cached_property
    def _token_streams(self) -> tuple[TokenStream, TokenStream]:
        """Two streams for the bytes of single tokens: one hides special tokens, the other shows them."""
        streams: Any = self._stream
        return streams(True), streams(False)

    def _added_bytes(self, token: int) -> bytes:
        """Return what a token adds to a text."""
        return self._token_streams[0].bytes_of(token)

    def _find_infill_tokens(self, settings: Mapping[str, Any]) -> InfillTokens | None:
        """Return the tokens of fill-in-the-middle prompts, named by the model's files or found by their usual texts;
        None without them."""
        found: dict[str, int | None] = {}
        for name in InfillTokens._fields:
            ids = map(self.id_of, (token_text(settings.get(f"{name}_token")), *INFILL_MARKS[name]))
            found[name] = next((index for index in ids if index is not None and index < self.size), None)
        marks = InfillTokens(**found)  # type: ignore[arg-type]
        return None if None in marks[:3] else marks

    def _ends(self, named: Sequence[int]) -> frozenset[int]:
        """Return the ids that end an answer: those named by the model's files, and those found by their usual texts."""
        added = self._tokenizer.get_added_tokens_decoder()
        # Ends of thoughts, not of answers.
        inner = {marks.end for marks in KNOWN_MARKS if marks.start in self.template_text}
        texts = {token.content: index for index, token in added.items() if token.content not in inner}
        found = ends_among(texts, self.special_ids)
        bos = self.special_ids & {self.bos_id}  # begins another text
        ids = {self.id_of(self.special_texts.get("eos_token")), *named, *found, *bos}
        there = [index for index in ids if index is not None and 0 <= index < self.size]
        return frozenset(index for index in there if self._tokenizer.id_to_token(index) is not None)


def _load_backend(file: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Load a tokenizer.json, with tokens that the folder's other files name; the last one is cached, as draft and
    target mostly have equal files."""
    if not os.path.lexists(file):
        advice = "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers writes one"
        if not any((file.parent / name).exists() for name in tokenizer_folder.OTHER_TOKENIZERS):
            advice = "copy the files of the original model's tokenizer there"
        raise UserError(f"{file.parent} holds no tokenizer.json; {advice}")
    check_file(file, MAX_TOKENIZER_BYTES)
    named = tokenizer_folder.read_added_tokens(file.parent, settings)
    try:
        text = file.read_bytes()
        spaces = [fields.get(name) for name in tokenizer_folder.SPACE_FIELDS for fields in (settings, config)]
        digest = lazy_sha256(text + repr((named, spaces)).encode("utf-8", "surrogatepass")).digest()
        with _READING, _panics_as_errors(f"cannot be made from {file}"):
            if not _LAST or _LAST[0] != digest:
                import tokenizers

                made = tokenizers.Tokenizer.from_buffer(text)
                tokenizer_folder.set_prefix_space(made, settings, config)
                tokenizer_folder.add_tokens(file.parent, made, named)
                _LAST[:] = digest, made
            found: tokenizers.Tokenizer = _LAST[1]
            return found
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        check_downloaded(file)
        raise UserError(f"{file} is not a tokenizer ({error!s:.200})") from error


@contextmanager
def _panics_as_errors(what: str) -> Iterator[None]:
    """Raise panics of the Rust library, which are no Exceptions, as UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the model's tokenizer {what} ({error!s:.200})") from error


def _ids(file: Path, value: Any) -> list[int]:
    """Read an eos_token_id field: null, an id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(index, bool) or not isinstance(index, int) for index in ids):
        raise UserError(f"{file}: eos_token_id is {value!r:.50}, it must be an id or a list of ids")
    return ids


def first_difference(one: Mapping[int, str], other: Mapping[int, str]) -> str | None:
    """Return None if two vocabularies, tokens by id, agree on all ids that they share, else a phrase with the first
    difference."""
    shared = () if one == other else sorted(one.keys() & other.keys())
    index = next((index for index in shared if one[index] != other[index]), None)
    return None if index is None else f"id {index} is {one[index]!r} in one and {other[index]!r} in the other"


def tokenizer_of(source: Checkpoint | GgufCheckpoint) -> Tokenizer:
    """Load the tokenizer of an open model; UserError if it is missing or damaged.

    Memory used while building a large vocabulary, about 100 MB, is returned to the system.
    """
    if isinstance(source, Checkpoint):
        return tokenizer_of(source.target) if source.target is not None else Tokenizer.from_folder(source.path)
    file = source.path, source.path.stat().st_mtime_ns
    with _READING:
        if not _LAST or _LAST[0] != file:
            _LAST[:] = file, source.tokenizer
            trim_heap()
        built = _LAST[1]
    templates, ends = named_templates(built.settings.get("chat_template")), built.special_ids.get("eos_token_id", [])
    stops = ends if isinstance(ends, list) else [ends]
    try:
        return Tokenizer(built.tokenizer, built.settings, stops, templates)
    except UserError as error:
        raise UserError(f"{source.path}: {error}") from error
