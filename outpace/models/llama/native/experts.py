"""Prepares mixtures of experts for the native kernels.

Experts of a mapped file stay there until a pass chooses them: the kernels pack them at their first use, and the file's
pages are released then. All others are packed when the model is loaded.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.llama.config.experts import SIGMOID, SIGMOID_FLOOR, Experts
from outpace.models.llama.native.weights import (
    Fetch,
    Matrices,
    Packing,
    fits_padded,
    interleaved,
    padded_width,
)

FileParts = list[tuple[str, np.ndarray]]  # formats and rows of one matrix


@dataclass(frozen=True)
class LayerExperts:
    """A layer's experts in the kernels."""

    packed: Any
    path: Path | None  # the file of experts that are not packed yet


def load_experts(packing: Packing, sizes: Experts, prefix: str, fetch: Fetch) -> LayerExperts:
    """Build a layer's experts from Hugging Face weight names that begin with `prefix`."""
    parts = [f"{prefix}experts.{number}." for number in range(sizes.count)]
    router, width = fetch(f"{prefix}gate.weight"), padded_width(packing.kernels, sizes.width)
    if sizes.shared_width and sizes.gates_shared:
        router = np.concatenate([router, fetch(f"{prefix}shared_expert_gate.weight")])
    gate_ups = [fetch.layer_matrices(packing, f"{part}gate_proj.weight", f"{part}up_proj.weight") for part in parts]
    downs = [fetch.layer_matrices(packing, f"{part}down_proj.weight") for part in parts]
    fits = all(len({one.kind for one in pair.blocks}) == 1 for pair in gate_ups)
    fits = fits and all(one.blocks and fits_padded(packing.kernels, one.blocks[0], sizes.width) for one in downs)
    is_mapped = fits and all(_is_mapped(one.data) for one in (*gate_ups[0].blocks, *downs[0].blocks))
    gate_up_files, gate_up_rows = _in_files(gate_ups, fits)
    down_files, down_rows = _in_files(downs, fits)
    biases: dict[str, Any] = {}
    if sizes.has_biases:
        gates, ups, outputs = ([fetch(f"{part}{name}_proj.bias") for part in parts] for name in ("gate", "up", "down"))
        both = [interleaved(packing.kernels, pair, width) for pair in zip(gates, ups, strict=True)]
        biases = {"gate_up_bias": np.concatenate(both), "down_bias": np.concatenate(outputs)}
        biases["bias"] = fetch(f"{prefix}gate.bias").tolist()
    if sizes.corrects_choice:
        biases["correction"] = fetch(f"{prefix}gate.e_score_correction_bias").tolist()
    if sizes.beside_mlp:
        biases["scales"] = fetch(f"{prefix}gate.expert_scale").tolist()
    packed = packing.kernels.Experts(
        router,
        sizes.chosen,
        gate_up_files,
        interleaved(packing.kernels, gate_up_rows, width, missing=-1),
        down_files,
        down_rows[0],
        sizes.width,
        packing.arena,
        sigmoid=sizes.scoring == SIGMOID,
        norms=sizes.norms_weights,
        epsilon=SIGMOID_FLOOR if sizes.scoring == SIGMOID else 0.0,
        scale=sizes.scale,
        gates_shared=bool(sizes.shared_width) and sizes.gates_shared,
        rounded=fetch.rounded,
        mapped=is_mapped,
        **biases,
    )
    if is_mapped:
        return LayerExperts(packed, gate_ups[0].blocks[0].path)
    try:
        packing.alone(packed.pack)
    except ValueError as error:  # about numbers: everything else was checked
        raise UserError(f"the experts {prefix}experts hold weights that do not fit: {error}") from error
    for one in (one for pair in (*gate_ups, *downs) for one in pair.blocks):
        one.forget()
    return LayerExperts(packed, None)


def _in_files(matrices: Sequence[Matrices], fits: bool) -> tuple[list[FileParts], list[np.ndarray]]:
    """Return each expert's matrices as a file has them or, unless they fit, in float32; and the order of their rows,
    which is the same for all: of the first part and, counted from its end on, of the second."""
    if not fits:
        floats = [one.floats() for one in matrices]
        found = [[("F32", one.view(np.uint8)) for one in pair] for pair in floats]
        orders = [np.arange(len(one), dtype=np.int32) for one in floats[0]]
    else:
        found = [[(one.kind, one.data) for one in pair.blocks] for pair in matrices]
        orders = [one.order for one in matrices[0].blocks]
    first = len(found[0][0][1])
    return found, [orders[0], *(order + first for order in orders[1:])]


def _is_mapped(data: Any) -> bool:
    """Return whether an array is a part of a mapped file."""
    while isinstance(data, np.ndarray | memoryview):
        data = data.base if isinstance(data, np.ndarray) else data.obj
    return isinstance(data, mmap.mmap)


def divide_memory(layers: Sequence[LayerExperts], budget: int) -> int:
    """Limit how many experts stay packed, in the same share of each layer, so that they take at most `budget` bytes if
    one expert a layer does. Return the bytes that they may take."""
    sizes = [one.packed.count * one.packed.expert_bytes for one in layers]
    total = sum(sizes)
    for one in layers:
        if one.path and total > budget:
            one.packed.hold(max(1, one.packed.count * budget // total))
    return sum(one.packed.held * one.packed.expert_bytes for one in layers)
