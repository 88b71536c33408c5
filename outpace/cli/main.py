"""The command `outpace`: its commands, and what errors look like. Everything heavy is imported by what needs it."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from outpace.cli import display, process
from outpace.cli.passthrough_options import ExtraFlags
from outpace.core.errors import UserError

WITH_EXTRA = ("generate", "chat", "serve", "demo")  # flags of methods and drafters, which they do not list
ANYWHERE = ("demo", "bench", "distill", "tune", "simulate")  # what these begin, an interrupt may end wherever it is
COMMANDS = ("generate", "chat", "serve", "demo", "bench", "distill", "tune", "simulate", "methods", "theory", "doctor")


def build(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The commands of these names, each the function of its name in the module of its name: no other is imported."""
    app = typer.Typer(
        name="outpace",
        help="Language models that write faster without changing what they write.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    anywhere = process.at_any_point()
    for name in names:
        function = getattr(import_module(f"outpace.cli.{name}"), name)
        own: dict[str, Any] = {"cls": ExtraFlags} if name in WITH_EXTRA else {}
        app.command(**own)(anywhere(function) if name in ANYWHERE else function)
    app.callback(invoke_without_command=True)(outpace)
    return app


def __getattr__(name: str) -> Any:
    """`app`: all commands, made when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = build()
    return globals()["app"]


def outpace(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Language models that write faster without changing what they write."""
    if version:
        from outpace import __version__

        typer.echo(f"outpace {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, 2 for bad input, 1 for a bug, 130 after Ctrl-C."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    try:
        process.prepare()
        display.show_warnings_plainly()
        asked = arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS
        code = build(asked)(arguments, prog_name="outpace", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        if isinstance(error, process.OutputError):
            process.silence()
        display.say(f"error: {error}", "red")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return process.INTERRUPTED
    except BrokenPipeError:
        process.silence()
        return 1
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    """Typer's usage errors are known by their two fields (it brings its own click since 0.20); the rest are bugs."""
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if message is None or code is None:
        traceback.print_exception(error)
        return 1
    text = _in_our_words(message().rstrip(".").replace(". Did", "; did"))
    if text.startswith("No such command") and "did you mean" not in text:
        text += f", there are {', '.join(sorted(COMMANDS))}"
    display.say(f"error: {text[:1].lower()}{text[1:]}", "red")
    return int(code)


def _in_our_words(text: str) -> str:
    """Typer's sentence, without the words that pydantic or click has in it for numbers, and with what helps."""
    if text == "Missing argument 'PROMPT'":
        return f"{text}; - reads it from standard input"
    text = re.sub(r"(Input should be a valid number\b|'.*' is not a valid float).*", "it must be a number", text)
    return re.sub(
        r"(Input should be a valid integer\b|'.*' is not a valid integer).*", "it must be a whole number", text
    )


if __name__ == "__main__":
    main()
