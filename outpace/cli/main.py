"""The program `outpace`: its commands, and how errors are shown."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from outpace.cli import display, process
from outpace.cli.flags import Command, PassthroughCommand, unknown_option
from outpace.core.errors import LostProcess, UserError

# Commands that take the options of methods and drafters.
WITH_PASSTHROUGH = ("generate", "chat", "serve", "draft-worker")
HELP = {"help_option_names": ["--help", "--help-all"]}
# Commands that Ctrl-C may end at any point.
INTERRUPTIBLE = ("demo", "bench", "distill", "judge", "tune", "simulate", "edge", "forecast")
COMMANDS = (
    *("generate", "chat", "serve", "draft-worker", "demo", "bench", "distill", "judge", "tune"),
    *("simulate", "edge", "forecast", "methods", "theory", "doctor"),
)
COMMAND = re.compile(r"outpace\.cli\.(?!main$|flags$)")  # modules of commands


def build(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the program with some commands. Each is the function of its name in the module of its name."""
    app = typer.Typer(
        name="outpace",
        help="Language models that write faster without changing what they write.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    interruptible = process.at_any_point()
    for name in names:
        module = name.replace("-", "_")
        function = getattr(import_module(f"outpace.cli.{module}"), module)
        kind = PassthroughCommand if name in WITH_PASSTHROUGH else Command
        app.command(cls=kind, context_settings=HELP)(interruptible(function) if name in INTERRUPTIBLE else function)
    app.callback(invoke_without_command=True)(outpace)
    return app


def __getattr__(name: str) -> Any:
    """Build `app`, the program with all commands, on first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = build()
    return globals()["app"]


def outpace(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False
) -> None:
    """Language models that write faster without changing what they write."""
    if version:
        from outpace import __version__

        typer.echo(f"outpace {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 2 for bad input, 1 for a bug, 130 after Ctrl-C."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    try:
        process.prepare_streams()
        display.show_warnings_plainly()
        names = arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS
        code = build(names)(arguments, prog_name="outpace", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        if isinstance(error, process.OutputError):
            process.silence_output()
        display.say(f"error: {error}", "red")
        return 1 if isinstance(error, LostProcess) else 2
    except (KeyboardInterrupt, typer.Abort):
        return process.INTERRUPTED
    except BrokenPipeError:
        process.silence_output()
        return 1
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Show a usage error of typer, which has these two attributes, as a sentence; report any other error as a bug.

    The class is not tested, since typer brings its own copy of click from 0.20 on.
    """
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if message is None or code is None:
        return _report_bug(error)
    text = message().rstrip(".").replace(". Did", "; did")
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is not None and option is not None and hasattr(error, "possibilities"):  # there is no such option
        text = str(unknown_option(option, [name for one in context.command.get_params(context) for name in one.opts]))
    for kind, allowed in (("number|float", "a number"), ("integer", "a whole number")):
        said = rf"(Input should be a valid ({kind})\b|'.*' is not a valid ({kind})).*"  # by pydantic or click
        text = re.sub(said, f"it must be {allowed}", text)
    if text == "Missing argument 'PROMPT'":
        text += "; - reads it from standard input"
    if text.startswith("No such command") and "did you mean" not in text:
        text += f", there are {', '.join(sorted(COMMANDS))}"
    display.say(f"error: {text[:1].lower()}{text[1:]}", "red")
    return int(code)


def _report_bug(error: Exception) -> int:
    """Show an unexpected error in one line, with its traceback in a file; with OUTPACE_TRACEBACK=1 show the traceback.

    The frames of the command line's library are left out.
    """
    own = error.__traceback__
    while own is not None and not COMMAND.match(own.tb_frame.f_globals.get("__name__", "")):
        own = own.tb_next
    text = "".join(traceback.format_exception(type(error), error, own or error.__traceback__))
    if os.environ.get("OUTPACE_TRACEBACK", "0") != "0":
        sys.stderr.write(text)
        return 1
    try:
        with tempfile.NamedTemporaryFile("w", prefix="outpace-", suffix=".log", delete=False, encoding="utf-8") as file:
            file.write(text)
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "OUTPACE_TRACEBACK=1 shows the traceback"
    what = f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]
    is_memory = isinstance(error, MemoryError)
    why = "memory ran out, a smaller model or none as draft may fit" if is_memory else "this is a bug in outpace"
    display.say(f"error: {what}; {why}; {where}", "red")
    return 1


if __name__ == "__main__":
    main()
