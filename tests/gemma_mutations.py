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


def uncapped(capped: Original) -> Original:
    return lambda x, cap: x


def of_the_first_layer(kv_layers: Original) -> Original:
    """Read the keys and values of the first layer of a kind, not of the last before those that share."""

    def mutated(slides: Any, first_shared: int) -> tuple[int, ...]:
        found = kv_layers(slides, first_shared)
        first = {kind: layer for layer, kind in reversed([*enumerate(slides)])}
        return tuple(layer if layer == own else first[slides[own]] for own, layer in enumerate(found))

    return mutated


def of_the_other_kind(window: Original) -> Original:
    """Give the layers that see everything a window, and the others none."""
    return lambda config, layer: None if window(config, layer) else next(filter(None, config.windows), None)


def of_another_token(rows: Original) -> Original:
    return lambda embeddings, tokens: rows(embeddings, tokens.roll(1))


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
