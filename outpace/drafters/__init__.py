"""Drafters propose tokens. Every file here without an underscore is one drafter, found by its name.

To write another one, subclass `core.types.Drafter`, whose docstrings are the contract: `open` returns the state of a
request, `grow` adds nodes to token trees, `observe` follows what the target accepted, `close` ends the request. The
module needs an `Options` dataclass and, if it is built from more than these, a function `build(options, given=...)`;
see `core/registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.core.drafting import BuildContext
    from outpace.core.types import Drafter


def drafter_names(drafter: str) -> list[str]:
    """Split a comma-separated list of drafters from which each request chooses; UserError for a repeated name."""
    from outpace.core.errors import UserError

    names = drafter.split(",")
    if len(set(names)) < len(names):
        raise UserError(f"drafter {drafter!r} names one twice, requests choose among different ones")
    return names


def drafter_modules(drafter: str) -> dict[str, ModuleType]:
    """Return the modules of all drafters that a name mentions, including those joined by "+"."""
    from outpace.core import registry

    parts = (part for name in drafter_names(drafter) for part in name.split("+"))
    return {part: registry.find("drafters", part) for part in parts}


def build_drafter(name: str, given: BuildContext, values: Mapping[str, Any]) -> Drafter:
    """Build one drafter, or several joined by "+" that share a tree, those without a model first."""
    from outpace.core import registry
    from outpace.drafters._composite import SharedTree

    parts = []
    for part, module in drafter_modules(name).items():
        build, options = getattr(module, "build", None), registry.build_options(module, values)
        parts.append(build(options, given=given) if build else registry.drafter_class(part)(options))
    parts.sort(key=lambda part: part.capabilities.runs_model)
    return parts[0] if len(parts) == 1 else SharedTree(parts)
