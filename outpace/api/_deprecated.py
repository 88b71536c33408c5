"""Names of release 0.1 that still work, with a DeprecationWarning; they go with 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from outpace.api.params import SamplingParams

OPTIONS = {"include_stop": "include_stop_str_in_output", "asking": "sampling_params"}


class Asking(SamplingParams):
    """SamplingParams by its old name."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **renamed(options, 4))

    @property
    def include_stop(self) -> bool:
        """`include_stop_str_in_output` by its old name."""
        return self.include_stop_str_in_output


def renamed(options: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Options by name, the old names replaced."""
    for old in OPTIONS.keys() & options.keys():
        warn(f"the option {old}", OPTIONS[old], stacklevel)
    return {OPTIONS.get(name, name): value for name, value in options.items()}


def warn(old: str, new: str, stacklevel: int) -> None:
    """Tells of an old name; `stacklevel` leads to the user's line, 2 being the caller of this function."""
    warnings.warn(f"{old} is deprecated, its name is {new} now", DeprecationWarning, stacklevel=stacklevel)
