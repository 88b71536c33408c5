"""Methods with rules: each method that leaves its rule open is measured with each of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outpace.bench.contenders import Contender, parse_options
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.sampling import Sampling
from outpace.engine.build import check_rule, default_drafter, find_rule

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
