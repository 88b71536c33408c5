"""Reads the sampling parameters that a model's files recommend, which vLLM and llama.cpp use as defaults.

A folder has them in generation_config.json, where they apply if `do_sample` is true. A .gguf file has metadata
`general.sampling.*`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.core.arrays import as_whole
from outpace.core.errors import UserError, unknown
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments

AUTO = "auto"
SOURCES = (AUTO, "none", "vllm")  # vllm: vLLM's word for none
FILE = "generation_config.json"
PREFIX = "general.sampling."
GGUF_NAMES = {  # by the names of `SamplingParams`
    "temperature": f"{PREFIX}temp",
    "top_k": f"{PREFIX}top_k",
    "top_p": f"{PREFIX}top_p",
    "min_p": f"{PREFIX}min_p",
    "repetition_penalty": f"{PREFIX}penalty_repeat",
}


def check_source(source: str) -> None:
    """Raise UserError unless `source` is a value of --generation-config."""
    if source not in SOURCES:
        raise unknown("generation config", source, SOURCES)


def recommended_sampling(path: Path) -> dict[str, Any]:
    """Return what a model folder or .gguf file recommends, by the names of `SamplingParams`; {} if it is nothing.

    UserError names the file, the field, and a value that is not allowed.
    """
    try:
        return _of_gguf(path) if path.is_file() else _of_folder(path / FILE)
    except UserError as error:
        raise UserError(f"{error}; --generation-config none leaves it out") from error


def _of_folder(file: Path) -> dict[str, Any]:
    from outpace.models.files.reading import read_optional_json

    given = read_optional_json(file)
    if (samples := given.get("do_sample")) not in (None, True, False):
        raise UserError(f"{file}: do_sample is {samples!r:.50}, it must be true or false")
    return {"temperature": 1.0, **_checked(file, given, {name: name for name in GGUF_NAMES})} if samples else {}


def _of_gguf(file: Path) -> dict[str, Any]:
    from outpace.models.files.gguf.config import shortest_decimal
    from outpace.models.files.gguf.header import open_gguf

    given = {key: shortest_decimal(value) for key, value in open_gguf(file).metadata.items() if key.startswith(PREFIX)}
    for key, value in given.items():
        if value and key not in GGUF_NAMES.values():
            warnings.warn(f"{file}: {key} {value!r:.50} is not supported and left out", stacklevel=2)
    return _checked(file, given, GGUF_NAMES)


def _checked(file: Path, given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters that `given` has under these names; UserError for a value that is not allowed."""
    found = {name: given[key] for name, key in names.items() if given.get(key) is not None}
    if "top_k" in found:
        found["top_k"] = 0 if found["top_k"] == -1 else as_whole(found["top_k"])
    for name, value in found.items():
        try:
            Adjustments(value) if name == "repetition_penalty" else Sampling(**{name: value})
        except UserError as error:
            raise UserError(f"{file}: {str(error).replace(name, names[name], 1)}") from error
    return found
