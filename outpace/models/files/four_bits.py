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
GROUPS = (32, 64, 128)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: of the outputs whose nibbles follow each other in a word
MOST = 15


@dataclass(frozen=True)
class Scheme:
    """`group`: inputs that share a scale. `first_zero`: what a stored zero point of 0 means."""

    method: str
    group: int
    first_zero: int


class Matrix(NamedTuple):
    """`q` uint8 [outputs, inputs], `scales` float16 and `zeros` uint8 [outputs, groups]."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    def values(self) -> np.ndarray:
        """float32 [outputs, inputs]"""
        group = self.q.shape[1] // self.scales.shape[1]
        zeros, scales = (np.repeat(part, group, axis=1) for part in (self.zeros, self.scales))
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
    are damaged, UnsupportedModel for inputs that are not in their own order (act-order)."""
    inputs, outputs = shape_of(scheme, parts["qweight"].shape)[::-1]
    groups = inputs // scheme.group
    expected = {"qzeros": (groups, outputs // 8), "scales": (groups, outputs), "g_idx": (inputs,)}
    for name, shape in expected.items():
        if name in parts and parts[name].shape != shape:
            raise UserError(f"{where}.{name} has shape {list(parts[name].shape)}, expected {list(shape)}")
    if "g_idx" in parts and (parts["g_idx"] != np.arange(inputs) // scheme.group).any():
        said = "its groups are not of neighbouring inputs (act-order), which is not taken here"
        raise UnsupportedModel(f"{where}: {said}; {OTHER_RUNTIME} may run it")
    scales = parts["scales"]
    if not np.isfinite(scales).all():
        raise UserError(f"{where}.scales is damaged: it holds values that are not finite")
    zeros = _nibbles(parts["qzeros"], _order(scheme))
    if scheme.first_zero and (zeros == MOST).any():
        said = f"qzeros holds {MOST}, and readers differ in whether that means 0 or 16"
        raise UnsupportedModel(f"{where}: {said}; {OTHER_RUNTIME} may run it")
    if scheme.method == AWQ:
        q = _nibbles(parts["qweight"], ORDER).T
    else:
        q = _nibbles(np.ascontiguousarray(parts["qweight"].T), range(8))
    turned = (np.ascontiguousarray(part.T) for part in (scales, zeros + np.uint8(scheme.first_zero)))
    return Matrix(np.ascontiguousarray(q), *turned)


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
