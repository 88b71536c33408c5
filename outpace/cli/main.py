"""The command `outpace`: its commands, and what errors look like. Everything heavy is imported by what needs it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from outpace.cli import display
from outpace.cli.bench import bench
from outpace.cli.chat import chat
from outpace.cli.demo import demo
from outpace.cli.distill import distill
from outpace.cli.doctor import doctor
from outpace.cli.extra import ExtraFlags
from outpace.cli.generate import INTERRUPTED, generate
from outpace.cli.methods import methods
from outpace.cli.simulate import simulate
from outpace.cli.tune import tune
from outpace.core.errors import UserError

app = typer.Typer(
    name="outpace",
    help="Language models that write faster without changing what they write.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(cls=ExtraFlags)(generate)
app.command(cls=ExtraFlags)(chat)
app.command(cls=ExtraFlags)(demo)
app.command()(bench)
app.command()(distill)
app.command()(tune)
app.command()(simulate)
app.command()(methods)
app.command()(doctor)


@app.callback(invoke_without_command=True)
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
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    try:
        code = app(arguments, prog_name="outpace", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        display.say(f"error: {error}", "red")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return 1
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    """Typer's usage errors are known by their two fields (it brings its own click since 0.20); the rest are bugs."""
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if message is None or code is None:
        traceback.print_exception(error)
        return 1
    text = message().rstrip(".").replace(". Did", "; did")
    display.say(f"error: {text[:1].lower()}{text[1:]}", "red")
    return int(code)


if __name__ == "__main__":
    main()
