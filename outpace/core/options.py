"""Options: dataclasses whose fields state their defaults, help and bounds together.

Command-line flags, arguments of the library and of Ray, and the page of methods are made from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature
from typing import Any

from outpace.core.errors import UserError, check_range, check_whole, unknown


def option(default: Any, help: str, check: Callable[[str, Any], object] | None = None, **more: Any) -> Any:
    """Declare an option; `check(name, value)` raises UserError for a value that is not allowed."""
    return field(default=default, metadata={"help": help, "check": check, **more})


def whole(default: int | None, low: int, high: float = math.inf, help: str = "", **more: Any) -> Any:
    """Declare an option that is a whole number from `low` to `high`; with default None it may be None too."""
    return option(default, help, partial(check_whole, low=low, high=high), bounds=(low, high), **more)


def number(default: float | None, low: float, high: float = math.inf, help: str = "", **more: Any) -> Any:
    """Declare an option that is a number from `low` to `high`; with default None it may be None too."""
    return option(default, help, partial(check_range, low=low, high=high), bounds=(low, high), **more)


def parsed(default: str, parse: Callable[[str], object], help: str = "") -> Any:
    """Declare an option that is a text which `parse` accepts; for others it raises UserError."""
    return option(default, help, lambda name, value: parse(value))


def one_of(default: str | None, allowed: Sequence[str], help: str = "", **more: Any) -> Any:
    """Declare an option with these values; with default None it may be None too."""

    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise unknown(name, str(value), allowed)

    return option(default, help, check, **more)


def switch(default: bool | None, help: str = "", **more: Any) -> Any:
    """Declare an option that is True or False; with default None it may be None too."""

    def check(name: str, value: Any) -> None:
        if value not in (True, False):
            also = ", it must be True, False or None" if default is None else ", it must be True or False"
            raise UserError(f"{name} is {value!r:.50}{also}")

    return option(default, help, check, **more)


def same(record: type, name: str) -> Any:
    """Declare an option of another record here too, with its default, help and bounds."""
    [declared] = [one for one in fields(record) if one.name == name]
    return field(default=declared.default, metadata=declared.metadata)


@dataclass(frozen=True)
class CheckedOptions:
    """Checks the fields that are declared by one of the functions above when an instance is created."""

    def __post_init__(self) -> None:
        """Raise UserError for a value that is not allowed."""
        for one in fields(self):
            value, check = getattr(self, one.name), one.metadata.get("check")
            if check is not None and not (value is None and one.default is None):
                check(one.name, value)


@dataclass(frozen=True)
class MethodOptions(CheckedOptions):
    """The options of a method; without fields: no options."""


def with_options(signature: Signature, *records: type) -> Signature:
    """Return the signature of a function whose `**` arguments are the options of these records, and others."""
    *before, others = signature.parameters.values()
    named = [one for record in records for one in fields(record) if one.name in help_of(record)]
    options = [Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type) for one in named]
    return signature.replace(parameters=[*before, *options, others])


def help_of(options: type) -> dict[str, str]:
    """Return the help texts of a dataclass's fields, by name."""
    return {one.name: one.metadata["help"] for one in fields(options) if one.metadata.get("help")}
