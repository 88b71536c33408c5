"""Flags of commands: declared as fields of dataclasses, or passed through to methods and drafters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from itertools import islice
from typing import Annotated, Any, get_type_hints

import typer

from outpace.cli.help import Command
from outpace.core.errors import UserError


def flag(default: Any, text: str, *names: str, panel: str | None = None, **options: Any) -> Any:
    """Declare a field of a dataclass or a parameter of a command as a flag, by its default and its help text.

    `names`: other flags than the name of the field. `panel`: the section of --help that lists it; the default is the
    `panel` of the dataclass. `options`: further arguments of `typer.Option`. A switch that is off by default has no
    flag that turns it off.
    """
    return field(default=default, metadata={"flag": (text, names, panel, options)})


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameters of a command that `flag` declares into options of typer.

    A parameter may be a dataclass: its fields become flags. A field may be a dataclass too. If that one declares no
    flags, the field's metadata "texts" has help texts by name; fields without a text keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
        elif isinstance(parameter.default, Field):
            parameters.append(_option(name, hints[name], parameter.default))
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    for group in groups.values():
        parameters += _options(group)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = _build(group, given)
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any, texts: dict[str, str] | None = None, panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Yield the options of a dataclass; `texts` are the help texts of one that declares no flags."""
    hints, panel = get_type_hints(group), getattr(group, "panel", panel)
    for one in fields(group):
        kind = hints[one.name]
        if is_dataclass(kind):
            yield from _options(kind, one.metadata.get("texts"), panel)
        elif texts is None:
            yield _option(one.name, kind, one, panel)
        elif one.name in texts:
            yield _option(one.name, kind, flag(one.default, texts[one.name]), panel)


def _option(name: str, kind: Any, declared: Field[Any], group_panel: str | None = None) -> inspect.Parameter:
    text, names, panel, options = declared.metadata["flag"]
    if declared.default is False and not names:
        names = (f"--{name.replace('_', '-')}",)
    option = typer.Option(*names, help=text, rich_help_panel=panel or group_panel, **options)
    annotation: Any = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=annotation)


def _build(group: Any, given: dict[str, Any], texts: Mapping[str, str] | None = None) -> Any:
    """Build a dataclass from its flags, which are removed from `given`."""
    hints, values = get_type_hints(group), {}
    for one in fields(group):
        if is_dataclass(hints[one.name]):
            values[one.name] = _build(hints[one.name], given, one.metadata.get("texts"))
        elif texts is None or one.name in texts:
            values[one.name] = given.pop(one.name)
    return group(**values)


class PassthroughCommand(Command):
    """A command that collects unknown flags in `ctx.obj` as {name_with_underscores: text}.

    UserError for a flag that no method, drafter or rule has, with the nearest name. The library checks which of them
    the chosen method takes.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove the passed-through flags, wherever they are, and parse the rest."""
        is_switch = dict.fromkeys(ctx.help_option_names, True)
        for param in self.params:
            if param.param_type_name == "option":
                is_switch |= dict.fromkeys([*param.opts, *param.secondary_opts], bool(getattr(param, "is_flag", False)))
        rest: list[str] = []
        found: dict[str, str] = {}
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--":
                rest += [word, *words]
            elif word.startswith("--") and name not in is_switch:
                option = _option_name(name, is_switch)
                found[option] = value if equals else _value(name, words)
            else:
                rest.append(word)
                if not equals and not is_switch.get(name, True):
                    rest += islice(words, 1)
        ctx.obj = found
        return list(super().parse_args(ctx, rest))


def _value(name: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise UserError(f"option {name} needs a value")
    return value


def _option_name(given: str, own: Iterable[str]) -> str:
    """Return the name of an option of a method, drafter or rule; raise UserError if there is none."""
    from outpace.core import registry

    modules = [registry.find(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    options = {field.name for module in modules for field in fields(module.Options)}
    name = given.removeprefix("--").replace("-", "_")
    if name in options:
        return name
    if given == "--version":
        raise UserError("--version is an option of the program, not of a command: `outpace --version`")
    raise unknown_option(given, [*own, *(f"--{name.replace('_', '-')}" for name in options)])


def unknown_option(given: str, allowed: Iterable[str]) -> UserError:
    """Return the error for an option that a command does not have, with the nearest one that it has."""
    near = difflib.get_close_matches(given, sorted(allowed), n=1, cutoff=0.7)
    lists = "--help-all lists the options of a command, `outpace methods NAME` those of a method"
    return UserError(f"unknown option {given}; {f'did you mean {near[0]}?' if near else lists}")


def numbers(text: str, kind: Callable[[str], Any], says: str) -> list[Any]:
    """Convert numbers joined by commas; raise UserError with the sentence `says` for anything else."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(says) from None


def common_fields(given: Any, kind: Any) -> dict[str, Any]:
    """Return the values of a dataclass whose names are fields of the dataclass `kind` too."""
    names = {one.name for one in fields(kind)}
    return {one.name: getattr(given, one.name) for one in fields(given) if one.name in names}
