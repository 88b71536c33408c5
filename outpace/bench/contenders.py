"""Who takes part: our own methods with their options, and other engines, each by the name that tables show."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from outpace.bench import peers
from outpace.core import registry
from outpace.core.errors import UserError, unknown
from outpace.core.sampling import Sampling
from outpace.engine.build import check_rule, default_drafter, default_rule, find_rule

PLAIN = "autoregressive"
AUTO = "auto"
SYNTAX = (
    "write NAME or NAME:OPTION=VALUE,OPTION=VALUE, several joined by commas, as in card:drafter=model+ngram,nodes=8"
)
GUESS = "guess"  # every so many-th token of a predicted answer is another
WHOLE = ("nodes", "draft_threads", GUESS)  # of the engine or the bench, not of a method
YES_OR_NO = ("profile",)


@dataclass(frozen=True)
class Contender:
    """`label` is what was asked for; `options` are those of the library, by name."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_peer: bool = False

    @property
    def guess(self) -> int:
        """It is told beforehand what plain decoding answered, but for every so many-th token; 0: it is not."""
        return int(self.options.get(GUESS, 0))

    def prediction(self, answer: Sequence[int]) -> list[int]:
        """The answer as it is told it."""
        return [token if place % self.guess else 0 for place, token in enumerate(answer, 1)] if self.guess else []


def parse_methods(text: str, common: Mapping[str, Any]) -> list[Contender]:
    """Our own methods; plain decoding is always one of them and comes first: it is what all are held against.

    `common` are options for every method that has a drafter and names no others; a worker is for those that have one.
    UserError for anything unknown, and for a worker that no method has.
    """
    found = {PLAIN: Contender(PLAIN, PLAIN)}
    for label, name, own in parse_options("methods", text):
        needs = registry.find("decoders", name).NEEDS
        values: dict[str, Any] = {option: _value(option, value) for option, value in own.items()}
        if name == PLAIN and not values:
            continue
        if label in found:
            raise UserError(f"methods has {label} twice")
        found[label] = Contender(label, name, {**_fitting(common, needs), **values})
    if "worker" in common and all("worker" not in contender.options for contender in found.values()):
        raise UserError(f"methods is {text!r}, none of which has a worker: leave out worker {common['worker']!r}")
    return list(found.values())


def _fitting(common: Mapping[str, Any], needs: str | None) -> dict[str, Any]:
    """Of the options for all methods those of one that needs no drafter, a drafter, or a worker."""
    if needs is None:
        return {}
    return {name: value for name, value in common.items() if name != "worker" or needs == "worker"}


def is_lossy(contender: Contender) -> bool:
    """Whether one of our methods is not meant to write the target's text: its rule says so."""
    if contender.is_peer or contender.name == AUTO:
        return False
    rule = default_rule(registry.find("decoders", contender.name), str(contender.options.get("rule", AUTO)))
    return rule != AUTO and not registry.describe("rules", rule).lossless


def parse_peers(text: str) -> list[Contender]:
    """Other engines, by the names of their files."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in peer_names():
            raise unknown("peer", name, peer_names())
        if names.count(name) > 1:
            raise UserError(f"peers has {name} twice")
    return [Contender(name, name, is_peer=True) for name in names]


def peer_names() -> list[str]:
    """All peers that there are, installed or not."""
    return sorted(found.name for found in pkgutil.iter_modules(peers.__path__) if not found.name.startswith("_"))


def find_peer(name: str) -> ModuleType:
    """The module of a peer."""
    return importlib.import_module(f"{peers.__name__}.{name}")


def parse_options(what: str, text: str) -> list[tuple[str, str, dict[str, str]]]:
    """(label, name, options) of each of these methods or rules; a part with = and without : is one more option of what
    stands before it. UserError for another form."""
    found: list[tuple[str, str, dict[str, str]]] = []
    for part in (part.strip() for part in text.split(",")):
        head, colon, tail = part.partition(":")
        is_option = not colon and "=" in part
        if not part or (is_option and not found):
            raise UserError(f"{what} is {text!r}: {SYNTAX}")
        if not is_option:
            found.append((part, head, {}))
        label, name, options = found[-1]
        if is_option:
            found[-1] = (f"{label},{part}" if options else f"{label}:{part}", name, options)
        if is_option or colon:
            _add(options, part if is_option else tail, f"{what} is {text!r}")
    return found


def _add(options: dict[str, str], part: str, said: str) -> None:
    option, equals, value = (piece.strip() for piece in part.partition("="))
    option = option.replace("-", "_")
    if not (option and equals and value):
        raise UserError(f"{said}: {SYNTAX}")
    if option in options:
        raise UserError(f"{said}, which gives {option} twice")
    options[option] = value


def _value(option: str, value: str) -> Any:
    """The engine's own options in their types; those of methods and drafters are read by the library."""
    if option in YES_OR_NO:
        if value not in ("true", "false"):
            raise UserError(f"{option} is {value!r}, it must be true or false")
        return value == "true"
    if option in WHOLE:
        try:
            return int(value)
        except ValueError:
            raise UserError(f"{option} is {value!r}, it must be a whole number") from None
    return value


ALL = "all"


def with_rules(methods: Sequence[Contender], text: str, sampling: Sampling) -> list[Contender]:
    """Every method with every rule of `text`, but for those that draft nothing or say their own. "all": those that fit
    the method and the temperature. UserError for a rule that there is not, or that does not fit."""
    asked = [] if text.strip() == ALL else parse_options("rules", text)
    for _, name, _ in asked:
        registry.find("rules", name)
    found: list[Contender] = []
    for method in methods:
        module = registry.find("decoders", method.name)
        if module.NEEDS is None or "rule" in method.options:
            found.append(method)
            continue
        rules = asked or [(name, name, {}) for name in registry.names("rules") if _fits(name, method, sampling)]
        for label, name, values in rules:
            said = _checked(name, method, sampling)
            if said is not None:
                raise said
            joined = f"rule={label.replace(':', ',', 1)}"
            named = f"{method.label}{',' if ':' in method.label else ':'}{joined}"
            found.append(replace(method, label=named, options={**method.options, "rule": name, **values}))
    labels = [method.label for method in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UserError(f"methods and rules have {twice} twice")
    return found


def _fits(name: str, method: Contender, sampling: Sampling) -> bool:
    return _checked(name, method, sampling) is None


def _checked(name: str, method: Contender, sampling: Sampling) -> UserError | None:
    """Why a rule does not go with a method, or with the temperature; None where it does."""
    drafter = method.options.get("drafter") or default_drafter(method.name, has_draft=True)
    try:
        find_rule(name, sampling)
        check_rule(name, registry.find("decoders", method.name), str(drafter))
    except UserError as error:
        return error
    return None
