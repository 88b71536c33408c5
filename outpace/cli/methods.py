"""`outpace methods`: list the methods, drafters and rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.flags import flags
from outpace.cli.options import JSON
from outpace.core.errors import unknown

if TYPE_CHECKING:
    from outpace.core.registry import Method

FLAGS = {"decoders": "--method", "drafters": "--drafter", "rules": "--rule"}
HINT = "outpace methods NAME ... shows some of them in full, with their options"


@flags
def methods(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Methods, drafters or rules to show in full.", show_default=False),
    ] = None,
    as_json: bool = JSON,
) -> None:
    """List the methods, drafters and rules, one a line; with NAMEs: their requirements, costs, options and papers."""
    found = find_methods(chosen or ())
    if as_json:
        display.print_json({kind: [asdict(method) for method in found[kind]] for kind in found})
    elif chosen:
        for kind, some in found.items():
            display.stdout().print(_table(kind, some))
    else:
        _print_short(found)


def find_methods(names: Sequence[str] = ()) -> Mapping[str, Sequence[Method]]:
    """Describe the parts of these names by kind, or all parts; raise UserError for an unknown name."""
    from outpace.core import registry

    found = {kind: [registry.describe(kind, name) for name in registry.names(kind)] for kind in registry.KINDS}
    known = {method.name for some in found.values() for method in some}
    for name in names:
        if name not in known:
            raise unknown("method, drafter or rule", name, known)
    chosen = {kind: [method for method in some if method.name in names] for kind, some in found.items()}
    return {kind: some for kind, some in chosen.items() if some} if names else found


def _print_short(found: Mapping[str, Sequence[Method]]) -> None:
    """Print one line for each, cut to the width of a terminal."""
    console = display.stdout()
    width = max(len(method.name) for some in found.values() for method in some) + 2
    for kind, some in found.items():
        console.print(_title(kind))
        for method in some:
            line = Text(method.name.ljust(width), style="cyan").append(method.help, style="default")
            is_cut = console.is_terminal
            console.print(line, no_wrap=True, overflow="ellipsis" if is_cut else "ignore", crop=is_cut)
        console.print()
    display.say(HINT)


def _title(kind: str) -> Text:
    return Text(kind, style="bold").append(f"  {FLAGS[kind]}", style="cyan")


def meanings(about: Iterable[tuple[str, str]]) -> str:
    """Join options (name, help) in one line."""
    return "; ".join(f"`{name}`: {text}" for name, text in about)


def _table(kind: str, found: Sequence[Method]) -> Table:
    table = Table(title=_title(kind), title_justify="left", expand=True, box=None, padding=(0, 2, 0, 0), leading=1)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it does", ratio=1, overflow="fold")
    has_options = any(method.options for method in found)
    if has_options:
        table.add_column("its options", no_wrap=True)
    if kind != "drafters":
        table.add_column("lossless", no_wrap=True)
    for method in found:
        needs = [f"{verb} {text}" for verb, text in (("needs", method.needs), ("costs", method.cost)) if text]
        lines = [method.help, "; ".join(needs), meanings(method.about.items())]
        what = Text("".join(f"{line}\n" for line in lines if line)).append(method.paper, style=display.GREY)
        row: list[str | Text] = [method.name, what]
        row += ["\n".join(map(format_flag, method.options))] if has_options else []
        row += ["yes" if method.lossless else "no"] if kind != "drafters" else []
        table.add_row(*row)
    return table


def format_flag(option: str) -> str:
    """Format `name=default` as on the command line, without a default of None."""
    name, _, default = option.partition("=")
    shown = {"None": "", "True": "true", "False": "false"}.get(default, default)
    return f"--{name.replace('_', '-')} {shown}".rstrip()
