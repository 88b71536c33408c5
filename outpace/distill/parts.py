"""Tensors in one safetensors file, or in several of a bounded size with an index, as Hugging Face names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from outpace.core.errors import UserError

ABOUT, ENTRY = 1024, 160  # bytes that a file's description may take, and each tensor in it beside its name


def shared_out(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """The names in their order, in groups of at most `most` bytes with a file's description; None: one group.
    UserError where a single tensor is larger."""
    groups: list[list[str]] = [[]]
    held = ABOUT
    for name, size in sizes.items():
        taken = size + ENTRY + len(name)
        if most is not None and ABOUT + taken > most:
            raise UserError(
                f"part_size is {most / 1e6:g} MB, {name} alone needs {(ABOUT + taken) / 1e6:.3g} MB in a file"
            )
        if most is not None and groups[-1] and held + taken > most:
            groups.append([])
            held = ABOUT
        groups[-1].append(name)
        held += taken
    return groups


def part_names(stem: str, count: int) -> list[str]:
    """The files' names: one as it is, several numbered."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def save_parts(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], most: int | None, about: Mapping[str, str]
) -> dict[str, str]:
    """Writes the tensors to files of `folder` whose names begin with `stem`, with `about` in each one's description;
    which tensor is in which file. UserError where the disk refuses: what was there before stays as it was."""
    from safetensors.torch import save_file

    groups = shared_out({name: value.nbytes for name, value in tensors.items()}, most)
    names = part_names(stem, len(groups))
    unfinished = [folder / f".{name}.part" for name in names]
    try:
        for part, group in zip(unfinished, groups, strict=True):
            save_file({key: tensors[key] for key in group}, part, dict(about))
        for part, name in zip(unfinished, names, strict=True):
            part.rename(folder / name)
    except Exception as error:  # safetensors has an error class of its own
        for part in unfinished:
            part.unlink(missing_ok=True)
        raise UserError(f"{folder / names[0]} cannot be written ({error})") from error
    return {key: name for name, group in zip(names, groups, strict=True) for key in group}


def index_of(tensors: Mapping[str, Tensor], placed: Mapping[str, str]) -> str:
    """The text of an index: which tensor is in which file, and the size of all."""
    sizes = {"total_size": sum(value.nbytes for value in tensors.values())}
    return json.dumps({"metadata": sizes, "weight_map": dict(placed)}, indent=1) + "\n"
