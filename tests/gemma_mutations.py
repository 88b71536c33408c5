"""Mistakes in what Gemma 2 and 4 add: each must fail the named test."""

from __future__ import annotations

from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.llama.config import gemma4
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.torch import attention
from outpace.models.llama.torch import runtime as torch_runtime
from outpace.models.llama.torch.weights import TokenEmbeddings

SCORES = "test_architectures.py::test_a_text_scores_as_in_transformers[{}-None]"


def uncapped(capped: Original, x: Any, cap: float) -> Any:
    return x


def of_the_first_layer(kv_layers: Original, slides: Any, first_shared: int) -> tuple[int, ...]:
    """Read the keys and values of the first layer of a kind, not of the last before those that share."""
    first = {kind: layer for layer, kind in reversed([*enumerate(slides)])}
    found = kv_layers(slides, first_shared)
    return tuple(layer if layer == own else first[slides[own]] for own, layer in enumerate(found))


def of_the_other_kind(window: Original, config: Any, layer: int) -> int | None:
    """Give the layers that see everything a window, and the others none."""
    return None if window(config, layer) else next(filter(None, config.windows), None)


def of_another_token(rows: Original, embeddings: Any, tokens: Any) -> Any:
    return rows(embeddings, tokens.roll(1))


GEMMA_MUTATIONS: list[Mutation] = [
    mutation("Gemma: scores are not capped", attention, "capped", uncapped, SCORES.format("gemma2")),
    mutation("Gemma: logits are not capped", torch_runtime, "capped", uncapped, SCORES.format("gemma4_large")),
    mutation("Gemma: keys of another layer", gemma4, "_kv_layers", of_the_first_layer, SCORES.format("gemma4_e")),
    mutation(
        "Gemma: windows of the other kind", LlamaConfig, "window", of_the_other_kind, SCORES.format("gemma4_large")
    ),
    mutation(
        "Gemma: embeddings of another token", TokenEmbeddings, "rows", of_another_token, SCORES.format("gemma4_e")
    ),
]
