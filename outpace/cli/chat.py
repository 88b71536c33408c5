"""`outpace chat`: a conversation in the terminal, or from a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outpace.cli import display, process
from outpace.cli.flags import check_file, flag, flags
from outpace.cli.options import MAX_TOKENS, SYSTEM, ModelFlags, SamplingFlags, open_any
from outpace.core.errors import UserError, unknown
from outpace.models.files.find import pair_name
from outpace.models.files.reading import write_json

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

    from outpace.api.llm import LLM
    from outpace.api.text import Piece
    from outpace.cluster.remote_target import RemoteTarget

PROMPT, CONTINUED = "> ", "  "
ANSWER_SHARE = 4  # the context keeps space for max_tokens, or for this part of it if that is less
COMMANDS = {
    "/help": 'list the commands; Alt-Enter starts a new line of the same question, """ begins and ends several',
    "/set": "/set temperature 0.7 changes a sampling option, /set alone shows them",
    "/system": "/system TEXT sets the system message, /system alone removes it",
    "/save": "/save FILE writes the conversation as JSON",
    "/reset": "forget the conversation, but not the system message",
    "/quit": "end the conversation, as /exit and Ctrl-D do",
}
QUOTES = '"""'
LOOPS, MAX_LOOP = 8, 400  # repetitions that end an answer, and the largest number of repeated characters
HINT = "/help lists the commands, /quit or Ctrl-D ends"


@dataclass(frozen=True)
class ChatFlags(SamplingFlags):
    """Sampling flags with longer answers."""

    max_tokens: int = flag(1024, MAX_TOKENS)


@flags
def chat(
    ctx: typer.Context,
    model: ModelFlags,
    sampling: ChatFlags,
    system: str | None = SYSTEM,
    color: bool = flag(False, "Show accepted draft tokens in colour."),
) -> None:
    """Talk to the model.

    Ctrl-C stops an answer. /help lists the commands, /reset forgets the conversation, /quit or Ctrl-D ends it.

    If standard input is a pipe, each line is a question.
    """
    from outpace.models.load import without_template

    sampling.check()
    with process.at_safe_points(), open_any(model, ctx.obj, is_chat=True) as llm:
        if not llm.target.tokenizer.chat_template:
            raise UserError(without_template(llm.target.name))
        draft = getattr(llm, "draft", None)
        pair = pair_name(llm.target.name, draft and draft.name)
        session = ChatSession(llm, sampling, system, color, sampling.recommended(llm))
        _talk(session, f"{pair} by {llm.method}")


def _talk(session: ChatSession, name: str) -> None:
    """Answer lines until the end of the input. Ctrl-C clears a typed line, and ends a command whose input is a pipe."""
    with process.standard_input() as stream:
        is_typed = stream.isatty()
    if is_typed:
        display.say(f"{name}. Ctrl-C stops an answer; {HINT}.")
    read = _typed_lines() if is_typed else stream.readline
    while True:
        try:
            with process.standard_input(), process.at_any_point():
                line = read()
        except KeyboardInterrupt:
            if not is_typed:
                raise
            display.say(HINT)
            continue
        if not line or not session.take(line.rstrip("\n")):
            return


def _typed_lines() -> Callable[[], str]:
    """Return a function that reads a line with editing and history, "" at the end. It raises KeyboardInterrupt for
    Ctrl-C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _insert_newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def is_open() -> bool:
        text = get_app().current_buffer.text.strip()
        return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))

    def words() -> list[str]:
        is_set = get_app().current_buffer.text.startswith("/set ")
        return [f"/set {name}" for name in _numbers()] if is_set else [*COMMANDS]

    output = create_output(always_prefer_tty=True)  # stdout may be a file
    session: PromptSession[str] = PromptSession(
        PROMPT,
        key_bindings=keys,
        prompt_continuation=CONTINUED,
        output=output,
        complete_while_typing=False,
        completer=WordCompleter(words, sentence=True),
        multiline=Condition(is_open),
    )

    def read() -> str:
        with suppress(EOFError):
            return session.prompt() + "\n"
        return ""

    return read


def is_loop(text: str) -> bool:
    """Return whether a text ends with `LOOPS` copies of the same words."""
    period = len(text) - text.rfind(text[-20:], 0, len(text) - 1) - 20 if len(text) > 20 else 0
    return 10 <= period <= MAX_LOOP and text.endswith(text[-period:] * LOOPS)


def _numbers() -> dict[str, str]:
    """Return the sampling options that are numbers, and whether each is an int or a float."""
    kinds = {one.name: str(one.type).removesuffix(" | None") for one in fields(ChatFlags)}
    return {name: kind for name, kind in kinds.items() if kind in ("int", "float")}


def _changed(sampling: SamplingFlags, words: str) -> SamplingFlags:
    """Return the options with one changed as in "temperature 0.7", or show them; UserError for a wrong one."""
    numbers = _numbers()
    name, _, text = words.replace("=", " ").partition(" ")
    if not words:
        values = {name: getattr(sampling, name) for name in numbers}
        display.say(", ".join(f"{name} {'default' if value is None else value}" for name, value in values.items()))
        return sampling
    name = name.replace("-", "_")
    if name not in numbers:
        raise unknown("sampling option", name, numbers)
    try:
        value: Any = float(text) if numbers[name] == "float" else int(text)
    except ValueError:
        kind = "a number" if numbers[name] == "float" else "a whole number"
        raise UserError(f"{name} is {text!r}, it must be {kind}") from None
    changed = replace(sampling, **{name: value})
    changed.check()
    display.say(f"{name} is {value}")
    return changed


class ChatSession:
    """A conversation: its messages so far, and its commands."""

    def __init__(
        self,
        llm: LLM | RemoteTarget,
        sampling: SamplingFlags,
        system: str | None,
        color: bool = False,
        recommended: Mapping[str, Any] = {},
    ) -> None:
        self._llm, self._sampling, self._recommended = llm, sampling, recommended
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages, self._color = list(self._opening), color

    def take(self, line: str) -> bool:
        """Answer a line or run its command; return False if it ends the conversation."""
        command, _, rest = line.rstrip().partition(" ")
        if command in ("/quit", "/exit"):
            return False
        try:
            self._obey_or_answer(command, rest.strip(), line)
        except UserError as error:
            display.say(f"error: {error}", "red")
        return True

    def _obey_or_answer(self, command: str, rest: str, line: str) -> None:
        if command == "/reset":
            self._messages = list(self._opening)
            display.say("the conversation is forgotten")
        elif command == "/help":
            display.say("\n".join(f"{name:9}{what}" for name, what in COMMANDS.items()))
        elif command == "/system":
            count = len(self._opening)
            self._opening = [{"role": "system", "content": rest}] if rest else []
            self._messages[:count] = self._opening
            display.say(f"the system message is {rest!r}" if rest else "there is no system message")
        elif command == "/save":
            if not rest:
                raise UserError("/save needs the name of a file, as in /save chat.json")
            check_file("/save", file := Path(rest).expanduser())
            write_json(file, {"messages": self._messages})
            display.say(f"{len(self._messages)} messages are in {rest}")
        elif command == "/set":
            self._sampling = _changed(self._sampling, rest)
        elif command.startswith("/") and command[1:].isalpha():
            display.say(f"unknown command {command}, the commands are {', '.join(COMMANDS)}", "red")
        elif question := line.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip():
            self._answer([*self._messages, {"role": "user", "content": question}])

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Show the answer and a summary of it, and keep the messages with it."""
        printer = display.TextPrinter(self._color)
        try:
            answer, summary = self._ask(messages, printer)
        finally:
            printer.end()
        self._messages = [*messages, {"role": "assistant", **answer}]
        if summary:
            display.say(summary)

    def _ask(self, messages: list[dict[str, str]], printer: display.TextPrinter) -> tuple[dict[str, str], str]:
        """Write the answer as it comes; return the fields of its message, and its summary. Messages that do not fit are
        removed in place."""
        self._remove_oldest(messages)
        stream = self._llm.stream(messages, **self._sampling.options(self._recommended))
        written, loops = "", False

        def show(piece: Piece) -> None:
            nonlocal written, loops
            printer.show(piece)
            written = (written + piece.text)[-LOOPS * MAX_LOOP :]
            if not loops and printer.is_terminal and is_loop(written):
                loops = True
                stream.abort()

        display.write_answer(stream, show)
        result = stream.finish()
        notice = "; the answer repeated itself: /set temperature 0.7 varies it" if loops else ""
        thought = {"reasoning_content": result.reasoning} if result.reasoning else {}
        return {"content": result.text, **thought}, display.summary(result) + notice

    def _remove_oldest(self, messages: list[dict[str, str]]) -> None:
        """Remove the oldest questions and answers until the context has space for a good answer."""
        first, before = len(self._opening), len(messages)
        context = self._llm.target.model.max_positions
        reserved = min(self._sampling.max_tokens, context // ANSWER_SHARE)
        while len(messages) > first + 1 and len(self._llm.tokenizer.chat(messages)) + reserved > context:
            del messages[first : first + 2]
        if dropped := (before - len(messages)) // 2:
            oldest = "the oldest question and its answer"
            what = oldest if dropped == 1 else f"the {dropped} oldest questions and answers"
            display.say(f"the context of {context} tokens is full: {what} were left out; /reset forgets all", "yellow")
