"""Reads fields of a config.json; errors name a field that is missing, invalid or unsupported."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel

LARGEST_SIZE = 2**31 - 1
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types: full attention, and a sliding window


OTHER_RUNTIME = " by the runtime llama; --runtime transformers runs it"


class ReadFields(dict[str, Any]):
    """Fields of a file that remember which of them were asked for, so that the others can be named.

    Objects among them are `ReadFields` too. Iterating and copying do not count as asking.
    """

    def __init__(self, fields: Mapping[str, Any], asked: set[str] | None = None) -> None:
        super().__init__(
            {name: ReadFields(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
        )
        self.asked: set[str] = set() if asked is None else asked

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def unread(self) -> dict[str, Any]:
        """Return the fields that nothing asked for; those of objects have dotted names."""
        found: dict[str, Any] = {}
        for name, value in self.items():
            if isinstance(value, ReadFields):
                found |= {f"{name}.{inner}": one for inner, one in value.unread().items()}
            elif name not in self.asked:
                found[name] = value
        return found


def unknown_fields(
    fields: Mapping[str, Any],
    known: Container[str],
    neutral: Mapping[str, tuple[Any, ...]],
    objection: Callable[[str], str | None],
    prefix: str = "",
) -> list[str]:
    """Return the names of the fields that are ignored although they are not known, each after `prefix`.

    Raise UserError for a field of `neutral` with another than its neutral values, and for an unknown field if
    `objection` returns an end of the sentence. An unknown field that is off (null, false, 0 or empty) says nothing.
    """
    unknown = []
    for name, value in fields.items():
        refused = f"{prefix}{name} {value!r:.50} is not supported"
        if name in neutral:
            if value is not None and value not in neutral[name]:
                raise UserError(f"{refused}, only {' and '.join(map(repr, neutral[name]))}")
        elif name in known or not (any(value) if isinstance(value, list) else value):
            continue
        elif (reason := objection(name)) is not None:
            raise UserError(refused + reason)
        else:
            unknown.append(prefix + name)
    return unknown


def unsupported_field(what: str) -> UnsupportedModel:
    """Make the error for something that this runtime does not support, although others do."""
    return UnsupportedModel(f"{what} is not supported{OTHER_RUNTIME}")


def size(fields: Mapping[str, Any], name: str, default: int | None = None, smallest: int = 1) -> int:
    """Read an integer; a missing or null field gives `default`, or UserError without one."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= LARGEST_SIZE:
        raise UserError(f"{name} is {value!r:.80}, it must be a whole number of at least {smallest}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None, largest: float) -> float:
    """Read a positive number; a missing or null field gives `default`, or UserError without one."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise UserError(f"{name} is {value!r:.80}, it must be above 0 and at most {largest:g}")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read a boolean; a missing or null field gives `default`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r:.80}, it must be true or false")
    return value


def read_layer_types(fields: Mapping[str, Any], num_layers: int, other: str) -> list[str] | None:
    """Return the type of each layer, FULL or `other`; None if the config does not list them."""
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or any(kind not in (FULL, other) for kind in types):
        raise unsupported_field(f"layer_types {types!r:.200} (only {FULL} and {other})")
    if len(types) != num_layers:
        raise UserError(f"layer_types has {len(types)} entries, it must have one for each of {num_layers} layers")
    return types


def check_layers(types: Sequence[str] | None, layers: Sequence[bool], said: str) -> None:
    """Raise UserError if layer_types names other recurrent layers than another field does, which `said` quotes."""
    for layer, (kind, is_recurrent) in enumerate(zip(types or (), layers, strict=False)):
        if (kind != FULL) != is_recurrent:
            raise UserError(f"layer_types contradicts {said}: layer {layer} is {kind}")
