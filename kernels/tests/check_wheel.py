"""Tries an installed wheel: a tiny random model gives the same bits by every instruction set and number of threads of
this machine, and those of the emulation in numpy where long double is wide enough for it.

python kernels/tests/check_wheel.py
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import outpace_kernels
from outpace_kernels import emulation

HIDDEN, MIDDLE, VOCAB, LAYERS, ROWS, SLOTS = 128, 192, 80, 2, 6, 16
QUERIES, KEYS, DEPTH = 4, 2, 32
EPSILON = 1e-5


def weights() -> dict[str, np.ndarray]:
    """Of every layer, and of the model; the same for all."""
    noise = np.random.default_rng(0)
    shapes = {
        "qkv": ((QUERIES + 2 * KEYS) * DEPTH, HIDDEN),
        "output": (HIDDEN, QUERIES * 64),  # each head is padded to a whole group
        "gate_up": (2 * MIDDLE, HIDDEN),
        "down": (HIDDEN, MIDDLE),
        "embedding": (VOCAB, HIDDEN),
    }
    return {name: noise.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def scores(kernels: ModuleType, instruction_set: str, threads: int, kv_dtype: str) -> np.ndarray:
    """Of a tree of six nodes over an empty session: [rows, vocab]."""
    made = {name: kernels.Matrix(values) for name, values in weights().items()}
    norm = np.ones(HIDDEN, np.float32)
    matrices = (made[name] for name in ("qkv", "output", "gate_up", "down"))
    layer = kernels.Layer(norm, norm, *matrices)
    heads = kernels.Heads(QUERIES, KEYS, DEPTH, kv_dtype, EPSILON)
    embedding = made["embedding"]
    sizes = (heads, HIDDEN, MIDDLE, EPSILON, [layer] * LAYERS, embedding, norm, embedding)
    model = kernels.Model(*sizes, instruction_set, threads)
    out = np.zeros((ROWS, VOCAB), np.float32)
    every = np.arange(ROWS, dtype=np.int32)
    spans: list[Any] = [(kernels.Store([heads] * LAYERS, SLOTS), 0, 0, ROWS, tree())]
    model.forward(spans, every * 7, rope_rows(), every, out)
    return out


def tree() -> np.ndarray:
    """Which nodes each node sees: two branches below the first."""
    sees = np.eye(ROWS, dtype=bool)
    for node, parent in enumerate((0, 1, 0, 3, 4), 1):
        sees[node] |= sees[parent]
    return sees


def rope_rows() -> np.ndarray:
    """Cosine and sine of every pair of a head, by depth in the tree: [rows, depth / 2, 2]."""
    angles = (tree().sum(1) - 1)[:, None] / 10.0 ** (np.arange(DEPTH // 2) / 4)
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def main() -> None:
    """Compares the bits of all instruction sets, with one and two threads, and of the emulation; says what was met."""
    sets = outpace_kernels.instruction_sets()
    for kv_dtype in outpace_kernels.KV_DTYPES:
        found = {(name, count): scores(outpace_kernels, name, count, kv_dtype) for name in sets for count in (1, 2)}
        if np.finfo(np.longdouble).nmant >= 63:
            found["emulation", 1] = scores(emulation, "", 1, kv_dtype)
        expected = found[sets[-1], 1]
        assert np.isfinite(expected).all()
        assert expected.std() > 0.01
        wrong = [key for key, got in found.items() if got.tobytes() != expected.tobytes()]
        assert not wrong, f"other bits than {sets[-1]}, keys and values in {kv_dtype}: {wrong}"
        print(f"outpace-kernels: {', '.join(sets)}: the same bits in {len(found)} ways, {kv_dtype} keys and values")


if __name__ == "__main__":
    main()
