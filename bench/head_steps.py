"""Times draft steps of heads with random weights in the shapes of public ones, by the native kernels.

    python bench/head_steps.py [--kinds eagle peagle dflash dspark] [--shapes Qwen3-4B ...] [--dtype int4]
    python bench/head_steps.py --mtp target.gguf

Prints a line of JSON per kind and shape: gigabytes of weights that a step reads, the milliseconds in which memory
delivers these (floor), and the median milliseconds of a step after 512 tokens. A step of EAGLE-3 expands a number of
nodes (--nodes). A step of another kind drafts a whole block, after the head has read the hidden states of four new
tokens: P-EAGLE 8 tokens by 4 layers, DFlash 15 and DSpark 7 by 5 layers. EAGLE-3 and P-EAGLE have an output layer of
32,000 rows; DFlash and DSpark use the target's, here in int8. Random weights cost as much as trained ones. --mtp times
the layers for multi-token prediction in files of Qwen3.5, with the target's output layer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import parse, run

from outpace.core.arrays import num_cores
from outpace.core.machine import memory_bandwidth
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.heads.config import DFLASH, DSPARK, EAGLE3, P_EAGLE, HeadConfig, head_class
from outpace.models.heads.files import HeadFiles, HeadTensor
from outpace.models.heads.native import NativeWeights
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.load import load_draft, load_model

ROWS, RANK = 32000, 256  # of EAGLE's output layer; rank of DSpark's bias
CONTEXT, NEW, STEPS = 512, 4, 15  # tokens before a step; new tokens in it; steps timed


class Shape(NamedTuple):
    """The sizes of a target's layers, and its vocabulary."""

    hidden: int
    intermediate: int
    vocab: int


SHAPES = {
    "Qwen3-4B": Shape(2560, 9728, 151936),
    "Qwen3-8B": Shape(4096, 12288, 151936),
    "Llama-3.1-8B": Shape(4096, 14336, 128256),
}
KINDS = {"eagle": (EAGLE3, 1), "peagle": (P_EAGLE, 4), "dflash": (DFLASH, 5), "dspark": (DSPARK, 5)}  # number of layers
BLOCKS = {"peagle": 8, "dflash": 16, "dspark": 7}


def random_head(name: str, shape: Shape) -> tuple[HeadConfig, HeadFiles]:
    """Return a head with random weights; each tensor is made when it is read."""
    (kind, num_layers), is_block = KINDS[name], name in ("dflash", "dspark")
    layers = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        head_norm=is_block,
        takes_features=not is_block,
    )
    head = HeadConfig(
        kind,
        layers,
        taps=(2, 10, 18, 26, 34) if is_block else (2, 18, 33),
        num_rows=shape.vocab if is_block else ROWS,
        target_width=shape.hidden,
        mask_token=0,
        block=BLOCKS[name] if is_block else 0,
        from_anchor=name == "dspark",
        causal=(False,) * num_layers,
        markov="vanilla" if name == "dspark" else None,
    )
    tensors = {}
    for tensor, size in _shapes(head).items():
        read = partial(_random, size)
        tensors[tensor] = HeadTensor(Path("random"), size, "F32", read, read)
    return head, HeadFiles(Path("random"), {}, tensors)


def _random(shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.resize(
        np.random.default_rng(0).standard_normal(1 << 20, np.float32) / np.float32(shape[-1] ** 0.5), shape
    )


def _shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    config, hidden, taps = head.layers, head.layers.hidden_size, len(head.taps)
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (head.num_rows, hidden),
        "embed_tokens.weight": (ROWS, hidden),
    }
    if head.block:
        shapes["hidden_norm.weight"] = (hidden,)
    elif head.kind == P_EAGLE:
        shapes["mask_hidden"] = (1, 1, taps * hidden)
    if head.markov:
        shapes |= {f"markov_head.markov_w{number}.weight": (config.vocab_size, RANK) for number in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, hidden), "confidence_head.proj.bias": (1,)}
    for number in range(config.num_layers):
        wide = hidden * (2 if config.takes_features and not number else 1)
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, wide),
            "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if wide > hidden:
            own["hidden_norm"] = (hidden,)
        if config.head_norm:
            own |= {f"self_attn.{part}_norm": (config.head_dim,) for part in "qk"}
        shapes |= {f"layers.{number}.{part}.weight": size for part, size in own.items()}
    return shapes


def median_milliseconds(step: Callable[[], object], reset: Callable[[], object]) -> float:
    """Return the median time of a step; `reset` undoes it."""
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        reset()
    return round(statistics.median(times) * 1000, 1)


def hidden_states(head: HeadConfig, count: int) -> np.ndarray:
    """Return random hidden states of the target for this many positions: [taps, count, width]"""
    return np.random.default_rng(1).standard_normal((len(head.taps), count, head.target_width)).astype(np.float32)


def eagle_steps(model: Any, widths: list[int]) -> dict[str, float]:
    """Return the milliseconds of a step by its number of nodes; for P-EAGLE, of a block."""
    head, session = model.spec, model.open(CONTEXT + 4 * NEW, 64)
    text = np.random.default_rng(1).integers(0, ROWS, CONTEXT + NEW).tolist()
    session.add_features(model.fuse(hidden_states(head, CONTEXT)))
    model.score_sparse([chain(session, text[: CONTEXT - 1])])
    session.keep(range(CONTEXT - 1))
    model.score_sparse([Part(session, text[-1:], (PREFIX,), (0,))])
    if head.kind != P_EAGLE:
        return {
            str(nodes): median_milliseconds(
                lambda nodes=nodes: model.score_sparse([Part(session, text[:nodes], (0,) * nodes, range(nodes))]),  # type: ignore[misc]
                lambda: session.keep((), (0,)),
            )
            for nodes in widths
        }
    new, masks = hidden_states(head, NEW), BLOCKS["peagle"] - 1

    def step() -> None:
        """Read new tokens and draft a block; the last new token is the root."""
        session.features = ()
        session.add_features(model.fuse(new))
        session.add_features(model.mask_features(masks))
        tokens = [*text[:NEW], *[0] * masks]
        model.score_sparse([Part(session, tokens, range(PREFIX, len(tokens) - 1), range(NEW - 1, len(tokens)))])

    session.keep(())
    return {str(masks + 1): median_milliseconds(step, lambda: session.keep(()))}


def block_steps(model: Any) -> dict[str, float]:
    """Return the milliseconds of a block by the number of tokens that it drafts."""
    session, new = model.open(CONTEXT + 4 * NEW, 64), hidden_states(model.spec, NEW)
    session.add_features(model.fuse(hidden_states(model.spec, CONTEXT)))
    model.read_features([session])

    def step() -> None:
        session.add_features(model.fuse(new))
        draft = model.draft([session], [1])
        for depth in range(model.spec.num_drafted):
            draft.layer(0, depth, [[1] * (depth + 1)])

    return {str(model.spec.num_drafted): median_milliseconds(step, lambda: session.truncate(CONTEXT))}


def main() -> None:
    """Time the kinds and shapes that the arguments name."""
    choices = {"dtype": ("int4", "int8"), "kinds": KINDS, "shapes": SHAPES}
    args = parse(__doc__, choices=choices, dtype="int4", nodes=[1, 4, 8], kinds=[*KINDS], shapes=[*SHAPES], mtp=[""])
    targets = [file for file in args.mtp if file]
    for file in targets:
        target = load_model(file)
        report(file, "mtp", target.precision, load_draft("mtp", target).model, args.nodes)
    for name in args.shapes if not targets else ():
        for kind in args.kinds:
            head, files = random_head(kind, SHAPES[name])
            options: Any = NativeOptions(num_cores(), "float16", weights=args.dtype)
            model = head_class(head.kind)(head, NativeWeights(files, None, options))
            report(name, kind, args.dtype, model, args.nodes)


def report(name: str, kind: str, dtype: str, model: Any, widths: list[int]) -> None:
    """Time the steps of a head and print them."""
    found = block_steps(model) if model.spec.block else eagle_steps(model, widths)
    size = model.weight_bytes
    row = {"head": name, "kind": kind, "dtype": dtype, "gigabytes": round(size / 1e9, 2)}
    row["floor"] = round(size / memory_bandwidth() * 1000, 1)
    print(json.dumps(row | {"milliseconds": found}), flush=True)


if __name__ == "__main__":
    run(main)
