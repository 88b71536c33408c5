"""A folder of safetensors by GPTQ or AWQ, with the names and shapes that its model had before: as any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.four_bits import AWQ, GPTQ, Matrix, Scheme, read_matrix, read_scheme, shape_of
from outpace.models.files.reading import is_there, read_json
from outpace.models.llama.footprint import Held

NEEDED, ALLOWED = ("qweight", "qzeros", "scales"), ("g_idx",)
TYPES = {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}
SAID = "quantization_config"


def is_four_bits(path: Path) -> bool:
    """Whether a folder's config.json says so."""
    if not is_there(path / "config.json"):
        return False
    said = read_json(path / "config.json").get(SAID)
    return isinstance(said, Mapping) and said.get("quant_method") in (GPTQ, AWQ)


class FourBitFolder(Checkpoint):
    """An open folder, whose matrices in 4 bits are read as the floats that they mean."""

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
                kind = self._slice(f"{self._stem(name)}.{part}").get_dtype()
                if kind != TYPES[part]:
                    where = f"{self.file_of(name)}: tensor '{self._stem(name)}.{part}'"
                    raise UnsupportedModel(f"{where} has type {kind}, taken is {TYPES[part]}")
            if self.shape(name) != tuple(expected) or expected[1] % self.scheme.group or expected[0] % 8:
                where = f"{self.file_of(name)}: tensor {name!r}"
                found = f"shape {list(self.shape(name))} in groups of {self.scheme.group}"
                raise UserError(f"{where} has {found}, expected {list(expected)}")

    def held(self, name: str) -> Held:
        """What a matrix takes in the file."""
        if not self._is_packed(name):
            return super().held(name)
        outputs, inputs = self.shape(name)
        return Held(self.scheme.method, outputs * inputs // 2 + outputs * inputs // self.scheme.group * 5 // 2)

    def array(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        return self._matrix(name).values() if self._is_packed(name) else super().array(name)

    def tensor(self, name: str) -> torch.Tensor:
        """As `array` where it is a matrix in 4 bits."""
        return torch.from_numpy(self.array(name)) if self._is_packed(name) else super().tensor(name)

    def _matrix(self, name: str) -> Matrix:
        stem = self._stem(name)
        parts = {part: self._file(f"{stem}.{part}").get_tensor(f"{stem}.{part}") for part in self._parts(name)}
        return read_matrix(self.scheme, parts, f"{self.file_of(name)}: {stem}")

    def _parts(self, name: str) -> list[str]:
        return [*NEEDED, *(part for part in ALLOWED if f"{self._stem(name)}.{part}" in self._shards)]

    def _matrices(self) -> list[str]:
        return [name.removesuffix("qweight") + "weight" for name in self._shards if name.endswith(".qweight")]

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and f"{self._stem(name)}.qweight" in self._shards

    @staticmethod
    def _stem(name: str) -> str:
        return name.removesuffix(".weight")
