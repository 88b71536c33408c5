"""Reads matrices quantised to 4 bits by GPTQ (arXiv:2210.17323) or AWQ (arXiv:2306.00978), as a checkpoint.

A weight is scale * (q - zero); scale and zero belong to one output and a group of inputs. GPTQ, as AutoGPTQ and
GPTQModel write it: a word of qweight [inputs / 8, outputs] holds 8 inputs, a word of qzeros [groups, outputs / 8] holds
8 outputs, and the format "gptq" stores zeros less one. AWQ, as AutoAWQ's version "gemm" writes it: both hold 8 outputs,
in AWQ_ORDER.

The native kernels read these matrices without rounding, in blocks of 32 or 64 inputs: scale and -zero of an output in
half precision, then nibbles as in GGUF (of every 32 inputs, the first 16 in the low halves of 16 bytes). Q4_1 itself
does not fit: its second number would be -scale * zero, which needs 15 bits where half precision has 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.arrays import kernels, torch
from outpace.core.errors import UserError
from outpace.models.files.checkpoint import ORIGINAL, OTHER_RUNTIME, Checkpoint, UnsupportedFiles
from outpace.models.files.reading import RawTensor, read_optional_json
from outpace.models.llama.weight_sources import StoredMatrix, StoredSize

GPTQ, GPTQ_V2, AWQ = "gptq", "gptq_v2", "awq"
WHOLE_ROW = -1
GROUP_SIZES = (32, 64, 128, WHOLE_ROW)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: order of a word's 8 outputs
MAX_NIBBLE, MIDDLE = 15, 8
QUANTIZATION_CONFIG = "quantization_config"
GROUP_INDEX = "g_idx"
REQUIRED_PARTS = ("qweight", "qzeros", "scales")
PART_DTYPES = {"qweight": "I32", "qzeros": "I32", "scales": "F16", GROUP_INDEX: "I32"}


@dataclass(frozen=True)
class QuantizationScheme:
    """How a checkpoint is quantised.

    `group`: inputs that share a scale, or WHOLE_ROW (GPTQ's last group may be smaller). `first_zero`: the value of a
    stored zero point of 0. `is_symmetric`, `is_permuted`: config.json says that all zero points are MIDDLE, and that
    groups are not consecutive.
    """

    method: str
    group: int
    first_zero: int
    is_symmetric: bool = False
    is_permuted: bool = False

    def groups_of(self, inputs: int) -> np.ndarray:
        """Return the group of each input, int [inputs], for groups of consecutive inputs."""
        return np.arange(inputs) // (inputs if self.group == WHOLE_ROW else self.group)


def read_scheme(path: Path, settings: Mapping[str, Any]) -> QuantizationScheme:
    """Read config.json's quantization_config; UnsupportedFiles for schemes that are not supported."""
    method, bits, group = settings.get("quant_method"), settings.get("bits"), settings.get("group_size")

    def check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            supported = ", ".join(str(one) for one in allowed)
            reason = f"{path} is quantised by {method!s:.20} with {name} {value!r:.50}, supported: {supported}"
            raise UnsupportedFiles(f"{reason}; {OTHER_RUNTIME} may run it, or {ORIGINAL}")

    check("quant_method", method, (GPTQ, AWQ))
    check("bits", bits, (4,))
    check("group_size", group, GROUP_SIZES)
    older, default = ("version", "gemm") if method == AWQ else ("checkpoint_format", GPTQ)
    name = "format" if settings.get(older) is None and "format" in settings else older  # its name in newer files
    form = str(settings.get(name) or default).lower()
    if method == AWQ:
        check(name, "llm-awq" if settings.get("backend") == "llm-awq" else form, ("gemm",))
        return QuantizationScheme(AWQ, int(str(group)), 0, settings.get("zero_point") is False)
    check(name, form, (GPTQ, GPTQ_V2))
    check("is_marlin_format", settings.get("is_marlin_format") or False, (False,))
    says = [settings.get(name) is True for name in ("sym", "desc_act")]
    return QuantizationScheme(GPTQ, int(str(group)), int(form != GPTQ_V2), *says)


def read_values(scheme: QuantizationScheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Dequantise qweight, qzeros, scales and an optional g_idx to float32 [outputs, inputs].

    Raises UserError for parts that are inconsistent or damaged, UnsupportedFiles for ambiguous zero points.
    """
    words, zeros = parts["qweight"], read_zeros(scheme, parts, where)
    groups = read_groups(scheme, parts.get(GROUP_INDEX), matrix_shape(scheme, words.shape)[1], where)
    if scheme.method == AWQ:
        q = np.ascontiguousarray(_nibbles(words, AWQ_ORDER).T)
    else:
        q = _nibbles(np.ascontiguousarray(words.T), range(8))
    values: np.ndarray = (q.astype(np.float32) - zeros.T[:, groups]) * parts["scales"].astype(np.float32).T[:, groups]
    return values


def read_zeros(scheme: QuantizationScheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Return zero points, uint8 [groups, outputs], after checking that all parts fit. Raises as `read_values`."""
    outputs, inputs = matrix_shape(scheme, parts["qweight"].shape)
    count = int(scheme.groups_of(inputs)[-1]) + 1
    for name, shape in {"qzeros": (count, outputs // 8), "scales": (count, outputs)}.items():
        _check_shape(f"{where}.{name}", parts[name], shape, f" for group_size {scheme.group}")
    if not np.isfinite(parts["scales"]).all():
        raise UserError(f"{where}.scales is damaged: it holds values that are not finite")
    zeros = _nibbles(parts["qzeros"], AWQ_ORDER if scheme.method == AWQ else range(8))
    if scheme.first_zero and (zeros == MAX_NIBBLE).any():
        reason = f"qzeros holds {MAX_NIBBLE}, and readers differ in whether that means 0 or 16"
        raise UnsupportedFiles(f"{where}: {reason}; {OTHER_RUNTIME} may run it")
    _check_middle(scheme, zeros, where)
    return zeros + np.uint8(scheme.first_zero)


def _check_middle(scheme: QuantizationScheme, stored: np.ndarray, where: str) -> None:
    """Raise UserError if zero points contradict config.json.

    Weights with all zero points in the middle look in GPTQ's other format as if all were next to it.
    """
    forms = ("gemm", "gemm") if scheme.method == AWQ else (GPTQ_V2, GPTQ)
    own, other = forms[scheme.first_zero], forms[1 - scheme.first_zero]
    expected, in_other = MIDDLE - scheme.first_zero, MIDDLE - 1 + scheme.first_zero
    label = f"{'zero_point False' if scheme.method == AWQ else 'sym True'} and " if scheme.is_symmetric else ""
    if own != other and (stored == in_other).all():
        found = f"{in_other} everywhere, which means {in_other + scheme.first_zero}, although {MIDDLE} is the middle"
        advice = f"; correct checkpoint_format to {other!r} if the file was written so"
    elif scheme.is_symmetric and (stored != expected).any():
        found, advice = f"{stored[stored != expected][0]}, although {expected} is expected everywhere", ""
    else:
        return
    raise UserError(f"{where}: qzeros holds {found} ({label}format {own!r}){advice}")


def read_groups(scheme: QuantizationScheme, stored: np.ndarray | None, inputs: int, where: str) -> np.ndarray:
    """Return the group of each input, int [inputs]. `stored` is g_idx, which GPTQ's act-order permutes. Raises
    UserError."""
    own = scheme.groups_of(inputs)
    if stored is None:
        if scheme.is_permuted and own[-1]:
            raise UserError(f"{where}: desc_act is True, and there is no g_idx, which holds the order of the groups")
        return own
    _check_shape(f"{where}.g_idx", stored, (inputs,))
    if stored.min() < 0 or stored.max() > own[-1]:
        raise UserError(f"{where}.g_idx holds {stored.min()} to {stored.max()}, expected are groups 0 to {own[-1]}")
    return stored


def _check_shape(what: str, part: np.ndarray, expected: tuple[int, ...], reason: str = "") -> None:
    if part.shape != expected:
        raise UserError(f"{what} has shape {list(part.shape)}, expected {list(expected)}{reason}")


def matrix_shape(scheme: QuantizationScheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return outputs and inputs of a matrix from the shape of its qweight."""
    return (8 * shape[1], shape[0]) if scheme.method == AWQ else (shape[1], 8 * shape[0])


def _nibbles(words: np.ndarray, order: Iterable[int]) -> np.ndarray:
    """Unpack words [rows, columns] to uint8 [rows, 8 columns]: nibble i is number order[i] of its eight."""
    found = np.empty((*words.shape, 8), np.uint8)
    for place, number in enumerate(order):
        found[..., number] = words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
    return found.reshape(len(words), -1)


NARROW, WIDE = "U4_32", "U4_64"  # the kernels' names
BLOCK_INPUTS = {NARROW: 32, WIDE: 64}  # per block
BLOCK_BYTES = {kind: 4 + inputs // 2 for kind, inputs in BLOCK_INPUTS.items()}  # per block


def block_format(scheme: QuantizationScheme, inputs: int) -> str | None:
    """Return the kernels' block format for a matrix with consecutive groups, or None if there is none."""
    kinds = (WIDE, NARROW) if scheme.group == WHOLE_ROW or scheme.group % BLOCK_INPUTS[WIDE] == 0 else (NARROW,)
    return next((kind for kind in kinds if inputs % BLOCK_INPUTS[kind] == 0), None)


def block_bytes(kind: str, count: int) -> int:
    """Return the bytes of `count` weights in blocks of this format."""
    return count // BLOCK_INPUTS[kind] * BLOCK_BYTES[kind]


def pack_blocks(kind: str, scheme: QuantizationScheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Convert a matrix's parts to blocks, uint8 [outputs, bytes per row], by the kernels. Raises as `read_values`."""
    read_zeros(scheme, parts, where)
    outputs, inputs = matrix_shape(scheme, parts["qweight"].shape)
    types = {"qweight": np.uint32, "qzeros": np.uint32, "scales": np.uint16}
    held = [np.require(parts[name], requirements=["C", "A"]).view(dtype) for name, dtype in types.items()]
    data = np.empty((outputs, block_bytes(kind, inputs)), np.uint8)
    group = inputs if scheme.group == WHOLE_ROW else scheme.group
    kernels.blocks_of_words(kind, *held, group, scheme.method == AWQ, scheme.first_zero, data)
    return data


def is_four_bit_folder(path: Path) -> bool:
    """Return whether the folder's config.json declares GPTQ or AWQ."""
    settings = read_optional_json(path / "config.json").get(QUANTIZATION_CONFIG)
    return isinstance(settings, Mapping) and settings.get("quant_method") in (GPTQ, AWQ)


class FourBitFolder(Checkpoint):
    """An open folder of GPTQ or AWQ weights with the original model's tensor names and shapes.

    4-bit matrices are read as float32 values or as blocks of the same values.
    """

    def _check_quantisation(self) -> None:
        self.scheme = read_scheme(self.path, self.config.pop(QUANTIZATION_CONFIG))

    def names(self) -> list[str]:
        """List the original model's tensor names: a 4-bit matrix counts once."""
        names = set(super().names())
        stems = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
        parts = {f"{stem}.{part}" for stem in stems for part in PART_DTYPES}
        return sorted((names - parts).union(f"{stem}.weight" for stem in stems))

    def file_of(self, name: str) -> Path:
        return super().file_of(f"{_stem(name)}.qweight" if self._is_packed(name) else name)

    def shape(self, name: str) -> tuple[int, ...]:
        if self._is_packed(name):
            return matrix_shape(self.scheme, super().shape(f"{_stem(name)}.qweight"))
        return super().shape(name)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check as in any folder; also raise UnsupportedFiles for parts of other types."""
        packed = {name: shape for name, shape in shapes.items() if self._is_packed(name)}
        super().check_shapes({name: shape for name, shape in shapes.items() if name not in packed})
        for name, expected in packed.items():
            for part in self._parts(name):
                kind, sizes, *_ = self._entry(f"{_stem(name)}.{part}")
                where = f"{self.file_of(name)}: tensor '{_stem(name)}.{part}'"
                dimensions = 1 if part == GROUP_INDEX else 2
                if kind != PART_DTYPES[part]:
                    raise UnsupportedFiles(f"{where} has type {kind}, supported: {PART_DTYPES[part]}")
                if len(sizes) != dimensions:
                    raise UserError(f"{where} has shape {list(sizes)}, expected are {dimensions} dimensions")
            is_cut = self.scheme.method == AWQ and expected[1] % self.scheme.group  # -1 divides all
            if self.shape(name) != tuple(expected) or is_cut or expected[0] % 8:
                where = f"{self.file_of(name)}: tensor {name!r}"
                found = f"shape {list(self.shape(name))} in 4 bits in groups of {self.scheme.group}"
                raise UserError(f"{where} has {found}, expected {list(expected)}")

    def held(self, name: str) -> StoredSize:
        """Return a 4-bit matrix's block format and the bytes of its blocks."""
        if not self._is_packed(name):
            return super().held(name)
        kind, count = self._kind(name), prod(self.shape(name))
        return StoredSize(kind, block_bytes(kind, count) if kind in BLOCK_INPUTS else count)

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a 4-bit matrix as blocks if a block format fits; anything else as in any folder."""
        if not self._is_packed(name):
            return super().weight(name)
        rows, columns = self.shape(name)
        kind, data = self._kind(name), np.empty((rows, 0), np.uint8)
        forget = partial(self._forget, *(f"{_stem(name)}.{part}" for part in self._parts(name)))
        if kind in BLOCK_INPUTS:
            data = pack_blocks(kind, self.scheme, self._values(name), self._where(name))
            forget()
        order, read = np.arange(rows, dtype=np.int32), partial(self.array, name)
        return StoredMatrix(self.file_of(name), name, kind, data, order, columns, read, forget)

    def raw(self, name: str) -> RawTensor:
        """Return a 4-bit matrix as float32, anything else as stored."""
        if not self._is_packed(name):
            return super().raw(name)
        return RawTensor("F32", read_values(self.scheme, self._values(name), self._where(name)))

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.array(name)) if self._is_packed(name) else super().tensor(name)

    def _kind(self, name: str) -> str:
        """Return the matrix's block format, or why it has none."""
        method, inputs = self.scheme.method.upper(), self.shape(name)[1]
        groups = read_groups(self.scheme, self._values(name).get(GROUP_INDEX), inputs, self._where(name))
        if (groups != self.scheme.groups_of(inputs)).any():
            return f"{method} in act-order"
        return block_format(self.scheme, inputs) or f"{method} with {inputs} inputs"

    def _values(self, name: str) -> dict[str, np.ndarray]:
        """Return the parts of a 4-bit matrix, mapped from the file."""
        return {part: self._mapped(f"{_stem(name)}.{part}").values for part in self._parts(name)}

    def _where(self, name: str) -> str:
        return f"{self.file_of(name)}: {_stem(name)}"

    def _parts(self, name: str) -> list[str]:
        has_index = f"{_stem(name)}.{GROUP_INDEX}" in self._places
        return [*REQUIRED_PARTS, *([GROUP_INDEX] if has_index else [])]

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and f"{_stem(name)}.qweight" in self._places


def _stem(name: str) -> str:
    return name.removesuffix(".weight")
