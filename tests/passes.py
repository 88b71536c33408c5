"""Forwards that tests of a model compare: a tree, its paths one by one, a session with a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.tree import PREFIX
from outpace.models.base import chain
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.session import LlamaSession


def text(model: Llama, count: int, seed: int = 0) -> list[int]:
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


def fresh(model: Llama, tokens: Sequence[int]) -> Tensor:
    """Scores after the last token of a text that is fed at once: the slow path."""
    session = model.open(len(tokens) + 1, 300)
    return model.score([chain(session, tokens, wanted=[len(tokens) - 1])])[0]


def prefilled(model: Llama, prompt: Sequence[int], room: int = 300) -> LlamaSession:
    """A session that holds the prompt."""
    session = model.open(len(prompt) + 200, room)
    model.score([chain(session, prompt)])
    session.keep(range(len(prompt)))
    return session


def assert_same(model: Llama, got: Tensor, expected: Tensor) -> None:
    """Bit by bit in exact mode, to rounding elsewhere."""
    if model.exact:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
