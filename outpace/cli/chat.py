"""`outpace chat`: a conversation in the terminal, or from a pipe."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import display, process
from outpace.cli.flags import flag, flags
from outpace.cli.options import ModelFlags, System
from outpace.cli.sampling_options import MaxTokens, SamplingFlags
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

    from outpace.api.llm import LLM, Result
    from outpace.cli.remote import RemoteModel

PROMPT, CONTINUED = "> ", "  "
SAMPLE_TOKENS = 16  # of plain decoding, from which its speed is estimated
MIN_SAMPLE_TOKENS = 4  # with fewer there is no estimate
ANSWER_SHARE = 4  # the context keeps space for max_tokens, or for this part of it if that is less
COMMANDS = {
    "/help": "list the commands; Alt-Enter starts a new line of the same question",
    "/reset": "forget the conversation, but not the system message",
    "/quit": "end the conversation, as /exit and Ctrl-D do",
}
ENDS = {"length": "cut at the token limit", "abort": "stopped"}
HINT = "/help lists the commands, /quit or Ctrl-D ends"


@dataclass(frozen=True)
class ChatFlags(SamplingFlags):
    """Sampling flags with longer answers."""

    max_tokens: MaxTokens = 1024


@flags
def chat(
    ctx: typer.Context,
    model: ModelFlags,
    sampling: ChatFlags,
    system: System = None,
    color: Annotated[bool, flag("Show accepted draft tokens in colour.", None, "--color")] = False,
    url: Annotated[
        str | None, flag("Talk to a server with the OpenAI API, such as outpace serve; --target names its model.")
    ] = None,
    api_key: Annotated[str | None, flag("API key for --url.", envvar="OUTPACE_API_KEY")] = None,
) -> None:
    """Talk to the model.

    Ctrl-C stops an answer. /help lists the commands, /reset forgets the conversation, /quit or Ctrl-D ends it.

    If standard input is a pipe, each line is a question.
    """
    sampling.check()
    if url is not None:
        from outpace.cli.remote import RemoteModel

        _check_remote_flags(model, ctx.obj)
        remote = RemoteModel(url, api_key, model.target)
        with process.at_safe_points():
            _talk(RemoteChat(remote, sampling, system), remote.model)
        return
    with process.at_safe_points(), model.open(ctx.obj) as llm:
        if not llm.target.tokenizer.chat_template:
            raise UserError(f"{llm.target.name} has no chat template: outpace generate --raw continues a text by it")
        _talk(LocalChat(llm, sampling, system, color), f"{llm.target.name} by {llm.method}")


def _check_remote_flags(model: ModelFlags, extra: Collection[str]) -> None:
    """Raise UserError for flags about models and drafting: a server has its own."""
    defaults = ModelFlags(target=model.target)
    given = [
        field.name
        for one, other in ((model, defaults), (model.options, defaults.options))
        for field in fields(one)
        if field.name != "options" and getattr(one, field.name) != getattr(other, field.name)
    ]
    for name in (*given, *extra):
        raise UserError(f"--url talks to a server with its own models, leave out --{name.replace('_', '-')}")


def _talk(session: ChatSession, name: str) -> None:
    """Answer lines until the end of the input."""
    with process.standard_input() as stream:
        is_typed = stream.isatty()
    read = _typed_lines() if is_typed else _piped_line
    if is_typed:
        display.say(f"{name}. Ctrl-C stops an answer; {HINT}.")
    while (line := _next_line(read, is_typed)) is not None:
        if not session.take(line.rstrip("\n")):
            break


def _next_line(read: Callable[[], str | None], is_typed: bool) -> str | None:
    """Return the next line; None at the end. Ctrl-C clears a typed line, and ends a command whose input is a pipe."""
    try:
        return read()
    except KeyboardInterrupt:
        if not is_typed:
            raise
        display.say(HINT)
        return ""


def _piped_line() -> str | None:
    with process.standard_input() as stream, process.at_any_point():
        return stream.readline() or None


def _typed_lines() -> Callable[[], str | None]:
    """Return a function that reads a line with editing and history. It raises KeyboardInterrupt for Ctrl-C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _insert_newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(always_prefer_tty=True)  # stdout may be a file
    session: PromptSession[str] = PromptSession(
        PROMPT, key_bindings=keys, prompt_continuation=CONTINUED, output=output, complete_while_typing=False
    )

    def read() -> str | None:
        try:
            with process.at_any_point():
                return session.prompt()
        except EOFError:
            return None

    return read


class ChatSession:
    """The messages so far, and the commands."""

    def __init__(self, system: str | None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def take(self, line: str) -> bool:
        """Answer a line or run its command; return False if it ends the conversation."""
        command = line.partition(" ")[0].rstrip()
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._messages = list(self._opening)
            display.say("the conversation is forgotten")
        elif command == "/help":
            display.say("\n".join(f"{name:8}{what}" for name, what in COMMANDS.items()))
        elif command.startswith("/") and command[1:].isalpha():
            display.say(f"unknown command {command}, the commands are {', '.join(COMMANDS)}", "red")
        elif line.strip():
            self._answer([*self._messages, {"role": "user", "content": line.strip()}])
        return True

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Show the answer, and keep the messages with it."""
        raise NotImplementedError

    def _keep(self, messages: list[dict[str, str]], answer: str) -> None:
        self._messages = [*messages, {"role": "assistant", "content": answer}]


class RemoteChat(ChatSession):
    """A conversation with a model on a server."""

    def __init__(self, remote: RemoteModel, sampling: SamplingFlags, system: str | None) -> None:
        super().__init__(system)
        self._remote = remote
        given, defaults = sampling.options(), ChatFlags().options()
        always = ("max_tokens", "temperature", "seed")
        self._fields = {name: value for name, value in given.items() if name in always or value != defaults[name]}

    def _answer(self, messages: list[dict[str, str]]) -> None:
        printer = display.TextPrinter()
        try:
            answer = self._remote.answer(messages, self._fields, printer.write)
        except UserError as error:
            display.say(f"error: {error}", "red")
            return
        finally:
            printer.end()
        self._keep(messages, answer.text)
        rate = answer.timings.get("predicted_per_second")
        parts = [f"{rate:.1f} tokens/s"] if isinstance(rate, (int, float)) else []
        parts += [ENDS[answer.finish_reason]] if answer.finish_reason in ENDS else []
        if parts:
            display.say(f"{self._remote.model}: {', '.join(parts)}")


class LocalChat(ChatSession):
    """A conversation with a model in this process."""

    def __init__(self, llm: LLM, sampling: SamplingFlags, system: str | None, color: bool) -> None:
        super().__init__(system)
        self._llm, self._sampling, self._color = llm, sampling, color
        self._plain_rate: float | None = None
        self._plain_length = 0  # characters of the conversation when plain decoding was timed

    def _answer(self, messages: list[dict[str, str]]) -> None:
        printer = display.TextPrinter(self._color)
        try:
            messages = self._fit(messages)
            stream = self._llm.stream(messages, **self._sampling.options())
            display.write_answer(stream, printer.show)
            result = stream.finish()
        except UserError as error:
            display.say(f"error: {error}", "red")
            return
        finally:
            printer.end()
        self._keep(messages, result.text)
        display.say(display.summary(result, self._speedup(result, messages)))

    def _fit(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Remove the oldest questions and answers until the context has space for a good answer."""
        first, dropped = len(self._opening), 0
        context = self._llm.target.model.max_positions
        reserved = min(self._sampling.max_tokens, context // ANSWER_SHARE)
        while len(messages) > first + 1 and len(self._llm.tokenizer.chat(messages)) + reserved > context:
            messages, dropped = messages[:first] + messages[first + 2 :], dropped + 1
        if dropped:
            oldest = "the oldest question and its answer"
            what = oldest if dropped == 1 else f"the {dropped} oldest questions and answers"
            display.say(
                f"the model's context of {context} tokens is full: {what} were left out; /reset forgets all", "yellow"
            )
        return messages

    def _speedup(self, result: Result, messages: list[dict[str, str]]) -> str:
        """Estimate the speedup over plain decoding, which is timed separately on a few tokens of the same prompt."""
        length = sum(len(message["content"]) for message in messages)
        if self._llm.method == "autoregressive" or len(result.tokens) < MIN_SAMPLE_TOKENS:
            return ""
        if self._plain_rate is None or length > 2 * self._plain_length:
            self._plain_rate, self._plain_length = self._measure_plain(messages), length
        rate = self._plain_rate
        return f"about {result.tokens_per_second / rate:.2f}x plain (estimate)" if rate else ""

    def _measure_plain(self, messages: list[dict[str, str]]) -> float | None:
        """Return plain decoding's tokens/s; None after Ctrl-C or with too few tokens."""
        options = self._sampling.options()
        few = {name: min(SAMPLE_TOKENS, options[name]) for name in ("max_tokens", "min_tokens")}
        sample = self._llm.stream(messages, plain=True, **options | few)
        with process.stopping(sample.abort):
            result = sample.finish()
        return None if process.take() or len(result.tokens) < MIN_SAMPLE_TOKENS else result.tokens_per_second
