"""The command `outpace`: its commands, and what errors look like. Everything heavy is imported by what needs it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from outpace.cli import display, signals, standard_streams
from outpace.cli.bench import bench
from outpace.cli.chat import chat
from outpace.cli.demo import demo
from outpace.cli.distill import distill
from outpace.cli.doctor import doctor
from outpace.cli.extra import ExtraFlags
from outpace.cli.generate import generate
from outpace.cli.methods import methods
from outpace.cli.serve import serve
from outpace.cli.simulate import simulate
from outpace.cli.theory import theory
from outpace.cli.tune import tune
from outpace.core.errors import UserError

app = typer.Typer(
    name="outpace",
    help="Language models that write faster without changing what they write.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
anywhere = signals.at_any_point()  # what these begin, an interrupt may end wherever it is
app.command(cls=ExtraFlags)(generate)
app.command(cls=ExtraFlags)(chat)
app.command(cls=ExtraFlags)(serve)
app.command(cls=ExtraFlags)(anywhere(demo))
app.command()(anywhere(bench))
app.command()(anywhere(distill))
app.command()(anywhere(tune))
app.command()(anywhere(simulate))
app.command()(methods)
app.command()(theory)
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
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    try:
        standard_streams.prepare()
        display.show_warnings_plainly()
        code = app(arguments, prog_name="outpace", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        if isinstance(error, standard_streams.OutputError):
            standard_streams.silence()
        display.say(f"error: {error}", "red")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return signals.INTERRUPTED
    except BrokenPipeError:
        standard_streams.silence()
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
    if text.startswith("No such command") and "did you mean" not in text:
        names = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)
        text += f", there are {', '.join(names)}"
    display.say(f"error: {text[:1].lower()}{text[1:]}", "red")
    return int(code)


if __name__ == "__main__":
    main()
