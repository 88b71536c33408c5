"""Writes tensors to one safetensors file, or to several of limited size with an index, named as by Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from outpace.core.errors import UserError

HEADER_BYTES, ENTRY_BYTES = 1024, 160  # upper bounds of a file's header, and of each tensor's entry besides its name


def group_by_size(sizes: Mapping[str, int], max_bytes: int | None) -> list[list[str]]:
    """Split names into groups of at most `max_bytes` with a file's header, in order; one group if it is None.

    UserError if a single tensor is larger.
    """
    groups: list[list[str]] = [[]]
    total = HEADER_BYTES
    for name, size in sizes.items():
        needed = size + ENTRY_BYTES + len(name)
        if max_bytes is not None and HEADER_BYTES + needed > max_bytes:
            raise UserError(
                f"part_size is {max_bytes / 1e6:g} MB, {name} alone needs"
                f" {(HEADER_BYTES + needed) / 1e6:.3g} MB in a file"
            )
        if max_bytes is not None and groups[-1] and total + needed > max_bytes:
            groups.append([])
            total = HEADER_BYTES
        groups[-1].append(name)
        total += needed
    return groups


def save_sharded(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], max_bytes: int | None, metadata: Mapping[str, str]
) -> dict[str, str]:
    """Write the tensors to files of `folder` and return each tensor's file name.

    A single file is called `stem`.safetensors; several are numbered. UserError if writing fails; the files that were
    there before are unchanged then.
    """
    from safetensors.torch import save_file

    groups = group_by_size({name: value.nbytes for name, value in tensors.items()}, max_bytes)
    count = len(groups)
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [f"{stem}.safetensors"]
    unfinished = [folder / f".{name}.part" for name in names]
    try:
        for part, group in zip(unfinished, groups, strict=True):
            save_file({key: tensors[key] for key in group}, part, dict(metadata))
        for part, name in zip(unfinished, names, strict=True):
            part.rename(folder / name)
    except Exception as error:  # safetensors has an error class of its own
        for part in unfinished:
            part.unlink(missing_ok=True)
        raise UserError(f"{folder / names[0]} cannot be written ({error})") from error
    return {key: name for name, group in zip(names, groups, strict=True) for key in group}


def index_json(tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> str:
    """Return the text of an index file, which has each tensor's file and the total size."""
    sizes = {"total_size": sum(value.nbytes for value in tensors.values())}
    return json.dumps({"metadata": sizes, "weight_map": dict(files)}, indent=1) + "\n"
