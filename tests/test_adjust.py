"""Adjusted rows of scores: as arrays and tensors, of all tokens and of the tokens with output rows, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from twins import adjusted_slowly

from outpace.core import adjust
from outpace.core.adjust import adjust_logits, adjust_sparse
from outpace.core.constraints import TokenTexts
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments, Request, Row
from outpace.rules import gumbel

VOCAB = 300
GUMBEL = gumbel.Gumbel()


WORDS = [f"<{token}>".encode() for token in range(VOCAB + 40)]


def kinds(chance: random.Random) -> list[Adjustments]:
    """Each setting alone, and all of them."""
    bias = tuple((token, chance.uniform(-9, 9)) for token in chance.sample(range(VOCAB + 40), 20))
    allowed = tuple(chance.sample(range(VOCAB + 40), 150))
    given: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.4},
        {"frequency_penalty": -0.3},
        {"logit_bias": bias},
        {"min_tokens": 8},
        {"allowed": allowed},
        {"banned": TokenTexts(WORDS).ban(("<3>", "<77>", "><29"))},
    ]
    together = {name: value for one in given for name, value in one.items()}
    return [Adjustments(**one) for one in (*given, together)]


def rows_of(
    chance: random.Random, settings: Adjustments | None, stops: frozenset[int] = frozenset({5, 299})
) -> list[Row]:
    """A request's tree of some nodes, whose tokens stand in the text already or do not."""
    prompt = tuple(chance.choices(range(VOCAB), k=chance.randint(1, 40)))
    request = Request(prompt, GUMBEL, sampling=Sampling(0.8), adjustments=settings, stop_ids=stops)
    committed = [*prompt, *chance.choices([*range(VOCAB), *prompt], k=chance.randint(0, 12))]
    paths = [tuple(chance.choices([*range(VOCAB + 9), *committed], k=depth)) for depth in (0, 1, 2, 2, 5)]
    return [Row(request, committed, path) for path in paths]


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_adjusted_as_by_hand(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as an array, as a tensor on the host, and by torch, as on a device."""
    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    for settings in kinds(chance):
        rows = [*rows_of(chance, settings), *rows_of(chance, None)[:2], *rows_of(chance, replace(settings))]
        x = numbers.standard_normal((len(rows), VOCAB)).astype(np.float32) * 5
        kept = x.copy()
        array, tensor = adjust_logits(x, rows), adjust_logits(torch.from_numpy(x), rows)
        with monkeypatch.context() as patched:
            patched.setattr(adjust, "host_rows", lambda _: None)
            device = adjust_logits(torch.from_numpy(x), rows)
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == tensor.numpy().tobytes() == device.numpy().tobytes()
        assert np.array_equal(x, kept), "what is given stays as it is"
        for made, before, row in zip(array, x, rows, strict=True):
            expected = adjusted_slowly(before.tolist(), row.request, [*row.committed, *row.path], WORDS)
            np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_drafts_tokens_are_adjusted_as_among_all(seed: int) -> None:
    """Where a draft holds some tokens only, those that it has not are left out."""
    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    ids = np.sort(numbers.permutation(VOCAB)[:90])
    for settings in kinds(chance):
        rows = rows_of(chance, settings)
        x = numbers.standard_normal((len(rows), VOCAB)).astype(np.float32) * 5
        some = np.ascontiguousarray(x[:, ids])
        assert (
            adjust_sparse(some, ids, rows).tobytes() == np.ascontiguousarray(adjust_logits(x, rows)[:, ids]).tobytes()
        )
        assert adjust_sparse(x, None, rows).tobytes() == adjust_logits(x, rows).tobytes()
    bare = rows_of(chance, None)
    assert adjust_sparse(some, ids, bare) is some
    assert adjust_logits(x, bare) is x
