"""Mistakes in drafting with a trained head. The text stays the same, but a head that is always right is rejected."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from heads import exact_pair
from mutation_checks import Mutation, Original

from outpace.api.llm import LLM
from outpace.drafters._feature_drafter import FeatureDrafter
from outpace.models.heads.eagle3 import FeatureSession
from outpace.models.heads.native import NativeHead
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

LENGTH, TOKENS = 3, 24


@cache
def pair() -> tuple[Any, Loaded, Loaded]:
    """Return the temporary folder, the target, and a head that drafts exactly what the target writes."""
    folder = tempfile.TemporaryDirectory()
    target, head = exact_pair(Path(folder.name))
    loaded = load_model(target, dtype="int8")
    return folder, loaded, load_draft(head, loaded)


def find_in_heads() -> str | None:
    """Return a fault if drafts are rejected, in an answer or in one whose prompt begins like the first."""
    _, target, head = pair()
    prompt = target.tokenizer.encode("one two three four " * 5)
    options = {"method": "speculative", "drafter": "eagle", "draft_length": LENGTH, "width": 1, "profile": False}
    with LLM(target, head, **options) as llm:
        for asked in (prompt, [*prompt, *prompt[:7]]):
            [answer] = llm.generate([asked], max_tokens=TOKENS, ignore_eos=True)
            if answer.figures.accepted < TOKENS * LENGTH / (LENGTH + 1) - 1:
                return f"{answer.figures.accepted} of {answer.figures.drafted} drafts are accepted"
    return None


def shift_features(fuse: Original) -> Original:

    def mutated(self: Any, hidden: Any) -> Any:
        rows = fuse(self, hidden)
        return np.concatenate([0.0 * rows[:1], rows[:-1]])

    return mutated


def copy_nothing(copy: Original) -> Original:
    def mutated(self: Any, state: Any, other: Any, length: int) -> None:
        """Leave the new session empty."""

    return mutated


def forget_outputs(keep: Original) -> Original:
    def mutated(self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
        keep(self, path, live)
        self.outputs = [0.0 * row for row in self.outputs if row is not None]

    return mutated


def _mutation(name: str, owner: Any, attribute: str, make: Any) -> Mutation:
    return Mutation(f"eagle: {name}", [owner], attribute, make, find_in_heads)


HEAD_MUTATIONS = [
    _mutation("features are those of the position before", NativeHead, "fuse", shift_features),
    _mutation("the head's state of a shared prefix is not copied", FeatureDrafter, "copy_prefix", copy_nothing),
    _mutation("a node reads no output of its parent", FeatureSession, "keep", forget_outputs),
]
