"""Conversations as clients keep them: what chat templates get of messages, items and parts of any type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import AliasChoices, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from outpace.server.errors import ApiError
from outpace.server.request_body import Body

if TYPE_CHECKING:
    from typing_extensions import Self

TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "summary_text")  # how their types begin
# Fields that hold text in values of other types. Arguments of calls and definitions of tools are not among them.
PROSE = ("title", "context", "text", "refusal")
RESULTS = ("source", "content", "output", "outputs", "result", "results", "stdout", "stderr", "logs")
MEDIA = frozenset(("image", "audio", "video", "file", "document", "screenshot", "pdf"))  # words in names of types


class Turn(Body):
    """A message, item or part of a conversation.

    Clients keep what other servers and tools have answered, and cannot take it back. So what is unknown in it is left
    out and reported, and never refused.
    """

    is_kept = True


class TypedTurn(Turn):
    """An item or part that names its type. If this is neither in `known` nor a thought, only the text in it is kept."""

    known: ClassVar[tuple[str, ...]]
    type: str | None = None
    _unknown_type: str | None = PrivateAttr(None)
    _has_media: bool = PrivateAttr(False)  # whether it is an image or the like that no text replaces

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        kind = cls._kind(given) if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind in cls.known:
            return handler(given)
        is_thought = kind.startswith(THOUGHTS)
        text = _thought_in(given) if is_thought else "\n".join(_texts_in(given))
        turn = handler(cls._reduced(given, kind, text))
        turn._unknown_type = None if kind in THOUGHTS or (is_thought and text) else kind
        turn._has_media = _is_media(given) and _has_media(given)
        return turn

    @classmethod
    def _kind(cls, given: Mapping[str, Any]) -> Any:
        return given.get("type")

    @classmethod
    def _reduced(cls, given: Mapping[str, Any], kind: str, text: str) -> dict[str, Any]:
        """Return the valid fields of a thought, or of a value of an unknown type, whose text is `text`."""
        return {"type": kind, "text": text}

    @property
    def unknown_type(self) -> str | None:
        return self._unknown_type

    @property
    def is_thought(self) -> bool:
        return (self.type or "").startswith(THOUGHTS)


class ContentPart(TypedTurn):
    """A part of a message, of a tool's result, or of a system prompt."""

    known = TEXTS
    type: str
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    logprobs: list[Any] | None = None


def template_message(
    role: str, content: str | list[Any] | None, place: str, keeps_parts: bool = False
) -> dict[str, Any]:
    """Return a message for chat templates, with the texts of its parts, joined unless `keeps_parts`, and the
    assistant's thoughts.

    `place` is the content's place in the body.
    """
    if content is None or isinstance(content, str):
        return {"role": role, "content": content or ""}
    for number, part in enumerate(content):
        refuse_media(role, part, f"{place}.{number}")
    texts = [part.text or "" for part in content if part.type in TEXTS or (part.unknown_type and part.text)]
    thoughts = [part.text for part in content if part.is_thought and part.text]
    parts = [{"type": "text", "text": text} for text in texts]
    message: dict[str, Any] = {"role": role, "content": parts if keeps_parts else "\n".join(texts)}
    return {**message, "reasoning_content": "\n".join(thoughts)} if thoughts and role == "assistant" else message


def refuse_media(role: str, turn: TypedTurn, place: str) -> None:
    """Raise ApiError for an image or the like that the client wants the model to see.

    In the answers of models and tools they are left out.
    """
    if turn._has_media and role not in ("assistant", "tool"):
        why = f"{place}.type is {turn.unknown_type!r:.60}, but this server can show the model texts only"
        raise ApiError(400, why, param=place.partition(".")[0], code="invalid_value")


def _texts_in(value: Any, is_text: bool = True) -> Iterator[str]:
    """Yield the texts in a value of any form: its fields that hold text, and its text parts at any depth."""
    if isinstance(value, str):
        yield from (value,) if is_text and value else ()
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner, is_text)
    elif isinstance(value, dict):
        is_part, is_media = value.get("type") in TEXTS, _is_media(value)
        for name in dict.fromkeys((*PROSE, *RESULTS, *value)):  # the order of a client's fields means nothing
            inner = value.get(name)
            is_encoded = is_media and isinstance(inner, str)
            holds_text = is_text and (name in PROSE or (name in RESULTS and not is_encoded))
            yield from _texts_in(inner, holds_text or (is_part and name in ("text", "refusal", "data")))


def _thought_in(given: Mapping[str, Any]) -> str:
    """Return the text of a thought, or of its summary; an encrypted thought has none."""
    texts = ("\n".join(_texts_in(given.get(name))) for name in ("thinking", "text", "content", "summary"))
    return next(filter(None, texts), "")


def _is_media(given: Mapping[str, Any]) -> bool:
    return not MEDIA.isdisjoint(str(given.get("type")).split("_"))


def _has_media(value: Any) -> bool:
    """Return whether there are media without a text, at any depth. A title is not what a file says."""
    if isinstance(value, list):
        return any(map(_has_media, value))
    if not isinstance(value, dict):
        return False
    body = {name: inner for name, inner in value.items() if name not in ("title", "context")}
    return (_is_media(value) and not any(_texts_in(body))) or any(map(_has_media, value.values()))
