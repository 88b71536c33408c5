"""Prints docs/methods.md: options, methods, drafters and rules, from their own docstrings. Run: make methods-page"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields

from outpace.cli.methods import FLAGS, find_methods, format_flag, meanings
from outpace.cli.options import BUILD_FLAGS, LOAD_FLAGS
from outpace.core.options import help_of
from outpace.core.registry import Method
from outpace.engine.options import BuildOptions
from outpace.models.options import LoadOptions

HEAD = """# Options and methods

Options are keyword arguments of `outpace.LLM`, arguments of `outpace.server.on_ray:build`, and flags, except for those
in italics. Those of methods have their defaults below, if these are values.

{options}

A method decides when and where drafting happens, a drafter what is proposed, a rule which proposals are accepted.
*Lossless* methods and rules keep the target's distribution (greedy, gumbel and match its text too); the others give up
some of it for speed, and their answers are marked as lossy.

Costs are those of one round. p and q are the probabilities of target and draft. Drafts are *drawn* (sampled from q) or
*picked* (chosen otherwise, as the likeliest or by copying). The [glossary](glossary.md) has the other terms.

`make methods-page` writes this page.
"""


def page() -> str:
    """Return the page."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield HEAD.format(options="\n".join(_option_rows()))
    for kind, some in find_methods().items():
        yield f"\n## {kind.capitalize()} (`{FLAGS[kind]}`)\n\n"
        texts = Counter(about for method in some for about in method.about.items())
        shared = {about for about, count in texts.items() if count > 1}
        if shared:
            yield f"Options of several {kind}: {meanings(sorted(shared))}.\n\n"
        yield from (" | ".join(["", *row, ""]).strip() + "\n" for row in _rows(kind, some, shared))


def _option_rows() -> Iterator[str]:
    """Yield a table of the records of options."""
    yield from ("| option | meaning |", "| --- | --- |")
    for record in (LoadOptions, BuildOptions):
        defaults = {one.name: one.default for one in fields(record)}
        for name, text in help_of(record).items():
            shown = f"`{format_flag(f'{name}={defaults[name]}')}`"
            yield f"| {shown if name in (*LOAD_FLAGS, *BUILD_FLAGS) else f'*{name}*'} | {text} |"


def _rows(kind: str, found: Sequence[Method], shared: Collection[tuple[str, str]]) -> list[list[str]]:
    """Return head, rule and rows of a table, without the help of `shared` options. Drafters have no column `lossless`:
    they never change a text."""
    has_loss = kind != "drafters"
    head = ["name", "what it does", *(["lossless"] if has_loss else []), "needs", "costs", "options", "paper"]
    rows = [head, ["---"] * len(head)]
    for method in found:
        loss = ["yes" if method.lossless else "no"] if has_loss else []
        options = ", ".join(f"`{format_flag(option)}`" for option in method.options)
        own = [about for about in method.about.items() if about not in shared]
        options += f"<br>{meanings(own)}" if own else ""
        row = [f"`{method.name}`", method.help, *loss, method.needs, method.cost, options, method.paper]
        rows.append([cell.replace("|", "\\|") or "-" for cell in row])
    return rows


if __name__ == "__main__":
    sys.stdout.write(page())
