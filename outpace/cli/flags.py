"""Flags of commands: declared as fields of dataclasses, or passed through to methods and drafters.

Also which of them `--help` shows, and checks of the files that they name, before the work starts.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from outpace.core.errors import UserError
from outpace.core.options import option

MODEL = "target draft"
SAMPLING = "system max_tokens temperature seed"
PAIR = "--target big.gguf --draft small.gguf"
# By command: the common options, and examples. A command that is missing here shows all of its options.
COMMON: dict[str, tuple[str, tuple[str, ...]]] = {
    "generate": (
        f"prompt {MODEL} {SAMPLING} method raw as_json",
        ('outpace generate "Why is the sky blue?"', f'outpace generate {PAIR} --max-tokens 100 "Tell me a joke."'),
    ),
    "chat": (
        f"{MODEL} {SAMPLING} method color system",
        (f"outpace chat {PAIR}", "outpace chat --system 'Answer in one sentence.'"),
    ),
    "serve": (
        f"{MODEL} method device host port api_key_file served_name batch",
        (f"outpace serve {PAIR}", "outpace serve --host 0.0.0.0 --api-key-file keys.txt"),
    ),
    "bench": (
        f"{MODEL} methods tasks prompts batch peers max_tokens out plot as_json",
        (f"outpace bench {PAIR}", "outpace bench --methods auto,card --tasks mt_bench --out results"),
    ),
    "distill": (
        "target out kind budget tokens prompts evaluate tasks device as_json",
        (
            "outpace distill --target model.gguf --budget 2h --out draft",
            "outpace chat --target model.gguf --draft draft",
        ),
    ),
    "judge": (
        f"{MODEL} tasks out max_tokens run_tests as_json",
        (f"outpace judge {PAIR} --tasks questions.jsonl", f"outpace chat {PAIR} --rule judge --judge judge"),
    ),
    "tune": (
        f"{MODEL} max_tokens rounds drafter corpus to as_json",
        (f"outpace tune {PAIR}", "outpace tune --drafter retrieval --corpus manual.txt"),
    ),
    "simulate": (
        "trace acceptance methods ratio nodes delay answers plot as_json out",
        ("outpace simulate --acceptance 0.7 --ratio 7", "outpace simulate --trace pair.npz --methods card,planned"),
    ),
    "edge": (
        "acceptance devices servers bandwidth_mhz objective policies worlds sweep plot as_json",
        ("outpace edge --devices 20 --servers 4", "outpace edge --sweep devices=30:120:30 --plot edge.png"),
    ),
    "forecast": (
        "data horizon time value samples backtest plot target draft as_json",
        (
            "outpace forecast sales.csv --horizon 24 --plot forecast.png",
            "outpace forecast sales.csv --horizon 3 --backtest",
        ),
    ),
    "draft-worker": (
        "draft device dtype drafter width listen insecure api_key_file",
        ("outpace draft-worker --draft small.gguf", "outpace chat --target big.gguf --worker grpc://127.0.0.1:8100"),
    ),
    "demo": (f"{MODEL} max_tokens rounds as_json", ("outpace demo", f"outpace demo {PAIR}")),
    "methods": ("", ("outpace methods card ngram", "outpace methods --json")),
    "theory": ("", ("outpace theory --acceptance 0.7 --cost 0.2", "outpace theory --acceptance 0.9,0.8 --drafts 0.5")),
    "doctor": ("", ("outpace doctor --draft head", "outpace doctor --clean --unused-days 30")),
}


def flag(default: Any, text: str, *names: str, panel: str | None = None, **options: Any) -> Any:
    """Declare a field of a dataclass or a parameter of a command as a flag, by its default and its help text.

    `names`: other flags than the name of the field. `panel`: the section of --help that lists it; the default is the
    `panel` of the dataclass. `options`: further arguments of `typer.Option`. A switch that is off by default has no
    flag that turns it off.
    """
    return option(default, text, names=names, panel=panel, typer=options)


def flags_of(record: type, *names: str, panel: str | None = None) -> Any:
    """Declare a field of a dataclass of flags that is a record of options (see `core.options`): those with these names,
    or all that have a help text, are flags too, the others keep their defaults."""
    return field(default_factory=record, metadata={"only": names or None, "panel": panel})


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameters of a command that `flag` declares into options of typer.

    A parameter may be a dataclass: its fields become flags. A field may be a dataclass too, or be declared by
    `flags_of`.
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


def _options(group: Any, only: Collection[str] | None = None, panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Yield the options of a dataclass, all or those with the names `only`."""
    panel = getattr(group, "panel", panel)
    for one, kind in _flag_fields(group, only):
        if is_dataclass(kind):
            yield from _options(kind, one.metadata.get("only"), one.metadata.get("panel") or panel)
        else:
            yield _option(one.name, kind, one, panel)


def _flag_fields(group: Any, only: Collection[str] | None) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields that are flags or records of flags, all or those with the names `only`, and their types."""
    hints = get_type_hints(group)
    for one in fields(group):
        if (only is None or one.name in only) and (one.metadata.get("help") or is_dataclass(hints[one.name])):
            yield one, hints[one.name]


def _option(name: str, kind: Any, declared: Field[Any], group_panel: str | None = None) -> inspect.Parameter:
    given = declared.metadata
    names = given.get("names", ())
    if declared.default is False and not names:
        names = (f"--{name.replace('_', '-')}",)
    panel = given.get("panel") or group_panel
    annotation: Any = Annotated[
        kind, typer.Option(*names, help=given["help"], rich_help_panel=panel, **given.get("typer", {}))
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=annotation)


def _build(group: Any, given: dict[str, Any], only: Collection[str] | None = None) -> Any:
    """Build a dataclass from its flags, which are removed from `given`."""
    return group(
        **{
            one.name: _build(kind, given, one.metadata.get("only")) if is_dataclass(kind) else given.pop(one.name)
            for one, kind in _flag_fields(group, only)
        }
    )


class Command(typer.core.TyperCommand):
    """A command whose `--help` is short."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        common, examples = COMMON.get(self.name or "", ("", ()))
        own = [param for param in self.params if param.param_type_name == "option"]
        rare = [param for param in own if common and param.name not in common.split()]
        is_whole = "--help-all" in args
        for param in rare:
            param.hidden = not is_whole  # type: ignore[attr-defined]
        more = [f"--help-all lists {len(rare)} more options."] if rare and not is_whole else []
        self.epilog = "\n\n".join([*(f"[dim]$[/dim] {example}" for example in examples), *more])
        return list(super().parse_args(ctx, args))


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
                if option.startswith("no_") and not equals:  # --no-correction: --correction false
                    found[option.removeprefix("no_")] = "false"
                    continue
                found[option] = value if equals else next(words, "--")
                if not equals and found[option].startswith("--"):
                    raise UserError(f"option {name} needs a value")
            else:
                rest.append(word)
                if not equals and not is_switch.get(name, True):
                    rest += islice(words, 1)
        ctx.obj = found
        return list(super().parse_args(ctx, rest))


def _option_name(given: str, own: Iterable[str]) -> str:
    """Return the name of an option of a method, drafter or rule, after "no_" where `given` begins so and the option is
    True by default; raise UserError if there is none."""
    from outpace.core import registry

    modules = [registry.find(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    options = {field.name: field.default for module in modules for field in fields(module.Options)}
    name = given.removeprefix("--").replace("-", "_")
    if name in options or options.get(name.removeprefix("no_")) is True:
        return name
    registry.check_kept(name)
    if given == "--version":
        raise UserError("--version is an option of the program, not of a command: `outpace --version`")
    raise unknown_option(given, [*own, *(f"--{name.replace('_', '-')}" for name in options)])


def unknown_option(given: str, allowed: Iterable[str]) -> UserError:
    """Return the error for an option that a command does not have, with the nearest one that it has."""
    from outpace.core.registry import REMOVED_NAMES

    if instead := REMOVED_NAMES.get(("flags", given)):
        return UserError(f"{given} was removed: {instead}")
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


def check_file(flag: str, file: Path | None) -> None:
    """Raise UserError unless `file` is None or can be written."""
    if file is None:
        return
    if os.path.isdir(file):
        raise UserError(f"{flag} is {file}, which is a folder; name a file")
    if not os.path.isdir(file.parent):
        raise UserError(f"{flag} is {file}, but there is no folder {file.parent}")
    try:
        if not os.path.exists(file):
            file.touch()  # tried, because root is said to have access even to /proc
            file.unlink()
        elif not os.access(file, os.W_OK):
            raise PermissionError
    except OSError as error:
        raise UserError(f"{flag} is {file}, which cannot be written") from error


def check_folder(flag: str, folder: Path | None) -> None:
    """Raise UserError unless `folder` is None, exists, or can be made."""
    if folder is None:
        return
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(above):
        raise UserError(f"{flag} is {folder}, but {above} is a file")
    if not os.access(above, os.W_OK):
        raise UserError(f"{flag} is {folder}, but {above} cannot be written")


def check_plot(flag: str, file: Path | None) -> None:
    """Raise UserError unless `file` is None or matplotlib can write it in the format of its suffix."""
    if file is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(f"{flag} needs `pip install matplotlib`; leave it out for the table alone") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        suffixes = ", ".join(f".{name}" for name in formats)
        raise UserError(f"{flag} is {file}, its name must end with one of {suffixes}")
    check_file(flag, file)
