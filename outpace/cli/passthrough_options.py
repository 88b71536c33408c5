"""The options of methods and drafters as flags: `--draft-length 6` needs no list of them in the command line's code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import typer.core

from outpace.core.errors import UserError


class ExtraFlags(typer.core.TyperCommand):
    """A command that collects flags which are none of its own in `ctx.obj`, {name_with_underscores: text}.

    UserError for a flag that no method and no drafter has, with the nearest name; which of them the chosen method
    takes, the library checks.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the extra flags out, wherever they stand, and leaves the rest to typer."""
        own = {name: bool(getattr(param, "is_flag", False)) for param in self.params for name in _names(param)}
        own["--help"] = True
        rest: list[str] = []
        extra: dict[str, str] = {}
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--":
                rest += [word, *words]
            elif name in own:
                rest += [word] if equals or own[name] else [word, *_next(words)]
            elif word.startswith("--"):
                known = _known(name, list(own))
                extra[known] = value if equals else _value(name, words)
            else:
                rest.append(word)
        ctx.obj = extra
        return list(super().parse_args(ctx, rest))


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else []


def _next(words: Iterator[str]) -> list[str]:
    word = next(words, None)
    return [] if word is None else [word]


def _value(name: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise UserError(f"option {name} needs a value")
    return value


def _known(flag: str, own: Sequence[str]) -> str:
    """The option's name, if any method, drafter or rule has it."""
    from outpace.core import registry

    modules = [registry.find(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    options = {field.name for module in modules for field in fields(module.Options)}
    name = flag.removeprefix("--").replace("-", "_")
    if name in options:
        return name
    if flag == "--version":
        raise UserError("--version is asked of the program alone: `outpace --version`")
    allowed = {name.removeprefix("--") for name in own} | {name.replace("_", "-") for name in options}
    near = difflib.get_close_matches(flag.removeprefix("--"), sorted(allowed), n=1, cutoff=0.7)
    lists = "--help lists the command's own, `outpace methods NAME` those of a method"
    hint = f"did you mean --{near[0]}?" if near else lists
    raise UserError(f"unknown option {flag}; {hint}")
