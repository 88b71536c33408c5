"""Parses what a bench measures: outpace's methods with their options and rules, and other engines (peers)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from outpace.bench import peers
from outpace.core import registry
from outpace.core.errors import UserError, unknown, without_keys
from outpace.core.sampling import Sampling
from outpace.engine.build import check_rule, default_drafter, default_rule, find_rule

PLAIN = "autoregressive"
AUTO = "auto"
ALL = "all"
SYNTAX = "write NAME or NAME:OPTION=VALUE,OPTION=VALUE, joined by commas, as in card:drafter=model+ngram,nodes=8"
GUESS = "guess"  # option: every n-th token of the predicted answer is replaced by a wrong one
TEMPERATURE = "temperature"  # option: replaces the bench's temperature
INTEGER_OPTIONS = ("nodes", "draft_threads", GUESS)  # of the engine or the bench, not of a method
BOOLEAN_OPTIONS = ("profile",)
TRAINED_RULES = ("judge",)  # rules that need a file


@dataclass(frozen=True)
class Contender:
    """One method or peer of a bench. `label` is what the user wrote; `options` are library options by name."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_peer: bool = False

    @property
    def guess(self) -> int:
        """The distance of wrong tokens in the prediction that the method gets beforehand; 0: it gets no prediction."""
        return int(self.options.get(GUESS, 0))

    @property
    def temperature(self) -> float | None:
        """The temperature of its answers; None: the bench's."""
        found: float | None = self.options.get(TEMPERATURE)
        return found

    def prediction(self, answer: Sequence[int]) -> list[int]:
        """Return plain decoding's answer with every `guess`-th token replaced by 0."""
        return [token if place % self.guess else 0 for place, token in enumerate(answer, 1)]


def parse_methods(text: str, common: Mapping[str, Any]) -> list[Contender]:
    """Parse outpace's methods; plain decoding is always included and comes first, as the baseline.

    `common` options apply to each method with a drafter that does not set them itself; a worker applies only to
    methods that use one. UserError for an unknown name, or for a worker that no method uses.
    """
    found = {PLAIN: Contender(PLAIN, PLAIN)}
    for label, name, own in parse_options("methods", text):
        drafting = registry.find("decoders", name).drafting
        values: dict[str, Any] = {option: _value(option, value) for option, value in own.items()}
        if name == PLAIN and not values:
            continue
        label = without_keys(label)
        if label in found:
            raise UserError(f"methods has {label} twice")
        shared = (
            {} if drafting is None else {n: v for n, v in common.items() if n != "worker" or drafting == "parallel"}
        )
        found[label] = Contender(label, name, {**shared, **values})
    if "worker" in common and all("worker" not in contender.options for contender in found.values()):
        raise UserError(f"methods is {text!r}, none of them has a worker: leave out worker {common['worker']!r}")
    return _with_baselines(list(found.values()))


def baseline(label: str) -> str:
    """Return the label of plain decoding at the temperature of the method with this label."""
    temperature = parse_options("methods", label)[-1][2].get(TEMPERATURE)
    return PLAIN if temperature is None else f"{PLAIN}:{TEMPERATURE}={float(temperature):g}"


def _with_baselines(methods: Sequence[Contender]) -> list[Contender]:
    """Return the methods, preceded by plain decoding at each of their temperatures."""
    found = {one.label: one for one in methods if one.name == PLAIN}
    for one in methods:
        label = baseline(one.label)
        if label not in found:
            found[label] = Contender(label, PLAIN, {TEMPERATURE: one.temperature})
    return [*found.values(), *(one for one in methods if one.name != PLAIN)]


def is_lossy(contender: Contender) -> bool:
    """Whether a method uses a lossy rule, so that its text may differ from the target's."""
    if contender.is_peer:
        return False
    rule = default_rule(registry.find("decoders", contender.name), str(contender.options.get("rule", AUTO)))
    return rule != AUTO and not registry.describe("rules", rule).lossless


def is_lossy_label(label: str) -> bool:
    """Whether the method that a table's label describes is lossy."""
    return is_lossy(parse_methods(label, {})[-1])


def parse_peers(text: str) -> list[Contender]:
    """Parse the names of other engines."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in peer_names():
            raise unknown("peer", name, peer_names())
        if names.count(name) > 1:
            raise UserError(f"peers has {name} twice")
    return [Contender(name, name, is_peer=True) for name in names]


def peer_names() -> list[str]:
    """Return the names of all peers, installed or not."""
    return sorted(found.name for found in pkgutil.iter_modules(peers.__path__) if not found.name.startswith("_"))


def find_peer(name: str) -> ModuleType:
    """Import a peer's module."""
    return importlib.import_module(f"{peers.__name__}.{name}")


def parse_options(what: str, text: str) -> list[tuple[str, str, dict[str, str]]]:
    """Parse a list of NAME:OPTION=VALUE,... into (label, name, options); UserError for another form.

    A part with "=" and without ":" is a further option of the name before it.
    """
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
            _add_option(options, part if is_option else tail, f"{what} is {text!r}")
    return found


def _add_option(options: dict[str, str], part: str, context: str) -> None:
    option, equals, value = (piece.strip() for piece in part.partition("="))
    option = option.replace("-", "_")
    if not (option and equals and value):
        raise UserError(f"{context}: {SYNTAX}")
    if option in options:
        raise UserError(f"{context}, which gives {option} twice")
    options[option] = value


def _value(option: str, value: str) -> Any:
    """Convert the engine's own options; the library converts those of methods and drafters itself."""
    if option in BOOLEAN_OPTIONS:
        if value not in ("true", "false"):
            raise UserError(f"{option} is {value!r}, it must be true or false")
        return value == "true"
    numeric = float if option == TEMPERATURE else int if option in INTEGER_OPTIONS else None
    if numeric is None:
        return value
    try:
        return numeric(value)
    except ValueError:
        raise UserError(f"{option} is {value!r}, it must be a {'whole ' * (numeric is int)}number") from None


def with_rules(methods: Sequence[Contender], text: str, sampling: Sampling) -> list[Contender]:
    """Combine each method with each rule of `text`, except methods that draft nothing or name a rule themselves.

    "all" means the rules that fit the method and the temperature, without those that need a file. A named rule that
    does not work at this temperature is measured at 1 or 0 instead. If all rules at a temperature are lossy, the
    lossless default rule is added. UserError for a rule that is unknown or does not fit.
    """
    chosen = [] if text.strip() == ALL else parse_options("rules", text)
    for _, name, _ in chosen:
        registry.find("rules", name)
    found: list[Contender] = []
    for method in methods:
        if registry.find("decoders", method.name).drafting is None or "rule" in method.options:
            found.append(method)
            continue
        names = [name for name in registry.names("rules") if name not in TRAINED_RULES]
        fitting = [name for name in names if _rule_problem(name, method, sampling) is None]
        rules = [(name, values) for _, name, values in chosen] or [(name, {}) for name in fitting]
        own = [_with_rule(method, name, values, sampling) for name, values in rules]
        for temperature in dict.fromkeys(one.temperature for one in own):
            some = [one for one in own if one.temperature == temperature]
            if all(map(is_lossy, some)):
                values = {} if temperature is None else {TEMPERATURE: f"{temperature:g}"}
                name = "greedy" if _sampling(some[0], sampling).is_greedy else "gumbel"
                found.append(_with_rule(method, name, values, sampling))
            found += some
    found = _with_baselines(found)
    labels = [method.label for method in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UserError(f"methods and rules have {twice} twice")
    return found


def _with_rule(method: Contender, name: str, values: Mapping[str, str], sampling: Sampling) -> Contender:
    """Return a method with a rule, at another temperature if the rule needs one; UserError if it does not fit."""
    given = {"rule": name, **values}
    label = f"{method.label}{',' if ':' in method.label else ':'}{','.join(map('='.join, given.items()))}"
    options = {option: _value(option, value) for option, value in given.items()}
    joined = replace(method, label=label, options={**method.options, **options})
    problem = _rule_problem(name, joined, sampling)
    if problem is not None and joined.temperature is None:
        return _with_rule(method, name, {**values, TEMPERATURE: "1" if sampling.is_greedy else "0"}, sampling)
    if problem is not None:
        raise problem
    return joined


def _sampling(method: Contender, sampling: Sampling) -> Sampling:
    return sampling if method.temperature is None else Sampling(method.temperature)


def _rule_problem(name: str, method: Contender, sampling: Sampling) -> UserError | None:
    """Return why a rule does not fit a method or the temperature; None if it does."""
    drafter = method.options.get("drafter") or default_drafter(method.name, "model")
    try:
        check_rule(name, registry.find("decoders", method.name), str(drafter))
        find_rule(name, _sampling(method, sampling))
    except UserError as error:
        return error
    return None
