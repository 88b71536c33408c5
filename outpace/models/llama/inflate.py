"""A model that costs N times as much and writes the same text: a stand-in for the cost of a large one, in measurements.

Layers are added whose two output projections are zero, so each adds nothing to what passes through it. All else in them
is copied from the model's own layers, so a pass reads, computes and stores as much as that many real layers would.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from outpace.core.errors import check_whole
from outpace.core.lazy import torch
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.stored import Stored
from outpace.models.options import MOST_INFLATED

PREFIX = "model.layers."
SILENCED = ("self_attn.o_proj.", "mlp.down_proj.")
Fetch = Callable[[str], Any]  # a tensor, an array, or a matrix as its file has it


def inflated(config: LlamaConfig, tensor: Fetch, factor: int) -> tuple[LlamaConfig, Fetch]:
    """The config and weights of a model whose pass reads `factor` times as many weights, to the nearest layer.

    `tensor(name)` gives a weight of the model; the second result gives those of the inflated one, whose own layers come
    first. The output layer is counted, and stays one. UserError for a factor that is not between 1 and 256.
    """
    check_whole("inflate", factor, 1, MOST_INFLATED)
    own = config.num_layers
    sources = [*range(own), *(number % own for number in range(added_layers(config, factor)))]

    def fetch(name: str) -> Any:
        source = source_of(name, own)
        weight = tensor(source)
        if source == name:
            return weight
        part = name.removeprefix(PREFIX).partition(".")[2]
        is_array, is_silent = isinstance(weight, np.ndarray), part.startswith(SILENCED)
        if isinstance(weight, Stored):
            return weight.silenced() if is_silent else weight
        if is_silent:
            return np.zeros_like(weight) if is_array else torch.zeros_like(weight)
        return weight.copy() if is_array else weight.clone()  # what two layers share would be read from memory once

    return config.of_layers(sources), fetch


def source_of(name: str, own: int) -> str:
    """The weight of a model of `own` layers that one of the inflated model is, or is made from."""
    number, _, part = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{int(number) % own}.{part}" if name.startswith(PREFIX) else name


def added_layers(config: LlamaConfig, factor: int) -> int:
    """How many more layers make a pass read `factor` times as many weights."""
    sizes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    layers = sum(size for name, size in sizes.items() if name.startswith(PREFIX))
    whole = layers + config.vocab_size * config.hidden_size  # the output layer; of the embedding, some rows are read
    return round((factor - 1) * whole * config.num_layers / layers)


def label(factor: int) -> str:
    """What stands behind the model's name; nothing where it costs what it costs."""
    return "" if factor == 1 else f" (cost x {factor})"


def notice(factor: int) -> str | None:
    """What a user is told of it."""
    if factor == 1:
        return None
    return f"inflated: a pass costs as much as one of a model {factor} times as large, the text is its own"
