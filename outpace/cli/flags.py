"""Flags of commands: declared as fields of dataclasses, or passed through to methods and drafters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from outpace.core.errors import UserError


def flag(text: str, panel: str | None = None, *names: str, **options: Any) -> Any:
    """Declare a flag: its help text, the panel of --help that lists it, and its names if not those of the field."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **options)


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses: the fields of each become flags of the command.

    A field may be a dataclass too. One that knows no command line has its flags in the field's metadata "flags", by
    name; its other fields keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name in own and is_dataclass(kind)}
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
        if name not in groups
    ]
    parameters += [parameter for group in groups.values() for parameter in _parameters(group)]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = _build(group, given)
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any, declared: Mapping[str, Any] | None = None) -> Iterator[inspect.Parameter]:
    for field, kind in _flag_fields(group, declared):
        if is_dataclass(kind):
            yield from _parameters(kind, field.metadata.get("flags"))
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _build(group: Any, given: dict[str, Any], declared: Mapping[str, Any] | None = None) -> Any:
    """Build a dataclass from its flags, which are removed from `given`."""
    values = {
        field.name: _build(kind, given, field.metadata.get("flags")) if is_dataclass(kind) else given.pop(field.name)
        for field, kind in _flag_fields(group, declared)
    }
    return group(**values)


def _flag_fields(group: Any, declared: Mapping[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    """Yield the fields of a dataclass that are flags or contain flags, each with its annotated type."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if declared is None:
            yield field, hints[field.name]
        elif field.name in declared:
            yield field, Annotated[hints[field.name], declared[field.name]]


class PassthroughCommand(typer.core.TyperCommand):
    """A command that collects unknown flags in `ctx.obj` as {name_with_underscores: text}.

    UserError for a flag that no method, drafter or rule has, with the nearest name. The library checks which of them
    the chosen method takes.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove the passed-through flags, wherever they are, and parse the rest."""
        own = {name: bool(getattr(param, "is_flag", False)) for param in self.params for name in _names(param)}
        own["--help"] = True
        rest: list[str] = []
        found: dict[str, str] = {}
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--":
                rest += [word, *words]
            elif name in own:
                rest.append(word)
                if not equals and not own[name] and (following := next(words, None)) is not None:
                    rest.append(following)
            elif word.startswith("--"):
                option = _option_name(name, list(own))
                found[option] = value if equals else _value(name, words)
            else:
                rest.append(word)
        ctx.obj = found
        return list(super().parse_args(ctx, rest))


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else []


def _value(name: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise UserError(f"option {name} needs a value")
    return value


def _option_name(given: str, own: Sequence[str]) -> str:
    """Return the name of an option of a method, drafter or rule; raise UserError if there is none."""
    from outpace.core import registry

    modules = [registry.find(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    options = {field.name for module in modules for field in fields(module.Options)}
    name = given.removeprefix("--").replace("-", "_")
    if name in options:
        return name
    if given == "--version":
        raise UserError("--version is an option of the program, not of a command: `outpace --version`")
    allowed = {name.removeprefix("--") for name in own} | {name.replace("_", "-") for name in options}
    near = difflib.get_close_matches(given.removeprefix("--"), sorted(allowed), n=1, cutoff=0.7)
    lists = "--help lists the command's own options, `outpace methods NAME` those of a method"
    hint = f"did you mean --{near[0]}?" if near else lists
    raise UserError(f"unknown option {given}; {hint}")
