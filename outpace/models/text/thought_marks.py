"""Finds the marks between which a model writes its thoughts, by its chat template and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from outpace.models.files.tokenizer_folder import KNOWN_MARKS, TAG, ThoughtMarks
from outpace.models.text.template_form import SECOND, THOUGHT, USER, TemplateForm

_MENTIONS = re.compile(r"think|thought|reason|channel|inner", re.IGNORECASE)  # in templates that know thoughts
_SPEAKS_OF_THOUGHT = re.compile(r"think|thought|reason|inner|reflect|ponder|analysis|monologue", re.IGNORECASE)
_BEGIN_WORDS, _END_WORDS = {"begin", "start", "open", "prefix"}, {"end", "close", "stop", "suffix"}
_ANSWERS = {("answer",), ("response",), ("solution",)}  # what marks around an answer are named after
_FIELD = re.compile(r"reasoning_content|reasoning|thinking|thoughts?")
_NEAR = 200  # characters between a field's name in a template and the marks next to it


def find_marks(
    template: str, form: TemplateForm | None, added: Mapping[str, bool], stops: Collection[str]
) -> ThoughtMarks | None:
    """Return the marks of a model's thoughts; None if its chat template does not show that it writes some.

    `template`: the texts of all chat templates; `form`: that of the default one. `added`: the texts of the vocabulary's
    added tokens, and whether each is special; `stops`: those that end an answer.
    """
    if not _MENTIONS.search(template):
        return None
    if known := next((marks for marks in KNOWN_MARKS if marks.start in template), None):
        return known
    named = sorted((word for word in added if word.strip() and word in template), key=len, reverse=True)
    shown = _Shown(form, re.compile("|".join([*map(re.escape, named), TAG])), stops)
    special = [word for word in named if added[word] and word not in stops]
    found = shown.around_thought() or _by_name(template, shown.marks, added) or _next_to_field(template, special, shown)
    if not found:
        return None
    framed, tags = shown.with_frame(*found), _answer_tags(template, shown.marks)
    return replace(framed, begins=tags[:1], ends=tags[1:]) if tags and not framed.begins else framed


class _Shown:
    """Conversations that a template has rendered, in pieces: each mark is a piece, and so is the text between two."""

    def __init__(self, form: TemplateForm | None, marks: re.Pattern[str], stops: Collection[str]) -> None:
        self.marks, self._stops = marks, stops
        answer = [USER, form.answer(SECOND)] if form else []
        self.opening = self._pieces(form.opening if form else None)
        self.answer = self._pieces(form.try_render(answer, add_generation_prompt=False) if form else None)
        self.thought = self._pieces(form.thought_form.shown if form and form.thought_form else None)

    def around_thought(self) -> tuple[str, str] | None:
        """Return the marks around a thought that the template shows, None if there are none."""
        if THOUGHT not in self.thought:
            return None
        place = self.thought.index(THOUGHT)
        before, after = self.thought[:place], self.thought[place + 1 :]
        own = max(_common(before, self.opening), _common(before, self.answer))
        between = after[: after.index(SECOND)] if SECOND in after else []
        # Before a call, only a mark that says so ends the thought: the call may have begun.
        ends = filter(self._is_mark, between) if between else filter(_SPEAKS_OF_THOUGHT.search, after)
        end = next(ends, None)
        if end is None:
            return self._around_in_words("".join(before), "".join(between).strip())
        if end in self._stops:
            return None
        start = self._from_mark(before[own:])
        if not start and "/" in end:  # the prompt begins the thought, or another template writes the mark
            start = end.replace("/", "", 1)
        start = start or self._from_mark(before[-2:])
        return None if not start or start in self._stops else (start, end)

    def _around_in_words(self, before: str, end: str) -> tuple[str, str] | None:
        """Return marks that are sentences, such as "Here is my answer:"; the prompt may begin the thought."""
        own = max(_common(before, "".join(other)) for other in (self.opening, self.answer))
        start = before[own:].strip() or self.opening[-1].strip()
        return (start, end) if re.search(r"\w", start) and re.search(r"\w", end) else None

    def with_frame(self, start: str, end: str) -> ThoughtMarks:
        """Return marks with those around the answer."""
        begin = turn = ""
        if SECOND in self.answer:
            before = self.answer[: self.answer.index(SECOND)]
            begin = self._from_mark(_after(before[_common(before, self.opening) :], end))
        if THOUGHT in self.thought and SECOND in (later := self.thought[self.thought.index(THOUGHT) :]):
            turn = self._from_mark(_after(later[: later.index(SECOND)], end))
            turn = turn.removesuffix(begin).rstrip()
        if not (begin or turn):
            return ThoughtMarks(start, end)
        after = self.answer[self.answer.index(SECOND) + 1 :] if SECOND in self.answer else []
        closing = [piece for piece in after if piece.strip()][:1]
        ends = [piece for piece in closing if self._is_mark(piece) and piece not in self._stops]
        if begin and turn:  # thought and answer are messages
            ends.append(end)
        return ThoughtMarks(start, end, tuple(filter(None, (turn, begin))), tuple(dict.fromkeys(ends)))

    def _is_mark(self, piece: str) -> bool:
        return self.marks.fullmatch(piece) is not None

    def _from_mark(self, pieces: Sequence[str]) -> str:
        """Return the text from the first mark on, without white space around it."""
        place = next((number for number, piece in enumerate(pieces) if self._is_mark(piece)), len(pieces))
        return "".join(pieces[place:]).strip()

    def _pieces(self, text: str | None) -> list[str]:
        return re.split(f"({THOUGHT}|{SECOND}|{self.marks.pattern})", text or "")


def _common(some: Sequence[str], others: Sequence[str]) -> int:
    """Return the number of leading pieces that are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(some), len(others)))


def _after(pieces: Sequence[str], end: str) -> Sequence[str]:
    """Return the pieces after the mark that ends a thought; all of them if there is none."""
    return pieces[pieces.index(end) + 1 :] if end in pieces else pieces


def _by_name(template: str, marks: re.Pattern[str], added: Collection[str]) -> tuple[str, str] | None:
    """Return a pair of marks whose names speak of thoughts. The template names at least one of them.

    The other one may be an added token of the vocabulary, or have the same name without the slash.
    """
    named = [text for text in dict.fromkeys(marks.findall(template)) if _SPEAKS_OF_THOUGHT.search(text)]
    for text in sorted(named, key=lambda text: not _stem(text)[1]):
        if pair := _pair(text, [*named, *added]):
            return pair
    return None


def _answer_tags(template: str, marks: re.Pattern[str]) -> tuple[str, str] | None:
    """Return a pair of marks in a template that are named after the answer."""
    named = [text for text in dict.fromkeys(marks.findall(template)) if _stem(text)[0] in _ANSWERS]
    return next((pair for text in named if (pair := _pair(text, named))), None)


def _pair(text: str, others: Sequence[str]) -> tuple[str, str] | None:
    """Return a mark with the one that belongs to it, the beginning first."""
    stem, is_end = _stem(text)
    other = next((one for one in others if _stem(one) == (stem, not is_end)), None)
    if other is None:
        other = text.replace("/", "", 1) if "/" in text else None
    return None if other is None else (other, text) if is_end else (text, other)


def _stem(mark: str) -> tuple[tuple[str, ...], bool]:
    """Return the words of a mark but those that say whether it begins or ends something, and whether it is an end."""
    words = re.findall(r"[^\W_]+", mark.lower())
    stem = tuple(word for word in words if word not in _BEGIN_WORDS | _END_WORDS | {"of"})
    return stem, "/" in mark or not _END_WORDS.isdisjoint(words)


def _next_to_field(template: str, special: Sequence[str], shown: _Shown) -> tuple[str, str] | None:
    """Return the special tokens before and after a thought's field in a template, or the two after it."""
    used = {*shown.opening, *shown.answer}
    own = [re.escape(word) for word in special if word not in used]
    for field in _FIELD.finditer(template) if own else ():
        before = re.findall("|".join(own), template[max(field.start() - _NEAR, 0) : field.start()])[-1:]
        after = re.findall("|".join(own), template[field.end() : field.end() + _NEAR])
        pair = [*before, *after][:2]
        if len(pair) == 2 and pair[0] != pair[1]:
            return pair[0], pair[1]
    return None
