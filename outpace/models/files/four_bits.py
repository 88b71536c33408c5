"""Matrices by GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) in 4 bits: what their words mean.

A weight is scale * (q - zero), scale and zero those of a group of inputs of one output. GPTQ, as AutoGPTQ and GPTQModel
write it: a word of qweight [inputs / 8, outputs] holds 8 inputs, one of qzeros [groups, outputs / 8] 8 outputs, where
the format "gptq" counts zeros from 1. AWQ, as AutoAWQ's version "gemm" writes it: both hold 8 outputs, in ORDER.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files.checkpoint import OTHER_RUNTIME, Checkpoint
from outpace.models.files.reading import Raw, is_there, read_json
from outpace.models.llama.config.footprint import StoredSize
from outpace.models.llama.native.binding import load_kernels
from outpace.models.llama.weight_sources import StoredMatrix

GPTQ, AWQ = "gptq", "awq"
WHOLE = -1
GROUPS = (32, 64, 128, WHOLE)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: of the outputs whose nibbles follow each other in a word
MOST = 15


@dataclass(frozen=True)
class Scheme:
    """`group`: inputs that share a scale, WHOLE: all of them; the last of GPTQ's may have fewer. `first_zero`: what a
    stored zero point of 0 means."""

    method: str
    group: int
    first_zero: int

    def groups_of(self, inputs: int) -> np.ndarray:
        """The group of each input, where neighbours share one: int [inputs]."""
        return np.arange(inputs) // (inputs if self.group == WHOLE else self.group)


class Matrix(NamedTuple):
    """`q` uint8 [outputs, inputs], `scales` float16 and `zeros` uint8 [outputs, groups], `groups` int [inputs]."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def values(self) -> np.ndarray:
        """float32 [outputs, inputs]"""
        zeros, scales = (part[:, self.groups] for part in (self.zeros, self.scales))
        whole: np.ndarray = (self.q.astype(np.float32) - zeros) * scales.astype(np.float32)
        return whole


def read_scheme(path: Path, said: Mapping[str, Any]) -> Scheme:
    """From config.json's quantization_config; UnsupportedModel for what is not taken here."""
    method, bits, group = said.get("quant_method"), said.get("bits"), said.get("group_size")

    def check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            of = ", ".join(str(one) for one in allowed)
            said = f"{path} is quantised by {method!s:.20} with {name} {value!r:.50}, taken is {of}"
            raise UnsupportedModel(f"{said}; {OTHER_RUNTIME} may run it")

    check("quant_method", method, (GPTQ, AWQ))
    check("bits", bits, (4,))
    check("group_size", group, GROUPS)
    if method == AWQ:
        check("version", str(said.get("version", "gemm")).lower(), ("gemm",))
        return Scheme(AWQ, int(str(group)), 0)
    check("checkpoint_format", said.get("checkpoint_format", GPTQ), (GPTQ, "gptq_v2"))
    return Scheme(GPTQ, int(str(group)), 0 if said.get("checkpoint_format") == "gptq_v2" else 1)


def read_matrix(scheme: Scheme, parts: Mapping[str, np.ndarray], where: str) -> Matrix:
    """From qweight, qzeros, scales, and g_idx where there is one. UserError for parts that do not fit one another or
    are damaged, UnsupportedModel for zeros that two readers take for different ones."""
    zeros = read_zeros(scheme, parts, where)
    groups = read_groups(scheme, parts.get("g_idx"), shape_of(scheme, parts["qweight"].shape)[1], where)
    if scheme.method == AWQ:
        q = _nibbles(parts["qweight"], ORDER).T
    else:
        q = _nibbles(np.ascontiguousarray(parts["qweight"].T), range(8))
    q, scales, zeros = (np.ascontiguousarray(part) for part in (q, parts["scales"].T, zeros.T))
    return Matrix(q, scales, zeros, groups)


def read_zeros(scheme: Scheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Zero points, uint8 [groups, outputs], of parts that are found to fit one another, with sound scales. Errors as
    `read_matrix`."""
    outputs, inputs = shape_of(scheme, parts["qweight"].shape)
    count = int(scheme.groups_of(inputs)[-1]) + 1
    for name, shape in {"qzeros": (count, outputs // 8), "scales": (count, outputs)}.items():
        _check_shape(f"{where}.{name}", parts[name], shape)
    if not np.isfinite(parts["scales"]).all():
        raise UserError(f"{where}.scales is damaged: it holds values that are not finite")
    zeros = _nibbles(parts["qzeros"], _order(scheme))
    if scheme.first_zero and (zeros == MOST).any():
        said = f"qzeros holds {MOST}, and readers differ in whether that means 0 or 16"
        raise UnsupportedModel(f"{where}: {said}; {OTHER_RUNTIME} may run it")
    return zeros + np.uint8(scheme.first_zero)


def read_groups(scheme: Scheme, said: np.ndarray | None, inputs: int, where: str) -> np.ndarray:
    """The group of each input, int [inputs]; `said`: g_idx, which differs from their own order where GPTQ took the
    inputs by their weight (act-order). UserError for groups that are not there."""
    own = scheme.groups_of(inputs)
    if said is None:
        return own
    _check_shape(f"{where}.g_idx", said, (inputs,))
    if said.min() < 0 or said.max() > own[-1]:
        raise UserError(f"{where}.g_idx holds {said.min()} to {said.max()}, expected are groups from 0 to {own[-1]}")
    return said


def _check_shape(what: str, part: np.ndarray, expected: tuple[int, ...]) -> None:
    if part.shape != expected:
        raise UserError(f"{what} has shape {list(part.shape)}, expected {list(expected)}")


def shape_of(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """Outputs and inputs of a matrix whose qweight has this shape."""
    return (8 * shape[1], shape[0]) if scheme.method == AWQ else (shape[1], 8 * shape[0])


def _order(scheme: Scheme) -> tuple[int, ...]:
    return ORDER if scheme.method == AWQ else tuple(range(8))


def _nibbles(words: np.ndarray, order: Any) -> np.ndarray:
    """uint8 [rows, 8 columns] from words [rows, columns]: nibble i is number order[i] of its eight."""
    found = np.empty((*words.shape, 8), np.uint8)
    for place, number in enumerate(order):
        found[..., number] = words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
    return found.reshape(len(words), -1)


PART = 32  # inputs whose nibbles lie together
NARROW, WIDE = "U4_32", "U4_64"  # the kernels' names
INPUTS = {NARROW: 32, WIDE: 64}  # of a block
BYTES = {kind: 4 + inputs // 2 for kind, inputs in INPUTS.items()}  # of a block


def kind_of(scheme: Scheme, inputs: int) -> str | None:
    """The format of a matrix with so many inputs whose groups are of neighbours; None where none fits."""
    kinds = (WIDE, NARROW) if scheme.group == WHOLE or scheme.group % INPUTS[WIDE] == 0 else (NARROW,)
    return next((kind for kind in kinds if inputs % INPUTS[kind] == 0), None)


def held_bytes(kind: str, count: int) -> int:
    """Of so many weights."""
    return count // INPUTS[kind] * BYTES[kind]


def blocks_of(kind: str, scheme: Scheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """uint8 [outputs, bytes of a row] of the parts of a matrix, as read_matrix takes them; errors as there."""
    convert = _converter()
    if convert is None:
        return by_numpy(kind, read_matrix(scheme, parts, where))
    read_zeros(scheme, parts, where)
    outputs, inputs = shape_of(scheme, parts["qweight"].shape)
    types = {"qweight": np.uint32, "qzeros": np.uint32, "scales": np.uint16}
    held = [np.require(parts[name], requirements=["C", "A"]).view(dtype) for name, dtype in types.items()]
    data = np.empty((outputs, held_bytes(kind, inputs)), np.uint8)
    group = inputs if scheme.group == WHOLE else scheme.group
    convert(kind, *held, group, scheme.method == AWQ, scheme.first_zero, data)
    return data


def _converter() -> Any:
    """The kernels' way from words to blocks; None where they are not there, or were built before they had one."""
    try:
        return getattr(load_kernels(), "blocks_of_words", None)
    except UserError:
        return None


def by_numpy(kind: str, matrix: Matrix) -> np.ndarray:
    """As `blocks_of`, slower; its definition."""
    outputs = len(matrix.q)
    groups = matrix.groups[:: INPUTS[kind]]
    numbers = (matrix.scales, -matrix.zeros.astype("<f2"))
    q = matrix.q.reshape(outputs, len(groups), -1, PART)
    data = np.empty((outputs, len(groups), BYTES[kind]), np.uint8)
    data[..., :4] = np.stack([part.astype("<f2")[:, groups] for part in numbers], axis=-1).view(np.uint8)
    data[..., 4:] = (q[..., : PART // 2] | q[..., PART // 2 :] << 4).reshape(*data.shape[:2], -1)
    return data.reshape(outputs, -1)


INPUT_ORDER = "g_idx"
NEEDED, ALLOWED = ("qweight", "qzeros", "scales"), (INPUT_ORDER,)
TYPES = {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}
DIMENSIONS = {part: 1 if part == INPUT_ORDER else 2 for part in TYPES}
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
        said = self._part(name, INPUT_ORDER) if INPUT_ORDER in self._parts(name) else None
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
