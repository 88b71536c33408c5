"""`outpace methods`: list the methods, drafters and rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import BUILD_FLAGS, JSON, LOAD_FLAGS
from outpace.core.errors import UserError, unknown
from outpace.core.options import help_of
from outpace.engine.options import BuildOptions
from outpace.models.options import LoadOptions

if TYPE_CHECKING:
    from outpace.core.registry import Method

FLAGS = {"decoders": "--method", "drafters": "--drafter", "rules": "--rule"}
PAGE = """# Options and methods

Options are keyword arguments of `outpace.LLM`, arguments of `outpace.server.on_ray:build`, and flags, except for those
in italics. Those of methods have their defaults below, if these are values.

{options}

A method decides when and where drafting happens, a drafter what is proposed, a rule which proposals are accepted.
*Lossless* methods and rules keep the target's distribution (greedy, gumbel and match its text too); the others give up
some of it for speed, and their answers are marked as lossy.

Costs are those of one round. p and q are the probabilities of target and draft. Drafts are *drawn* (sampled from q) or
*picked* (chosen otherwise, as the likeliest or by copying). The [glossary](glossary.md) has the other terms.

`outpace methods --markdown` makes this page.
"""
HINT = "outpace methods NAME ... shows some of them in full, with their options; --markdown writes the whole list"


@flags
def methods(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Methods, drafters or rules to show in full.", show_default=False),
    ] = None,
    as_json: bool = JSON,
    markdown: bool = flag(False, "Write the list as a Markdown page."),
) -> None:
    """List the methods, drafters and rules, one a line; with NAMEs: their requirements, costs, options and papers."""
    if as_json and markdown:
        raise UserError("--json and --markdown exclude each other, leave out one of them")
    if chosen and markdown:
        raise UserError("--markdown writes the whole page, leave out --markdown or the names")
    found = _found(chosen or ())
    if as_json:
        display.print_json({kind: [asdict(method) for method in found[kind]] for kind in found})
    elif markdown:
        typer.echo(page(), nl=False)
    elif chosen:
        for kind, some in found.items():
            display.stdout().print(_table(kind, some))
    else:
        _print_short(found)


def page() -> str:
    """Return the whole list in Markdown."""
    parts = [PAGE.format(options="\n".join(_option_rows()))]
    for kind, some in _found().items():
        parts.append(f"\n## {kind.capitalize()} (`{FLAGS[kind]}`)\n\n")
        texts = Counter(about for method in some for about in method.about.items())
        shared = {about for about, count in texts.items() if count > 1}
        if shared:
            parts.append(f"Options of several {kind}: {_meanings(sorted(shared))}.\n\n")
        parts += [" | ".join(["", *row, ""]).strip() + "\n" for row in _rows(kind, some, shared)]
    return "".join(parts)


def _option_rows() -> list[str]:
    """Return a Markdown table of the records of options."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for record in (LoadOptions, BuildOptions):
        defaults = {one.name: one.default for one in fields(record)}
        for name, text in help_of(record).items():
            shown = f"`{_flag(f'{name}={defaults[name]}')}`"
            rows.append(f"| {shown if name in (*LOAD_FLAGS, *BUILD_FLAGS) else f'*{name}*'} | {text} |")
    return rows


def _found(names: Sequence[str] = ()) -> Mapping[str, Sequence[Method]]:
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


def _meanings(about: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"`{name}`: {text}" for name, text in about)


def _rows(kind: str, found: Sequence[Method], shared: Collection[tuple[str, str]]) -> list[list[str]]:
    """Return head, rule and rows of a Markdown table, without the help of `shared` options. Drafters have no column
    `lossless`: they never change a text."""
    has_loss = kind != "drafters"
    head = ["name", "what it does", *(["lossless"] if has_loss else []), "needs", "costs", "options", "paper"]
    rows = [head, ["---"] * len(head)]
    for method in found:
        loss = ["yes" if method.lossless else "no"] if has_loss else []
        options = ", ".join(f"`{_flag(option)}`" for option in method.options)
        own = [about for about in method.about.items() if about not in shared]
        options += f"<br>{_meanings(own)}" if own else ""
        row = [f"`{method.name}`", method.help, *loss, method.needs, method.cost, options, method.paper]
        rows.append([cell.replace("|", "\\|") or "-" for cell in row])
    return rows


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
        lines = [method.help, "; ".join(needs), _meanings(method.about.items())]
        what = Text("".join(f"{line}\n" for line in lines if line)).append(method.paper, style=display.GREY)
        row: list[str | Text] = [method.name, what]
        row += ["\n".join(map(_flag, method.options))] if has_options else []
        row += ["yes" if method.lossless else "no"] if kind != "drafters" else []
        table.add_row(*row)
    return table


def _flag(option: str) -> str:
    """Format `name=default` as on the command line, without a default of None."""
    name, _, default = option.partition("=")
    shown = {"None": "", "True": "true", "False": "false"}.get(default, default)
    return f"--{name.replace('_', '-')} {shown}".rstrip()
