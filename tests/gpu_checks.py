"""Comparisons of captured passes with the slow runtime on one device, in float and in exact mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from gpu import CHECKED, Row, captured, kinds, random_weights

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.llama.torch.runtime import Llama

TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}  # relative to the largest logit
NODES = 24


def tokens(count: int, seed: int) -> list[int]:
    """Return `count` random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(CHECKED.vocab_size) for _ in range(count)]


def parents(count: int, seed: int) -> list[int]:
    """Return the parents of a random tree with one root."""
    rng = random.Random(seed)
    return [PREFIX, *(rng.randrange(max(0, node - 6), node) for node in range(1, count))]


def branch(tree: Sequence[int], node: int) -> list[int]:
    """Return the path from the root to `node`."""
    path = []
    while node != PREFIX:
        path.append(node)
        node = tree[node]
    return path[::-1]


def fed(model: Llama, prompt: Sequence[int]) -> Any:
    """Open a session and prefill the prompt."""
    session = model.open(len(prompt) + 300, 100)
    for start in range(0, len(prompt), 64):
        model.score([chain(session, prompt[start : start + 64], keep=range(session.pending))])
    session.keep(range(session.pending))
    return session


def compared(name: str, dtype: torch.dtype, got: Tensor, expected: Tensor) -> Row:
    """Compare by the largest difference relative to the largest value, against the tolerance of the dtype."""
    error = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    return {"check": name, "error": error, "passed": error <= TOLERANCE[dtype]}


def of_forwards(device: str, dtype: torch.dtype, is_eager: bool) -> list[Row]:
    """Compare graph with eager, tree with paths, `keep` with a fresh prefill, a batch with single sessions."""
    found = []
    for kind in kinds(device, is_eager):
        tensor = random_weights(CHECKED, device, dtype)
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        model = captured(kind, CHECKED, tensor, is_eager=is_eager, **given)
        found += _rows(
            f"{kind}, {str(dtype).removeprefix('torch.')}",
            model,
            Llama.from_tensors(CHECKED, tensor, exact=False, **given),
        )
    return found


def of_exact(device: str, dtype: torch.dtype, is_eager: bool) -> list[Row]:
    """Do the same in exact mode, where results must be equal bit for bit, except to those of the slow runtime."""
    given: dict[str, Any] = {"device": device, "dtype": dtype}
    label = f"exact, {str(dtype).removeprefix('torch.')}"
    tensor = random_weights(CHECKED, device, dtype)
    try:
        model = ExactGraphLlama.from_tensors(CHECKED, tensor, is_eager=is_eager, exact=True, **given)
    except UserError as unavailable_reason:  # the products of this device do not allow exact mode
        return [{"check": f"exact mode ({label})", "note": str(unavailable_reason)}]
    assert isinstance(model, GraphLlama)
    rows = _rows(label, model, Llama.from_tensors(CHECKED, tensor, exact=False, **given))
    return [*rows[:2], *(row | {"passed": row["error"] == 0} for row in rows[2:])]


def _rows(label: str, model: GraphLlama, twin: Llama) -> list[Row]:
    prompt, tree, drafted, dtype = tokens(150, 1), parents(NODES, 2), tokens(NODES, 3), model.dtype

    def scored(runtime: Llama) -> tuple[Any, Any, Any]:
        session, nodes = fed(runtime, prompt), range(NODES)
        part, layers = Part(session, drafted, tree, nodes, hidden_rows=nodes), (0, 1, CHECKED.num_layers)
        return session, *runtime.score_hidden([part], layers)[:2]

    (session, got, hidden), (_, expected, its_hidden) = scored(model), scored(twin)
    path = branch(tree, NODES - 1)
    text = [*prompt, *(drafted[node] for node in path)]
    after = model.score([chain(session, [5], [0], keep=path)])  # first: a later capture would move slots
    alone = model.score([chain(fed(model, text[:-1]), text[-1:], [0])])
    kept, fresh = session.read(len(text)), fed(model, text)
    again = model.score([chain(fresh, [5], [0])])
    sessions = [fed(model, prompt[: 20 * number]) for number in range(1, 6)]
    batch = model.score([chain(one, [7, 8], [1]) for one in sessions])
    singles = [fed(model, prompt[: 20 * number]) for number in range(1, 6)]
    one_by_one = torch.cat([model.score([chain(one, [7, 8], [1])]) for one in singles])
    return [
        compared(f"captured against the slow runtime ({label})", dtype, got, expected),
        compared(f"hidden states against the slow runtime ({label})", dtype, hidden, its_hidden),
        compared(f"tree against its path alone ({label})", dtype, got[-1:], alone),
        compared(f"scores after keep against a fresh prefill ({label})", dtype, after, again),
        compared(f"keys and values after keep ({label})", kept.dtype, kept, fresh.read(len(text))),
        compared(f"batch against one by one ({label})", dtype, batch, one_by_one),
    ]
