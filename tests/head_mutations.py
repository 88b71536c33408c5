"""Mistakes in drafting with a trained head. The text stays the same, but a head that is always right is rejected."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from heads import exact_pair
from joined_heads import exact_joined
from medusa_heads import exact_medusa
from mutation_checks import Mutation, Original

from outpace.api.llm import LLM
from outpace.drafters._feature_drafter import FeatureDrafter
from outpace.models.heads import eagle3
from outpace.models.heads.dflash import BlockDraft
from outpace.models.heads.eagle3 import FeatureSession, JoinedModel
from outpace.models.heads.medusa import MedusaModel
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
    return _rejected(*pair()[1:])


@cache
def joined_pairs() -> tuple[Any, list[tuple[Loaded, Loaded]]]:
    """Return the temporary folder, and a target with an EAGLE-1 head and one with an MTP layer, which are exact."""
    folder = tempfile.TemporaryDirectory()
    target, head, mtp = exact_joined(Path(folder.name))
    loaded = [load_model(path, dtype="int8") for path in (target, mtp)]
    drafts = [load_draft(draft, one) for draft, one in zip((head, "mtp"), loaded, strict=True)]
    return folder, [*zip(loaded, drafts, strict=True)]


def find_in_joined() -> str | None:
    """Return a fault if drafts of an EAGLE-1 head or an MTP layer are rejected."""
    return next((found for both in joined_pairs()[1] if (found := _rejected(*both))), None)


@cache
def medusa_pair() -> tuple[Any, Loaded, Loaded]:
    """Return the temporary folder, a target, and Medusa's heads that draft exactly what it writes."""
    folder = tempfile.TemporaryDirectory()
    target, heads = exact_medusa(Path(folder.name))
    loaded = load_model(target, dtype="int8")
    return folder, loaded, load_draft(heads, loaded)


def find_in_medusa() -> str | None:
    """Return a fault if drafts of Medusa's heads are rejected."""
    return _rejected(*medusa_pair()[1:])


def _rejected(target: Loaded, head: Loaded) -> str | None:
    prompt = target.tokenizer.encode("one two three four " * 5)
    options = {"method": "speculative", "drafter": head.drafter, "draft_length": LENGTH, "width": 1, "profile": False}
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


def without_norm(fuse: Original) -> Original:
    return lambda self, hidden: self.received(hidden[0])


def swap_sides(join_rows: Original) -> Original:
    return lambda parts, axis=0: join_rows(parts[::-1] if axis else parts, axis)


def keep_first_feature(read: Original) -> Original:
    def mutated(self: Any, sessions: Sequence[Any]) -> None:
        before = [session.last for session in sessions]
        read(self, sessions)
        for session, last in zip(sessions, before, strict=True):
            session.last = session.last if last is None else last

    return mutated


def one_layer_deeper(layer: Original) -> Original:
    return lambda self, request, depth, paths: layer(self, request, min(depth + 1, LENGTH - 1), paths)


def copy_nothing(copy: Original) -> Original:
    def mutated(self: Any, state: Any, other: Any, length: int) -> None:
        """Leave the new session empty."""

    return mutated


def forget_outputs(keep: Original) -> Original:
    def mutated(self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
        keep(self, path, live)
        self.outputs = [0.0 * row for row in self.outputs if row is not None]

    return mutated


def _mutation(name: str, owner: Any, attribute: str, make: Any, find: Any = find_in_heads) -> Mutation:
    return Mutation(f"heads: {name}", [owner], attribute, make, find)


HEAD_MUTATIONS = [
    _mutation("features are those of the position before", NativeHead, "fuse", shift_features),
    _mutation("the head's state of a shared prefix is not copied", FeatureDrafter, "copy_prefix", copy_nothing),
    _mutation("a node reads no output of its parent", FeatureSession, "keep", forget_outputs),
    _mutation("features of EAGLE-1 are not normed", JoinedModel, "fuse", without_norm, find_in_joined),
    _mutation("fc reads embedding and feature in the wrong order", eagle3, "join_rows", swap_sides, find_in_joined),
    _mutation("Medusa reads an older feature", MedusaModel, "read_features", keep_first_feature, find_in_medusa),
    _mutation("Medusa's heads are taken in another order", BlockDraft, "layer", one_layer_deeper, find_in_medusa),
]
