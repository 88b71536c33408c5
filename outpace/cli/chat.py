"""`outpace chat`: a conversation in the terminal, or from a pipe."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import display, process
from outpace.cli.options import ModelFlags, System, flags
from outpace.cli.sampling_options import MaxTokens, SamplingFlags
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

    from outpace.api.llm import LLM, Result
    from outpace.cli.remote import Remote


PROMPT, CONTINUED = "> ", "  "


def open_lines() -> tuple[bool, Callable[[], str | None]]:
    """Whether somebody types, and what gives the next line, or None after the last. UserError without an input."""
    with process.reading() as stream:
        is_typed = stream.isatty()
    return is_typed, _typed() if is_typed else _piped


def _piped() -> str | None:
    with process.reading() as stream, process.at_any_point():
        return stream.readline() or None


def _typed() -> Callable[[], str | None]:
    """KeyboardInterrupt for Ctrl-C at the prompt."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _begin_a_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(always_prefer_tty=True)  # the answers alone may go to a file
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


SAMPLE = 16  # plain tokens that the estimate of plain decoding's rate is taken from
FEWEST = 4  # with fewer there is no estimate
ROOM = 4  # an answer may count on this part of the context, or on max_tokens if that is less
COMMANDS = {
    "/help": "list the commands; Alt-Enter begins a new line of the same question",
    "/reset": "forget the conversation, but not the system message",
    "/quit": "end the conversation, as /exit and Ctrl-D do",
}
ENDS = {"length": "cut at the most tokens", "abort": "stopped"}
HINT = "/help lists the commands, /quit or Ctrl-D ends"


@dataclass(frozen=True)
class ChatFlags(SamplingFlags):
    """As for one answer, with room for a longer one."""

    max_tokens: MaxTokens = 1024


@flags
def chat(
    ctx: typer.Context,
    loading: ModelFlags,
    writing: ChatFlags,
    system: System = None,
    color: Annotated[bool, typer.Option("--color", help="Show accepted draft tokens in colour.")] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to a server with the OpenAI API, such as outpace serve; --target names its model."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTPACE_API_KEY", help="API key for --url.")] = None,
) -> None:
    """Talk to the model.

    Ctrl-C stops an answer. /help lists the commands, /reset forgets the conversation, /quit or Ctrl-D ends it.

    If standard input is a pipe, each line is a question.
    """
    writing.check()
    if url is not None:
        from outpace.cli.remote import Remote

        _check_afar(loading, ctx.obj)
        _chat_afar(Remote(url, api_key, loading.target), writing, system)
        return
    with process.at_safe_points(), loading.open(ctx.obj) as llm:
        if not llm.target.tokenizer.chat_template:
            raise UserError(f"{llm.target.name} has no chat template: outpace generate --raw continues a text by it")
        _talk(LocalChat(llm, writing, system, color), f"{llm.target.name} by {llm.method}")


def _check_afar(loading: ModelFlags, extra: Collection[str]) -> None:
    """UserError for a flag that says how to load models or how to draft: the server has its own."""
    usual = ModelFlags(target=loading.target)
    pairs = ((loading, usual), (loading.options, usual.options))
    given = [
        field.name
        for one, other in pairs
        for field in fields(one)
        if field.name != "options" and getattr(one, field.name) != getattr(other, field.name)
    ]
    for name in (*given, *extra):
        raise UserError(f"--url talks to a server with its own models, leave out --{name.replace('_', '-')}")


def _chat_afar(remote: Remote, writing: SamplingFlags, system: str | None) -> None:
    with process.at_safe_points():
        _talk(RemoteConversation(remote, writing, system), remote.model)


def _talk(talk: Talk, name: str) -> None:
    """Takes lines to the end."""
    is_typed, read = open_lines()
    if is_typed:
        display.say(f"{name}. Ctrl-C stops an answer; {HINT}.")
    while (line := _next(read, is_typed)) is not None:
        if not talk.take(line.rstrip("\n")):
            break


def _next(read: Callable[[], str | None], is_typed: bool) -> str | None:
    """The next line; None at the end. Ctrl-C at the prompt clears the line, while waiting for a pipe it ends all."""
    try:
        return read()
    except KeyboardInterrupt:
        if not is_typed:
            raise
        display.say(HINT)
        return ""


class Talk:
    """The turns so far, and the commands."""

    def __init__(self, system: str | None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._opening)

    def take(self, line: str) -> bool:
        """Answers one line, or obeys it; False when the conversation is over."""
        command = line.partition(" ")[0].rstrip()
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._turns = list(self._opening)
            display.say("the conversation is forgotten")
        elif command == "/help":
            display.say("\n".join(f"{name:8}{what}" for name, what in COMMANDS.items()))
        elif command.startswith("/") and command[1:].isalpha():
            display.say(f"unknown command {command}, the commands are {', '.join(COMMANDS)}", "red")
        elif line.strip():
            self._answer(line.strip())
        return True

    def _answer(self, line: str) -> None:
        """Shows the answer to a line; both become turns."""
        raise NotImplementedError


class RemoteConversation(Talk):
    """With a model on a server."""

    def __init__(self, remote: Remote, writing: SamplingFlags, system: str | None) -> None:
        super().__init__(system)
        self._remote = remote
        given, usual = writing.options(), ChatFlags().options()
        always = ("max_tokens", "temperature", "seed")
        self._fields = {name: value for name, value in given.items() if name in always or value != usual[name]}

    def _answer(self, line: str) -> None:
        page = display.Page()
        asked = [*self._turns, {"role": "user", "content": line}]
        try:
            told = self._remote.answer(asked, self._fields, lambda text: page.write(text))
        except UserError as error:
            display.say(f"error: {error}", "red")
            return
        finally:
            page.end()
        self._turns = [*asked, {"role": "assistant", "content": told.text}]
        rate = told.timings.get("predicted_per_second")
        parts = [f"{rate:.1f} tokens/s"] if isinstance(rate, (int, float)) else []
        parts += [ENDS[told.finish_reason]] if told.finish_reason in ENDS else []
        if parts:
            display.say(f"{self._remote.model}: {', '.join(parts)}")


class LocalChat(Talk):
    """With a model in this process. What it is asked goes back through its chat template each time."""

    def __init__(self, llm: LLM, writing: SamplingFlags, system: str | None, color: bool) -> None:
        super().__init__(system)
        self._llm, self._writing, self._color = llm, writing, color
        self._plain: float | None = None
        self._plain_at = 0  # length of the conversation, in characters, when plain decoding was timed

    def _answer(self, line: str) -> None:
        page = display.Page(self._color)
        try:
            asked = self._fitting([*self._turns, {"role": "user", "content": line}])
            stream = self._llm.stream(asked, **self._writing.options())
            display.write_answer(stream, page.show)
            result = stream.finish()
        except UserError as error:
            display.say(f"error: {error}", "red")
            return
        finally:
            page.end()
        self._turns = [*asked, {"role": "assistant", "content": result.text}]
        display.say(display.summary(result, self._speedup(result, asked)))

    def _fitting(self, asked: list[dict[str, str]]) -> list[dict[str, str]]:
        """Without the oldest questions and answers where the context could not hold them and a good answer."""
        first, dropped = len(self._opening), 0
        context = self._llm.target.model.max_positions
        room = min(self._writing.max_tokens, context // ROOM)
        while len(asked) > first + 1 and len(self._llm.tokenizer.chat(asked)) + room > context:
            asked, dropped = asked[:first] + asked[first + 2 :], dropped + 1
        if dropped:
            what = (
                "the oldest question and its answer" if dropped == 1 else f"the {dropped} oldest questions and answers"
            )
            display.say(
                f"the model's context of {context} tokens is full: {what} were left out; /reset forgets all", "yellow"
            )
        return asked

    def _speedup(self, result: Result, asked: list[dict[str, str]]) -> str:
        """How much faster this answer was than plain decoding of the same prompt's first tokens, timed apart."""
        length = sum(len(turn["content"]) for turn in asked)
        if self._llm.method == "autoregressive" or len(result.tokens) < FEWEST:
            return ""
        if self._plain is None or length > 2 * self._plain_at:
            self._plain, self._plain_at = self._plain_rate(asked), length
        return f"about {result.tokens_per_second / self._plain:.2f}x plain (estimate)" if self._plain else ""

    def _plain_rate(self, asked: list[dict[str, str]]) -> float | None:
        """Tokens a second; None where there were too few, or where Ctrl-C ended it."""
        options = self._writing.options()
        few = {name: min(SAMPLE, options[name]) for name in ("max_tokens", "min_tokens")}
        sample = self._llm.stream(asked, plain=True, **options | few)
        with process.stopping(sample.abort):
            result = sample.finish()
        return None if process.taken() or len(result.tokens) < FEWEST else result.tokens_per_second
