"""The native runtime's short way into a pass: Python's own lists, and each row's best tokens told with its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from passes import random_parents, text
from test_native import TINIES, tiny

from outpace.models.base import Part, chain
from outpace.models.llama.native.runtime import NativeLlama

kernels = pytest.importorskip("outpace_kernels")

COUNTS = (1, 2, 8)


def parts_of(model: NativeLlama, best: int, seed: int = 1) -> list[Part]:
    """A tree after a text, another tree below one of its nodes, and a chunk of another text with no wanted rows."""
    session = model.open(200, 100)
    model.score([chain(session, text(model, 37))])
    session.keep(range(37))
    model.score([Part(session, text(model, 9, seed), random_parents(9, seed), range(9))])
    parents = [4, *(9 + parent if parent >= 0 else 4 for parent in random_parents(7, seed)[1:])]
    tree = Part(session, text(model, 7, seed + 1), parents, range(0, 7, 2), best=best)
    return [chain(model.open(100, 0), text(model, 5)), tree]


@pytest.mark.parametrize("name", TINIES)
def test_lists_give_the_bits_of_arrays(name: str) -> None:
    model = tiny(TINIES[name])
    got = model.score(parts_of(model, 0))
    model._skipped = np.zeros((model.num_layers, 2), bool)  # an extra argument: the pass then takes arrays
    assert torch.equal(got, model.score(parts_of(model, 0)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("known", [None, 60])
def test_best_tokens_are_those_of_the_scores(count: int, known: int | None) -> None:
    """Also where another model knows fewer tokens than the output layer has rows for."""
    model = tiny(TINIES["tiny"])
    if known is not None:
        model.vocab_size = known
    held = model.score_held(parts_of(model, count))
    values = np.asarray(held.values)
    assert values.shape == (4, known or 97)
    assert list(held.best) == kernels.rank(values, count, [1.0] * 4, [], None, count > 1)
    assert [tokens[0] for tokens, _ in held.best] == values.argmax(-1).tolist()


def test_nothing_is_told_that_not_everybody_asked_for() -> None:
    model = tiny(TINIES["tiny"])
    assert not model.score_held(parts_of(model, 0)).best
    assert not model.score_held([*parts_of(model, 1), *parts_of(model, 2)]).best
    assert len(model.score_held([*parts_of(model, 2), *parts_of(model, 2)]).best) == 8


def test_a_row_without_order_has_no_best_token() -> None:
    """Nor a pick that differs from the definition: the caller then reads the logits."""
    rows = np.full((4, 70), -3.0, np.float32)
    rows[0, 5], rows[1], rows[2, 6], rows[3, [64, 69]] = np.nan, -np.inf, np.inf, 2.0
    assert kernels.rank(rows, 1, [1.0] * 4, [], None, False) == [([], []), ([], []), ([], []), ([64], [2.0])]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sees": b"\1\1"}, "sees has the wrong shape"),
        ({"sees": b"\0"}, "a node does not see itself"),
        ({"positions": [0, 1]}, "positions has the wrong shape"),
        ({"positions": [3]}, "a position is out of range"),
        ({"positions": [-1]}, "a position is out of range"),
        ({"tokens": [97]}, "token 97 is out of range"),
        ({"wanted": [1]}, "a wanted row is out of range"),
        ({"wanted": []}, "scores has the wrong shape"),
        ({"held": 98}, "names has the wrong shape"),
        ({"names": np.arange(4)}, "names has the wrong shape"),
        ({"turns": np.zeros((3, 5, 2), np.float32)}, "turns has the wrong shape"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    model = tiny(TINIES["tiny"])
    session = model.open(8, 8)
    session.reserve(8)
    asked: dict[str, Any] = {
        "tokens": [1],
        "positions": [0],
        "turns": np.zeros((3, model.config.head_dim // 2, 2), np.float32),
        "wanted": [0],
        "scores": np.zeros((1, 97), np.float32),
        "count": 1,
        "held": 97,
        "names": None,
    }
    model.model_for_thread().score([(session.store, 0, 0, 1, b"\1")], **asked)
    spans = [(session.store, 0, 0, 1, change.pop("sees", b"\1"))]
    with pytest.raises(ValueError, match=says):
        model.model_for_thread().score(spans, **(asked | change))
