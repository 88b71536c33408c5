"""`outpace chat`: a conversation in the terminal, or from a pipe."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import display
from outpace.cli.options import Loading, System, flags
from outpace.cli.writing import MaxTokens, Writing
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.api.llm import LLM, Result

SAMPLE = 16  # plain tokens that the estimate of plain decoding's rate is taken from
FEWEST = 4  # with fewer there is no estimate


@dataclass(frozen=True)
class ChatWriting(Writing):
    """As for one answer, with room for a longer one."""

    max_tokens: MaxTokens = 1024


@flags
def chat(
    ctx: typer.Context,
    loading: Loading,
    writing: ChatWriting,
    system: System = None,
    color: Annotated[bool, typer.Option("--color", help="Show accepted draft tokens in colour.")] = False,
) -> None:
    """Talk to the model.

    Ctrl-C stops an answer. /reset forgets the conversation, /exit or Ctrl-D ends it.
    """
    writing.check()
    with loading.open(ctx.obj) as llm:
        talk = Conversation(llm, writing, system, color)
        if sys.stdin.isatty():
            display.say(f"{llm.target.name} by {llm.method}. Ctrl-C stops an answer; /reset, /exit.")
        while (line := _read()) is not None:
            if not talk.take(line.strip()):
                break


class Conversation:
    """The turns so far. What the model is asked goes back through its chat template each time."""

    def __init__(self, llm: LLM, writing: Writing, system: str | None, color: bool) -> None:
        self._llm, self._writing, self._color = llm, writing, color
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._opening)
        self._plain: float | None = None
        self._plain_at = 0  # length of the conversation, in characters, when plain decoding was timed

    def take(self, line: str) -> bool:
        """Answers one line, or obeys it; False when the conversation is over."""
        if line == "/exit":
            return False
        if line == "/reset":
            self._turns = list(self._opening)
            display.say("the conversation is forgotten")
        elif line.startswith("/") and line[1:].isalpha():
            display.say(f"unknown command {line}, there are /reset and /exit", "red")
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked = [*self._turns, {"role": "user", "content": line}]
        page = display.Page(self._color)
        try:
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

    def _speedup(self, result: Result, asked: list[dict[str, str]]) -> str:
        """How much faster this answer was than plain decoding of the same prompt's first tokens, timed apart."""
        length = sum(len(turn["content"]) for turn in asked)
        if self._llm.method == "autoregressive" or len(result.tokens) < FEWEST:
            return ""
        if self._plain is None or length > 2 * self._plain_at:
            with contextlib.suppress(KeyboardInterrupt):
                self._plain, self._plain_at = self._plain_rate(asked), length
        return f"about {result.tokens_per_second / self._plain:.2f}x plain (estimate)" if self._plain else ""

    def _plain_rate(self, asked: list[dict[str, str]]) -> float | None:
        options = self._writing.options() | {"max_tokens": min(SAMPLE, self._writing.max_tokens)}
        sample = self._llm.stream(asked, plain=True, **options).finish()
        return sample.tokens_per_second if len(sample.tokens) >= FEWEST else None


def _read() -> str | None:
    """The next line; None at the end. Ctrl-C at the prompt clears the line."""
    try:
        if not sys.stdin.isatty():
            return sys.stdin.readline() or None
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and editing)
        return input("> ")
    except KeyboardInterrupt:
        display.say("\n/exit or Ctrl-D ends")
        return ""
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in {error.encoding} (byte {error.start})") from error
