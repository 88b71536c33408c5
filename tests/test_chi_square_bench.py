"""bench/rejection_chi_square.py counts texts of the model that it says: remembered scores are the model's own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from doubles import QuickToy

from outpace.models.base import chain

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from rejection_chi_square import Remembering, chi_square


def test_remembered_scores_are_the_models_of_the_whole_text() -> None:
    model, text = QuickToy(16, 5, 0), (3, 1, 4, 1, 5, 9, 2, 6)
    remembering = Remembering(model)
    session, own = remembering.open(20, 20), model.open(20, 20)
    for piece in (text[:4], text[4:6], text[6:]):
        keep = range(session.pending)
        parts = [chain(part, piece, range(len(piece)), keep=keep) for part in (session, own)]
        got, expected = remembering.score(parts[:1]), model.score(parts[1:])
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))
    assert len(remembering._rows) == len(text)


def test_a_text_that_cannot_be_is_not_overlooked() -> None:
    expected = {(1, 2): 0.5, (1, 3): 0.5}
    assert chi_square(Counter({(1, 2): 50, (1, 3): 50}), expected)[0] == 0.0
    assert chi_square(Counter({(1, 2): 50, (4, 3): 50}), expected)[2] > 4
