"""Models in several .gguf files, as `llama-gguf-split` and the hub's repositories have them: the first one has the
metadata, all have tensors. Their names end in -00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

from outpace.core.errors import UserError
from outpace.models.files.gguf.header import GgufHeader, TensorEntry, open_gguf

P = TypeVar("P", bound=PurePath)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_names(name: str) -> list[str]:
    """The names of all parts of a model of which this is one, by the names alone; the name itself of any other file."""
    found = _NAME.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def part_files(path: P) -> list[P]:
    """The same of files."""
    return [path.with_name(name) for name in part_names(path.name)]


@contextmanager
def open_model(path: Path) -> Iterator[GgufHeader]:
    """As `open_gguf`, of all files of a model whose first one is `path`; UserError names a part that is missing."""
    with ExitStack() as stack:
        first = stack.enter_context(open_gguf(path))
        count = first.metadata.get(COUNT, 0)
        if count in (0, 1):
            yield first
            return
        files = part_files(path)
        _check_first(first, count, files)
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            raise UserError(f"{missing} is missing: {path} is the first of {count} parts of a model")
        yield joined(first, [stack.enter_context(open_gguf(file)) for file in files[1:]])


def joined(first: GgufHeader, further: Sequence[GgufHeader]) -> GgufHeader:
    """One header of all parts; UserError where they do not belong together."""
    tensors: dict[str, TensorEntry] = dict(first.tensors)
    for number, part in enumerate(further, 1):
        said, expected = (part.metadata.get(NUMBER), part.metadata.get(COUNT)), (number, len(further) + 1)
        if said != expected:
            has, needs = (f"{NUMBER} {one} and {COUNT} {other}" for one, other in (said, expected))
            raise UserError(f"{part.path} does not belong to {first.path}: it has {has}, expected are {needs}")
        for name, entry in part.tensors.items():
            if name in tensors:
                raise UserError(f"{part.path} holds the tensor {name!r}, and so does another part")
            tensors[name] = replace(entry, part=number)
    count = first.metadata.get(TENSORS, len(tensors))
    if count != len(tensors):
        raise UserError(f"{first.path} and its parts hold {len(tensors)} tensors, {TENSORS} is {count!r:.50}")
    return replace(first, tensors=tensors, further=tuple(further))


def _check_first(header: GgufHeader, count: Any, files: Sequence[Path]) -> None:
    path, number = header.path, header.metadata.get(NUMBER, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not isinstance(number, int):
        raise UserError(f"{path} is damaged: {NUMBER} is {number!r:.50} and {COUNT} {count!r:.50}, both are numbers")
    if len(files) != count:
        ending = f"-00001-of-{count:05}.gguf"
        raise UserError(f"{path} is one of {count} parts of a model, so the first one's name must end in {ending}")
    if number or path.name != files[0].name:
        raise UserError(f"{path} is part {number + 1} of {count}: name the first one, {files[0]}")
