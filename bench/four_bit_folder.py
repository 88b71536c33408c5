"""Writes a model folder anew with its layers' matrices in 4 bits, as GPTQ or AWQ words, by plain rounding to nearest.

Run: python bench/four_bit_folder.py OUT [--model M] [--method gptq] [--group 128] [--symmetric]
A group's values go from its least to its largest in 15 steps (with --symmetric, from -8 to 7 times a scale). Nothing of
GPTQ's or AWQ's search for better numbers is in it: what is compared on such a folder are ways to compute with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from outpace.models.files.checkpoint import SINGLE
from outpace.models.files.find import resolve
from outpace.models.files.four_bits import AWQ, GPTQ, GROUPS, ORDER, WHOLE
from outpace.models.files.packed import TOKENIZER_FILES
from outpace.models.files.source import open_source


def words(numbers: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Eight numbers of a row in each word, number order[i] of them in nibble i."""
    found = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for place, number in enumerate(order):
        found |= numbers[:, number::8].astype(np.uint32) << np.uint32(4 * place)
    return found.view(np.int32)


def rounded(values: np.ndarray, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [outputs, inputs], scales and zeros [outputs, groups]. No zero is 0, which a word of GPTQ could not say."""
    starts = range(0, values.shape[1], values.shape[1] if group == WHOLE else group)
    least, most = (np.stack([f(part, axis=1) for part in np.split(values, starts[1:], 1)], 1) for f in (np.min, np.max))
    if symmetric:
        scales = np.maximum(np.maximum(-least / 8, most / 7), 1e-4).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        least, most = np.minimum(least, 0), np.maximum(most, 0)
        scales = np.maximum((most - least) / 15, 1e-4).astype(np.float16)
        zeros = np.clip(np.rint(-least / scales.astype(np.float32)), 1, 15)
    of = np.arange(values.shape[1]) // starts.step
    q = np.clip(np.rint(values / scales.astype(np.float32)[:, of]) + zeros[:, of], 0, 15)
    return q.astype(np.uint8), scales, zeros.astype(np.uint8)


def packed(method: str, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> dict[str, np.ndarray]:
    """A matrix's tensors."""
    parts = {"scales": np.ascontiguousarray(scales.T)}
    if method == AWQ:
        return parts | {"qweight": words(q.T, ORDER), "qzeros": words(zeros.T, ORDER)}
    own = tuple(range(8))
    return parts | {"qweight": np.ascontiguousarray(words(q, own).T), "qzeros": words(zeros.T - 1, own)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--method", choices=(GPTQ, AWQ), default=GPTQ)
    parser.add_argument("--group", type=int, choices=GROUPS, default=128)
    parser.add_argument("--symmetric", action="store_true")
    asked = parser.parse_args()
    folder = resolve(asked.model)
    asked.out.mkdir(parents=True)
    tensors: dict[str, np.ndarray] = {}
    with open_source(folder) as source:
        for name in source.names():
            values = source.array(name)
            if name.startswith("model.layers.") and values.ndim == 2:
                parts = packed(asked.method, *rounded(values, asked.group, asked.symmetric))
                tensors |= {f"{name.removesuffix('weight')}{part}": held for part, held in parts.items()}
            else:
                tensors[name] = values.astype(np.float16)
        said = {"quant_method": asked.method, "bits": 4, "group_size": asked.group, "sym": asked.symmetric}
        config = {**source.config, "quantization_config": said}
    save_file(tensors, asked.out / SINGLE)
    (asked.out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, asked.out / file)


if __name__ == "__main__":
    main()
