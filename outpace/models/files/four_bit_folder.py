"""A folder of safetensors by GPTQ or AWQ, with the names and shapes that its model had before: as any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.four_bit_blocks import INPUTS, blocks_of, held_bytes, kind_of
from outpace.models.files.four_bits import AWQ, GPTQ, Matrix, Scheme, read_groups, read_matrix, read_scheme, shape_of
from outpace.models.files.mapped import Raw
from outpace.models.files.reading import is_there, read_json
from outpace.models.llama.config.footprint import StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

ORDER = "g_idx"
NEEDED, ALLOWED = ("qweight", "qzeros", "scales"), (ORDER,)
TYPES = {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}
DIMENSIONS = {part: 1 if part == ORDER else 2 for part in TYPES}
SAID = "quantization_config"


def is_four_bits(path: Path) -> bool:
    """Whether a folder's config.json says so."""
    if not is_there(path / "config.json"):
        return False
    said = read_json(path / "config.json").get(SAID)
    return isinstance(said, Mapping) and said.get("quant_method") in (GPTQ, AWQ)


class FourBitFolder(Checkpoint):
    """An open folder, whose matrices in 4 bits are read as the floats that they mean, or as blocks of these values."""

    scheme: Scheme

    @classmethod
    def open(cls, path: Path | str) -> FourBitFolder:
        """UserError: torn, or not such a folder; UnsupportedModel: quantised in a way that is not taken here."""
        found = super().open(path)
        assert isinstance(found, FourBitFolder)
        found.config = {name: value for name, value in found.config.items() if name != SAID}
        return found

    @staticmethod
    def _check_config(path: Path, config: Mapping[str, Any]) -> None:
        read_scheme(path, config[SAID])

    def _check_layers(self) -> None:
        super()._check_layers()
        self.scheme = read_scheme(self.path, self.config[SAID])

    def names(self) -> list[str]:
        """Those of the model: a matrix in 4 bits has one."""
        parts = {f"{self._stem(name)}.{part}" for name in self._matrices() for part in (*NEEDED, *ALLOWED)}
        return sorted({*self._shards}.difference(parts).union(self._matrices()))

    def file_of(self, name: str) -> Path:
        """As in any folder."""
        return super().file_of(f"{self._stem(name)}.qweight" if self._is_packed(name) else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As it was before."""
        if self._is_packed(name):
            return shape_of(self.scheme, super().shape(f"{self._stem(name)}.qweight"))
        return super().shape(name)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """As of any folder; UnsupportedModel for parts of other types."""
        packed = {name: shape for name, shape in shapes.items() if self._is_packed(name)}
        super().check_shapes({name: shape for name, shape in shapes.items() if name not in packed})
        for name, expected in packed.items():
            for part in self._parts(name):
                held = self._slice(f"{self._stem(name)}.{part}")
                where = f"{self.file_of(name)}: tensor '{self._stem(name)}.{part}'"
                kind, sizes = held.get_dtype(), held.get_shape()
                if kind != TYPES[part]:
                    raise UnsupportedModel(f"{where} has type {kind}, taken is {TYPES[part]}")
                if len(sizes) != DIMENSIONS[part]:
                    raise UserError(f"{where} has shape {list(sizes)}, expected are {DIMENSIONS[part]} dimensions")
            is_cut = self.scheme.method == AWQ and expected[1] % self.scheme.group  # -1 divides all
            if self.shape(name) != tuple(expected) or is_cut or expected[0] % 8:
                where = f"{self.file_of(name)}: tensor {name!r}"
                found = f"shape {list(self.shape(name))} in groups of {self.scheme.group}"
                raise UserError(f"{where} has {found}, expected {list(expected)}")

    def held(self, name: str) -> StoredSize:
        """Of a matrix in 4 bits: the format of its blocks, and their bytes."""
        if not self._is_packed(name):
            return super().held(name)
        kind, count = self._kind(name), prod(self.shape(name))
        return StoredSize(kind, held_bytes(kind, count) if kind in INPUTS else count)

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """A matrix in 4 bits as blocks of the same values where there are such; anything else as in any folder."""
        if not self._is_packed(name):
            return super().weight(name)
        rows, columns = self.shape(name)
        kind, data = self._kind(name), np.empty((rows, 0), np.uint8)
        if kind in INPUTS:
            data = blocks_of(kind, self.scheme, self._values(name), self._where(name))
            self._forget_parts(name)
        order, read = np.arange(rows, dtype=np.int32), partial(self.array, name)
        return StoredMatrix(
            self.file_of(name), name, kind, data, order, columns, read, partial(self._forget_parts, name)
        )

    def raw(self, name: str) -> Raw:
        """As `array` where it is a matrix in 4 bits."""
        return Raw("F32", self.array(name)) if self._is_packed(name) else super().raw(name)

    def array(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        return self._matrix(name).values() if self._is_packed(name) else super().array(name)

    def tensor(self, name: str) -> torch.Tensor:
        """As `array` where it is a matrix in 4 bits."""
        return torch.from_numpy(self.array(name)) if self._is_packed(name) else super().tensor(name)

    def _matrix(self, name: str) -> Matrix:
        return read_matrix(self.scheme, self._values(name), self._where(name))

    def _kind(self, name: str) -> str:
        """The format of a matrix in blocks; or, of one that has none, why."""
        method, inputs = self.scheme.method.upper(), self.shape(name)[1]
        said = self._part(name, ORDER) if ORDER in self._parts(name) else None
        groups = read_groups(self.scheme, said, inputs, self._where(name))
        if (groups != self.scheme.groups_of(inputs)).any():
            return f"{method} in act-order"
        return kind_of(self.scheme, inputs) or f"{method} with {inputs} inputs"

    def _values(self, name: str) -> dict[str, np.ndarray]:
        """The parts of a matrix in 4 bits, mapped from the file."""
        return {part: self._part(name, part) for part in self._parts(name)}

    def _part(self, name: str, part: str) -> np.ndarray:
        return self._mapped(f"{self._stem(name)}.{part}").values

    def _forget_parts(self, name: str) -> None:
        self._forget(*(f"{self._stem(name)}.{part}" for part in self._parts(name)))

    def _where(self, name: str) -> str:
        return f"{self.file_of(name)}: {self._stem(name)}"

    def _parts(self, name: str) -> list[str]:
        return [*NEEDED, *(part for part in ALLOWED if f"{self._stem(name)}.{part}" in self._shards)]

    def _matrices(self) -> list[str]:
        return [name.removesuffix("qweight") + "weight" for name in self._shards if name.endswith(".qweight")]

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and f"{self._stem(name)}.qweight" in self._shards

    @staticmethod
    def _stem(name: str) -> str:
        return name.removesuffix(".weight")
