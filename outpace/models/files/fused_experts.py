"""Experts of safetensors files that store those of a layer as one tensor, each under a name of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.models.files.mxfp4 import BLOCK, BLOCK_BYTES, MXFP4, dequantise, to_ggml
from outpace.models.files.reading import RawTensor, SafetensorsEntry, SafetensorsFile

if TYPE_CHECKING:
    from torch import Tensor

FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|)")
Places = dict[str, tuple[Any, str]]  # by a tensor's name: its file, and its name there


class _Part(NamedTuple):
    """Where one expert's matrix or bias is: in a tensor of a file, the expert's number, and its rows if it is not all
    of the expert's. `has_inputs_first`: the tensor is transposed. `exponents`: the tensor of MXFP4's exponents."""

    file: SafetensorsFile
    stored: str
    number: int
    rows: slice
    has_inputs_first: bool = False
    exponents: str = ""


class FusedExperts:
    """The parts of tensors that hold all experts of a layer, with the interface of a `SafetensorsFile`."""

    def __init__(self, file: SafetensorsFile) -> None:
        self.path, self.entries = file.path, dict[str, SafetensorsEntry]()
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, part: _Part) -> None:
        """Add a part under this name."""
        kind, shape, start, end = part.file.entries[part.stored]
        value_bytes = (end - start) / prod(shape)
        if part.exponents:
            kind, shape, value_bytes = MXFP4, (*shape[:2], shape[2] * BLOCK), BLOCK_BYTES / BLOCK
        own = shape[:0:-1] if part.has_inputs_first else shape[1:]
        own = (len(range(*part.rows.indices(own[0]))), *own[1:])
        self.entries[name] = SafetensorsEntry(kind, own, 0, int(prod(own) * value_bytes))
        self._parts[name] = part

    def raw(self, name: str) -> RawTensor:
        """Return a part as a view of the file if its rows are there, else as a copy; MXFP4 as float32."""
        part = self._parts[name]
        if part.exponents:
            return RawTensor("F32", dequantise(self.blocks(name)))
        kind, values = part.file.raw(part.stored)
        return RawTensor(kind, np.ascontiguousarray(_cut(values, part)))

    def tensor(self, name: str) -> Tensor:
        """Return a part for torch."""
        part = self._parts[name]
        if part.exponents:
            return torch.from_numpy(self.raw(name).values)
        found: Tensor = _cut(part.file.tensor(part.stored), part)
        return found

    def blocks(self, name: str) -> np.ndarray:
        """Return a matrix in MXFP4 as GGUF's blocks, uint8 [rows, bytes]"""
        part = self._parts[name]
        blocks, exponents = (part.file.raw(stored).values for stored in (part.stored, part.exponents))
        return to_ggml(_cut(blocks, part), _cut(exponents, part))

    def forget(self, name: str) -> None:
        """Release the memory of the expert that a part belongs to."""
        part = self._parts[name]
        for stored in filter(None, (part.stored, part.exponents)):
            part.file.forget(stored, part.number, part.file.entries[stored].shape[0])


def _cut(values: Any, part: _Part) -> Any:
    own = values[part.number]
    return (own.T if part.has_inputs_first else own)[part.rows]


def split_experts(places: Mapping[str, tuple[Any, str]], is_gpt_oss: bool) -> Places:
    """Return the places of all tensors, those of fused experts by expert.

    gpt-oss alternates rows of gates and ups and, but for MXFP4, stores matrices with the inputs first. UserError for
    MXFP4 whose blocks and exponents do not fit.
    """
    found, files = dict(places), dict[int, FusedExperts]()
    for name, (file, stored) in places.items():
        match = FUSED.fullmatch(name)
        if match is None or not isinstance(file, SafetensorsFile):
            continue
        prefix, matrix, form = match.groups()
        shape, exponents = file.entries[stored].shape, ""
        if form == "_blocks":
            exponents = _exponents(places, name, file, shape)
            del found[name.replace("_blocks", "_scales")]
        elif len(shape) != (2 if form else 3):
            raise UserError(
                f"{file.path}: tensor {stored!r} has shape {list(shape)}, expected {3 - bool(form)} dimensions"
            )
        del found[name]
        own = files.setdefault(id(file), FusedExperts(file))
        is_transposed = is_gpt_oss and not form
        outputs = shape[2] if is_transposed else shape[1]
        rows = {"down": slice(None)}
        if matrix == "gate_up":
            rows = {"gate": slice(outputs // 2), "up": slice(outputs // 2, None)}
            if is_gpt_oss:
                rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for number in range(shape[0]):
            for part, its_rows in rows.items():
                named = f"{prefix}.{number}.{part}_proj.{'bias' if form == '_bias' else 'weight'}"
                own.add(named, _Part(file, stored, number, its_rows, is_transposed, exponents))
                found[named] = own, named
    return found


def _exponents(places: Mapping[str, tuple[Any, str]], name: str, file: SafetensorsFile, shape: tuple[int, ...]) -> str:
    """Return the name of the tensor of exponents of MXFP4 blocks; UserError if they do not fit."""
    other = name.replace("_blocks", "_scales")
    where = f"{file.path}: tensor {name!r}"
    if len(shape) != 4 or shape[-1] != BLOCK // 2:
        raise UserError(f"{where} has shape {list(shape)}, MXFP4 has blocks of {BLOCK // 2} bytes")
    if other not in places or places[other][0] is not file:
        raise UserError(f"{where} has no exponents: the file holds no tensor {other!r}")
    found = file.entries[places[other][1]]
    for one, stored in ((name, places[name][1]), (other, places[other][1])):
        if (kind := file.entries[stored].kind) != "U8":
            raise UserError(f"{file.path}: tensor {one!r} has type {kind}, expected U8")
    if found.shape != shape[:-1]:
        raise UserError(f"{where} has blocks {list(shape[:-1])}, and {other!r} has exponents {list(found.shape)}")
    return places[other][1]
