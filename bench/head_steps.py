"""Times draft steps of EAGLE-3 heads with random weights in the shapes of public ones, by the native kernels.

    python bench/head_steps.py --dtype int4 --nodes 1 4 8

Prints a line of JSON per shape: gigabytes of weights that a step reads, and its median milliseconds by the number of
nodes that it expands, after 512 tokens. Random weights cost as much as trained ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np

from outpace.core.lazy import num_cores
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles, HeadTensor
from outpace.models.heads.native import NativeEagle
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.native.binding import NativeOptions

SHAPES = {  # hidden size, MLP size, heads, KV heads
    "Qwen3-4B": (2560, 9728, 32, 8),
    "Qwen3-8B": (4096, 12288, 32, 8),
    "Llama-3.1-8B": (4096, 14336, 32, 8),
}
ROWS, CONTEXT, STEPS = 32000, 512, 15


def random_files(config: LlamaConfig, seed: int = 0) -> HeadFiles:
    """Return a head with random weights; each tensor is made when it is read."""
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        attention + "q_proj.weight": (queries, 2 * hidden),
        attention + "k_proj.weight": (keys, 2 * hidden),
        attention + "v_proj.weight": (keys, 2 * hidden),
        attention + "o_proj.weight": (hidden, queries),
        mlp + "gate_proj.weight": (intermediate, hidden),
        mlp + "up_proj.weight": (intermediate, hidden),
        mlp + "down_proj.weight": (hidden, intermediate),
        "lm_head.weight": (ROWS, hidden),
        "embed_tokens.weight": (ROWS, hidden),
        **{f"layers.0.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
    }

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    tensors = {}
    for name, shape in shapes.items():
        read = partial(make, name, shape)
        tensors[name] = HeadTensor(Path("random"), shape, read, read)
    return HeadFiles(Path("random"), {}, tensors)


def step_seconds(model: NativeEagle, nodes: int) -> float:
    """Return the median seconds of a draft step that expands `nodes` nodes below the root."""
    session, random = model.open(CONTEXT + 4, 64), np.random.default_rng(1)
    width, taps = model.config.hidden_size, len(model.head.taps)
    text = random.integers(0, ROWS, CONTEXT).tolist()
    session.add_features(model.fuse(random.standard_normal((taps, CONTEXT, width)).astype(np.float32)))
    model.score_held([chain(session, text[:-1])])
    session.keep(range(CONTEXT - 1))
    model.score_held([Part(session, text[-1:], (PREFIX,), (0,))])
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model.score_held([Part(session, text[:nodes], (0,) * nodes, range(nodes))])
        times.append(time.perf_counter() - began)
        session.keep((), (0,))
    return statistics.median(times)


def main() -> None:
    """Time the shapes that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("int4", "int8"), default="int4")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    args = parser.parse_args()
    for name in args.shapes:
        hidden, intermediate, heads, kv_heads = SHAPES[name]
        layer = LlamaConfig(
            ROWS,
            hidden,
            intermediate,
            1,
            heads,
            kv_heads,
            128,
            1e-6,
            1e6,
            4096,
            False,
            False,
            False,
            takes_features=True,
        )
        head = HeadConfig("EAGLE-3", layer, (2, 18, 33), ROWS, hidden)
        options = NativeOptions(num_cores(), "float16", weights=args.dtype)
        model = NativeEagle.from_files(random_files(layer), head, None, options)
        seconds = {nodes: round(step_seconds(model, nodes) * 1000, 2) for nodes in args.nodes}
        gigabytes = round(model.weight_bytes / 1e9, 3)
        print(
            json.dumps({"head": name, "dtype": args.dtype, "gigabytes": gigabytes, "milliseconds": seconds}),
            flush=True,
        )


if __name__ == "__main__":
    main()
