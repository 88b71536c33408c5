"""Tiny models of both runtimes, and the passes that tests of models compare: a tree, its paths, a prefilled session."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import reference
import torch
from files import smollm2_file
from torch import Tensor

from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.llama.config.llama_config import ENTRY_BYTES, LlamaConfig, from_dict
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model

TINY = reference.TINY
UNTIED = replace(TINY, tie_embeddings=False, attention_bias=True, output_bias=True, mlp_bias=True)
MIXED = replace(TINY, head_norm=True, windows=(5, None, 19), rotary_layers=(True, False, True), attention_bias=True)
TINIES = {"tiny": TINY, "untied": UNTIED, "mixed": MIXED, "gemma": reference.GEMMA, "phi": reference.PHI}
UNCAPTURED = {"gemma2": reference.GEMMA2, **reference.GEMMA4_CONFIGS}  # which captured passes do not compute
NATIVE_TINIES = {
    "tiny": TINY,
    "biased": UNTIED,
    "odd": replace(TINY, vocab_size=130, hidden_size=100, intermediate_size=70, head_dim=22, attention_bias=True),
    "normed": replace(TINY, head_dim=80, num_kv_heads=6, head_norm=True, rotary_layers=(True, False, True)),
    "windows": replace(TINY, head_dim=22, windows=(5, None, 33), rotary_layers=(True, True, False)),
    "phi": reference.PHI,
    "gemma": replace(reference.GEMMA, hidden_size=100, intermediate_size=70, windows=(7, None, 40, 19)),
    "gemma2": replace(reference.GEMMA2, vocab_size=131),
    **reference.GEMMA4_CONFIGS,
}


def build(kind: Any, config: LlamaConfig = TINY, **options: Any) -> Any:
    """A model of random weights by one of torch's runtimes."""
    return kind.from_tensors(config, reference.random_tensors(config).__getitem__, **options)


def tiny(config: LlamaConfig = TINY, exact: bool | None = None, **options: Any) -> Llama:
    return build(Llama, config, exact=exact, **options)


def native_tiny(config: LlamaConfig = TINY, head_ids: Tensor | None = None, **options: Any) -> NativeLlama:
    tensor = reference.random_tensors(config).__getitem__
    return NativeLlama.from_tensors(config, tensor, options=NativeOptions(**options), head_ids=head_ids)


def open_smollm2(**options: Any) -> NativeLlama:
    smollm2_file()
    with Checkpoint.open(resolve(None)) as checkpoint:
        given = {"options": NativeOptions(**options)}
        return NativeLlama.from_tensors(from_dict(checkpoint.config), checkpoint.tensor, **given)


@cache
def smollm2(runtime: str) -> Any:
    smollm2_file()
    return open_smollm2() if runtime == "native" else load_model(None, dtype="float32").model


def models(*exact: bool | None) -> list[Any]:
    """Builders of the models whose passes are compared: torch's in these modes, and the native runtime's."""
    odd, ours, native = NATIVE_TINIES["odd"], dict[str, Any](), dict[str, Any]()
    for mode in exact:
        ours |= {f"{name}-{mode}": partial(tiny, config, mode) for name, config in (TINIES | UNCAPTURED).items()}
    ours |= {kv_dtype: partial(tiny, MIXED, kv_dtype=kv_dtype) for kv_dtype in ENTRY_BYTES}
    native |= {f"native-{name}": partial(native_tiny, config) for name, config in NATIVE_TINIES.items()}
    native |= {f"native-{name}": partial(native_tiny, odd, kv_dtype=name) for name in ("float16", "int8")}
    return [
        *(pytest.param(build, id=name) for name, build in (ours | native).items()),
        pytest.param(partial(smollm2, "llama"), id="smollm2", marks=[pytest.mark.smollm2, pytest.mark.long]),
        pytest.param(partial(smollm2, "native"), id="native-smollm2", marks=pytest.mark.smollm2),
    ]


def text(model: Any, count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(min(model.vocab_size, 5000)) for _ in range(count)]


def random_parents(count: int, seed: int) -> list[int]:
    """A random tree below one root."""
    rng = random.Random(seed)
    return [PREFIX, *(rng.randrange(max(0, node - 6), node) for node in range(1, count))]


def branch(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = []
    while node != PREFIX:
        path.append(node)
        node = parents[node]
    return path[::-1]


def fresh(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after the last token of a text that is fed at once: the slow path."""
    session = model.open(len(tokens) + 1, 300)
    return model.score([chain(session, tokens, logit_rows=[len(tokens) - 1])])[0]


def prefilled(model: Any, prompt: Sequence[int], room: int = 300) -> Any:
    """A session that holds the prompt."""
    session = model.open(len(prompt) + 200, room)
    model.score([chain(session, prompt)])
    session.keep(range(len(prompt)))
    return session


def tree_scores(model: Any, prompt: int = 17, nodes: int = 14) -> tuple[Tensor, Tensor]:
    """Logits of a tree after a prompt, and the contents of the slots afterwards."""
    session = prefilled(model, text(model, prompt))
    scores = model.score([Part(session, text(model, nodes, 2), random_parents(nodes, 1), range(nodes))])
    return scores, torch.as_tensor(session.read(prompt + nodes))


def assert_same(model: Any, got: Any, expected: Any) -> None:
    """Compare bit by bit in exact mode, to rounding elsewhere."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    if model.exact:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def of_layers(model: Any, layers: Sequence[int]) -> Any:
    """A model of these layers only, which shares their weights."""
    config, chosen = model.config.of_layers(layers), [model._layers[layer] for layer in layers]
    if isinstance(model, NativeLlama):
        return NativeLlama(config, chosen, model.ends, model.options)
    return type(model)(config, chosen, model.embedding, model._head, model.exact, kv_dtype=model.kv_dtype)


def pieces(model: NativeLlama, count: int = 6) -> tuple[Any, list[Tensor]]:
    """Return logits of two sessions' trees of `count` nodes and then 3, of one node after a kept branch with a layer
    skipped, and of two late nodes; and the first session, in which the last two are pending."""
    sessions, found = [prefilled(model, text(model, 5, seed)) for seed in range(2)], []
    for nodes in (count, 3):
        parts = [
            Part(session, text(model, nodes, 2 + number), random_parents(nodes, number), range(nodes))
            for number, session in enumerate(sessions)
        ]
        found.append(torch.as_tensor(model.score(parts)))
    sessions[0].keep([0])
    found.append(torch.as_tensor(model.skip_sublayers([1], [0]).score([chain(sessions[0], [3], [0])])))
    sessions[0].keep([])
    found.append(torch.as_tensor(model.score([chain(sessions[0], [3, 4], [0, 1])])))
    return sessions[0], found
