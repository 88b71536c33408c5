"""Matrices by GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) in 4 bits: what their words mean.

A weight is scale * (q - zero), scale and zero those of a group of inputs of one output. GPTQ, as AutoGPTQ and GPTQModel
write it: a word of qweight [inputs / 8, outputs] holds 8 inputs, one of qzeros [groups, outputs / 8] 8 outputs, where
the format "gptq" counts zeros from 1. AWQ, as AutoAWQ's version "gemm" writes it: both hold 8 outputs, in ORDER.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.checkpoint import OTHER_RUNTIME

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
