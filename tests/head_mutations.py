"""Mistakes in drafting with a trained head. The text stays the same, but a head that is always right is rejected."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from heads import exact_pair
from joined_heads import exact_joined
from medusa_heads import exact_medusa
from mutation_checks import Mutation, Original
from slot_heads import exact_slots, exact_states

from outpace.api.llm import LLM
from outpace.drafters._feature_drafter import FeatureDrafter
from outpace.models.heads import eagle3
from outpace.models.heads.dflash import BlockDraft
from outpace.models.heads.eagle3 import FeatureSession, JoinedModel
from outpace.models.heads.medusa import MedusaModel
from outpace.models.heads.native import NativeHead, NativeJoined
from outpace.models.heads.specformer import SlotModel, SpecFormerModel
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

LENGTH, TOKENS = 3, 24


@cache
def pairs(write: Callable[[Path], tuple[Path, ...]]) -> tuple[Any, list[tuple[Loaded, Loaded]]]:
    """Return the temporary folder, and the targets that `write` makes there with drafts that are always right.

    `write` returns the folders of a target and its head; a third one is a target with an MTP layer.
    """
    folder = tempfile.TemporaryDirectory()
    target, head, *mtp = write(Path(folder.name))
    loaded = [(load_model(one, dtype="int8"), draft) for one, draft in [(target, head), *((one, "mtp") for one in mtp)]]
    return folder, [(one, load_draft(draft, one)) for one, draft in loaded]


def find_in(write: Callable[[Path], tuple[Path, ...]]) -> str | None:
    """Return a fault if drafts are rejected, in an answer or in one whose prompt begins like the first."""
    return next((found for both in pairs(write)[1] if (found := _rejected(*both))), None)


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


def shift_columns(fuse: Original) -> Original:
    return lambda self, hidden: np.roll(fuse(self, hidden), self.head.target_width // 2, 1)


def without_embedding(embed: Original) -> Original:
    return lambda self, tokens: 0.0 * embed(self, tokens)


def embedding_of_token_before(embed: Original) -> Original:
    def mutated(self: Any, tokens: Sequence[int]) -> Any:
        return embed(self, [tokens[0], *tokens[:-1]])

    return mutated


def reverse_slots(score: Original) -> Original:
    def mutated(self: Any, rows: Any) -> Any:
        found = score(self, rows)
        slots = found.values.reshape(-1, self.head.block, found.values.shape[-1])[:, ::-1]
        return found._replace(values=np.ascontiguousarray(slots).reshape(found.values.shape))

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


def _mutation(name: str, owner: Any, attribute: str, make: Any, write: Any = exact_pair) -> Mutation:
    return Mutation(f"heads: {name}", [owner], attribute, make, partial(find_in, write))


HEAD_MUTATIONS = [
    _mutation("features are those of the position before", NativeHead, "fuse", shift_features),
    _mutation("the head's state of a shared prefix is not copied", FeatureDrafter, "copy_prefix", copy_nothing),
    _mutation("a node reads no output of its parent", FeatureSession, "keep", forget_outputs),
    _mutation("features of EAGLE-1 are not normed", JoinedModel, "fuse", without_norm, exact_joined),
    _mutation("fc reads embedding and feature in the wrong order", eagle3, "join_rows", swap_sides, exact_joined),
    _mutation("SpecFormer reads older features", SpecFormerModel, "fuse", shift_features, exact_states),
    _mutation("SpecFormer reads a part of another layer", SpecFormerModel, "fuse", shift_columns, exact_states),
    _mutation("SpecFormer reads no embedding", NativeJoined, "embed", without_embedding, exact_slots),
    _mutation("SpecFormer reads the token before", NativeJoined, "embed", embedding_of_token_before, exact_slots),
    _mutation("SpecFormer's slots are in another order", SlotModel, "score_outputs", reverse_slots, exact_slots),
    _mutation("Medusa reads an older feature", MedusaModel, "read_features", keep_first_feature, exact_medusa),
    _mutation("Medusa's heads are taken in another order", BlockDraft, "layer", one_layer_deeper, exact_medusa),
]
