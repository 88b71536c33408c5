"""Sampling parameters as the library's callers give them: a record or options by name, for all prompts or each."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from outpace.api._deprecated import renamed
from outpace.api.params import SamplingParams, params_of
from outpace.core.errors import UserError


def given_params(given: Any, options: Mapping[str, Any], stacklevel: int = 5) -> SamplingParams:
    """From the record, or from options by name; called by what the user calls."""
    options = renamed(options, stacklevel)
    if given is None:
        given = options.pop("sampling_params", None)  # by its old name
    if given is not None and options:
        raise UserError(f"give SamplingParams or options by name, not both: {', '.join(options)}")
    params = params_of(options) if given is None else given
    if not isinstance(params, SamplingParams):
        said = reprlib.repr(params)
        raise UserError(f"sampling_params is {said}, it must be SamplingParams; or give options by name")
    return params


def params_of_each(given: Any, options: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """Those of each prompt, which may share one record."""
    if not isinstance(given, (list, tuple)):
        return [given_params(given, options, 6)] * count
    if len(given) != count:
        raise UserError(f"there are {len(given)} sampling_params for {count} prompts, give one for all or one for each")
    return [given_params(params, options) for params in given]
