"""The matrices that a runtime is handed where a checkpoint holds several together, as Phi-3's do.

They are rows of the whole, those of queries and keys in the order in which heads turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import local
from typing import Any

import numpy as np

from outpace.models.llama.config import phi
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.stored import Stored

Fetch = Callable[[str], Any]  # a tensor, an array, or a matrix as its file has it


def split(config: LlamaConfig, fetch: Fetch) -> Fetch:
    """The weights by the names that Llama's have, where `fetch` gives those that a checkpoint holds together."""
    if not config.fused:
        return fetch
    width, narrow, middle = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    order = phi.head_order(config.head_dim, config.rotary_dim)
    queries = (np.arange(0, width, config.head_dim)[:, None] + order).reshape(-1)
    parts: dict[str, tuple[str, np.ndarray]] = {
        "self_attn.q_proj": (phi.QKV, queries),
        "self_attn.k_proj": (phi.QKV, queries[:narrow] + width),
        "self_attn.v_proj": (phi.QKV, np.arange(narrow) + width + narrow),
        "mlp.gate_proj": (phi.GATE_UP, np.arange(middle)),
        "mlp.up_proj": (phi.GATE_UP, np.arange(middle) + middle),
    }

    last = local()  # .held: the whole that a thread read last, by its name, for its other parts

    def part_of(name: str) -> Any:
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        whole, rows = parts.get(rest.removesuffix(".weight"), ("", None))
        if rows is None:
            last.held = {}
            return fetch(name)
        known = f"model.layers.{layer}.{whole}.weight"
        if known not in getattr(last, "held", {}):
            last.held = {known: fetch(known)}
        held = last.held[known]
        if isinstance(held, Stored):
            return replace(held, order=held.order[rows], values=lambda: held.values()[rows])
        return held[rows]

    return part_of
