"""`outpace generate`: one answer to one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import display
from outpace.cli.options import TEXT, Json, Loading, System, Writing, flags
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.library import Prompt, Result

INTERRUPTED = 130  # what a shell expects after Ctrl-C


@flags
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer; - reads it from standard input.")],
    loading: Loading,
    writing: Writing,
    system: System = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, without the chat template.", rich_help_panel=TEXT),
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt.

    The options of methods and drafters (see outpace methods) are flags too: --draft-length 6, --copies 8.
    """
    writing.check()
    asked = _asked(prompt, system, raw)
    page = display.Page()
    with loading.open(ctx.obj, quiet=as_json) as llm:
        stream = llm.stream(asked, **asdict(writing))
        whole = display.write_answer(stream, page.show if not as_json else lambda piece: None)
        result = stream.result
    page.end()
    if as_json:
        display.print_json(_record(result))
    else:
        display.say(display.summary(result, f"first token {result.time_to_first_token:.2f} s"))
    if not whole:
        raise typer.Exit(INTERRUPTED)


def _asked(prompt: str, system: str | None, raw: bool) -> Prompt:
    if prompt == "-":
        prompt = _from_stdin()
    if raw:
        if system is not None:
            raise UserError("--system needs the chat template, leave out --raw or --system")
        return prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def _from_stdin() -> str:
    """All of standard input; the newline that ends its last line is the file's, not the prompt's."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in {error.encoding} (byte {error.start})") from error


def _record(result: Result) -> dict[str, object]:
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "seed": result.seed,
        **display.figures(result),
    }
