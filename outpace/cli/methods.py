"""`outpace methods`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.options import Json

if TYPE_CHECKING:
    from outpace.core.registry import Method

FLAGS = {"decoders": "--method", "drafters": "--drafter", "rules": "--rule"}


def methods(as_json: Json = False) -> None:
    """List the methods, drafters and rules, with their options and papers."""
    from outpace.core import registry

    found = {kind: [registry.describe(kind, name) for name in registry.names(kind)] for kind in registry.KINDS}
    if as_json:
        display.print_json({kind: [asdict(method) for method in found[kind]] for kind in found})
        return
    console = display.stdout()
    for kind in registry.KINDS:
        console.print(_table(kind, found[kind]))


def _table(kind: str, found: Sequence[Method]) -> Table:
    title = Text(kind, style="bold").append(f"  {FLAGS[kind]}", style="cyan")
    table = Table(title=title, title_justify="left", expand=True, box=None, padding=(0, 2, 0, 0), leading=1)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it does", ratio=1, overflow="fold")
    has_options = any(method.options for method in found)
    if has_options:
        table.add_column("its options", no_wrap=True)
    if kind != "drafters":
        table.add_column("lossless", no_wrap=True)
    for method in found:
        what = Text(method.help + "\n").append(method.paper, style=display.GREY)
        options = "\n".join(_flag(option) for option in method.options)
        row: list[str | Text] = [method.name, what]
        row += [options] if has_options else []
        row += ["yes" if method.lossless else "no"] if kind != "drafters" else []
        table.add_row(*row)
    return table


def _flag(option: str) -> str:
    name, _, default = option.partition("=")
    return f"--{name.replace('_', '-')} {default}"
