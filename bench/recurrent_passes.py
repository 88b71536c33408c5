"""Time passes of random Q4_K weights in the shapes of hybrid models, with the lower bound that bandwidth sets.

Run: python bench/recurrent_passes.py [--shapes 0.8B 4B] [--rows 1 2 4 8 16] [--rounds 10] [--context 128]
`plain`: the same shape with attention in all layers. `tree`: the rows are the nodes of a binary tree, else a chain; a
pass also takes in `--folds` accepted tokens. The lower bound is the bytes of weights, and of states read and written,
over --gigabytes per second. All settings are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama, NativeSession
from outpace.models.llama.weight_sources import StoredMatrix

COMMON = {"model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.8B": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "linear_num_value_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "linear_num_value_heads": 32},
}
BLOCK, VALUES = 144, 256  # bytes and weights of a block of Q4_K


def random_blocks(count: int) -> np.ndarray:
    """Return blocks of Q4_K with weights around 0: uint8 [count, BLOCK]."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, BLOCK), np.uint8)
    blocks[:, :4] = np.array([2e-5, 1.6e-4], np.float16).view(np.uint8)
    return blocks


def random_model(config: LlamaConfig, threads: int) -> NativeLlama:
    """Make a model of random weights; the matrices' outputs and inputs are as in `config`."""
    shapes = tensor_shapes(config)
    blocks = random_blocks(max(rows * inputs for rows, inputs in (s for s in shapes.values() if len(s) == 2)) // VALUES)

    def tensor(name: str) -> Any:
        shape = shapes[name]
        if len(shape) != 2 or shape[1] % VALUES:
            return np.random.default_rng(1).normal(0, 0.1, shape).astype(np.float32)
        rows, inputs = shape
        data = blocks[: rows * inputs // VALUES].reshape(rows, -1)
        order = np.arange(rows, dtype=np.int32)
        return StoredMatrix(Path(name), name, "Q4_K", data, order, inputs, lambda: None, lambda: None)

    return NativeLlama.from_tensors(config, tensor, options=NativeOptions(threads=threads, weights="file"))


def time_pass(model: NativeLlama, session: NativeSession, rows: int, is_tree: bool, folds: int) -> float:
    """Return the milliseconds of a pass over `rows` nodes that also takes in `folds` accepted ones."""
    if folds:
        model.score([chain(session, range(folds), keep=[])])
        session.keep(range(folds))
    parents = [(node - 1) // 2 if node else PREFIX for node in range(rows)] if is_tree else range(PREFIX, rows - 1)
    start = time.perf_counter()
    model.score([Part(session, range(rows), parents, range(rows))])
    seconds = time.perf_counter() - start
    session.keep([])
    return 1e3 * seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=35.0, help="memory bandwidth in GB/s")
    args = parser.parse_args()
    for shape in args.shapes:
        config = from_dict(COMMON | SHAPES[shape] | {"max_position_embeddings": 4096})
        plain = replace(config, recurrence=None, recurrent_layers=())
        models = {name: random_model(one, args.threads) for name, one in (("hybrid", config), ("plain", plain))}
        times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        sessions = {name: model.open(3000, 64) for name, model in models.items()}
        for name, model in models.items():
            for _ in range(0, args.context, 64):
                model.score([chain(sessions[name], range(64))])
                sessions[name].keep(range(64))
        for _, rows, kind in product(range(args.rounds), args.rows, ("chain", "tree", "no folds")):
            for name, model in models.items():
                folds = 0 if kind == "no folds" else args.folds
                times[name, kind, rows].append(time_pass(model, sessions[name], rows, kind == "tree", folds))
        report(args, shape, models, times)


def report(
    args: argparse.Namespace,
    shape: str,
    models: dict[str, NativeLlama],
    times: dict[tuple[str, str, int], list[float]],
) -> None:
    """Print a table."""
    for name, model in models.items():
        sizes, layers = model.config.recurrence, model.config.num_recurrent_layers
        states = layers * sizes.state_size * 4 if sizes else 0
        floor = 1e-6 * (model.weight_bytes + 2 * states) / args.gigabytes
        held = f"{model.weight_bytes / 1e6:.0f} MB of weights, {states / 1e6:.0f} MB of states"
        print(f"{shape} {name}: {held}, floor {floor:.1f} ms at {args.gigabytes:g} GB/s")
    print("rows  kind      hybrid ms (median)   plain ms (median)")
    for (name, kind, rows), values in sorted(times.items(), key=lambda one: (one[0][2], one[0][1])):
        if name == "hybrid":
            both = [(min(one), statistics.median(one)) for one in (values, times["plain", kind, rows])]
            print(f"{rows:4}  {kind:9}", *(f"{least:9.2f} ({middle:8.2f})" for least, middle in both))


if __name__ == "__main__":
    main()
