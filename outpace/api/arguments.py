"""What `LLM` is given by other names than its own parameters: fields of `LoadOptions`, options of methods, slips."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from outpace.api.params import SamplingParams
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.models.options import LoadOptions

ALIKE = 0.8  # of a misspelt name and the one that was meant


def taken(target: Any, more: dict[str, Any], own: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """The target and the fields of `LoadOptions`, both taken out of `more`: what is left there are options of methods.
    UserError for a name that no method has, but is like one of these fields or a parameter of `own`."""
    if "model" in more and target is not None:
        raise UserError("model is another name for target, give one of them")
    target = more.pop("model", target)
    loading = [field.name for field in fields(LoadOptions)]
    changes = {name: more.pop(name) for name in loading if name in more}
    allowed = [*loading, "model", *inspect.signature(own).parameters]
    sampling = [field.name for field in fields(SamplingParams)]
    for name in more:
        if name in sampling and not registry.owners(name):
            raise UserError(f"{name} is an argument of `generate` and of `SamplingParams`, not of LLM")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=ALIKE)
        if near and not registry.owners(name):
            raise UserError(f"LLM has no argument {name!r}; did you mean {near[0]!r}?")
    return target, changes
