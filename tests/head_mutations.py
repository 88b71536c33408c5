"""Mistakes in drafting with a trained head. The text stays the same, but a head that is always right is rejected."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from block_heads import block_config, block_tensors, exact_block
from heads import exact_pair, head_config, head_tensors, write_folder
from joined_heads import exact_joined
from medusa_heads import exact_medusa
from mutation_checks import Mutation, Original
from slot_heads import exact_slots, exact_states

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.drafters._feature_drafter import HeadDrafter
from outpace.models.heads import reader
from outpace.models.heads.files import open_head
from outpace.models.heads.head import Head, HeadSession
from outpace.models.heads.kinds import block, features
from outpace.models.heads.kinds.block import BlockDraft
from outpace.models.heads.kinds.features import JoinedHead
from outpace.models.heads.kinds.medusa import MedusaHead
from outpace.models.heads.kinds.slots import SlotHead
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


def _rejected(target: Loaded, head: Loaded, prompt: list[int] | None = None) -> str | None:
    prompt = prompt or target.tokenizer.encode("one two three four " * 5)
    options = {"method": "speculative", "drafter": head.drafter, "draft_length": LENGTH, "width": 1, "profile": False}
    with LLM(target, head, **options) as llm:
        for asked in (prompt, [*prompt, *prompt[:7]]):
            [answer] = llm.generate([asked], max_tokens=TOKENS, ignore_eos=True)
            if answer.figures.accepted < TOKENS * LENGTH / (LENGTH + 1) - 1:
                return f"{answer.figures.accepted} of {answer.figures.drafted} drafts are accepted"
    return None


def find_in_layout() -> str | None:
    """Return a fault if a block's drafts are rejected whose config names the layout by another field than most."""
    with tempfile.TemporaryDirectory() as folder:
        target, head = exact_block(Path(folder), True, query_zero_predicts_next=True)
        loaded = load_model(target, dtype="int8")
        return _rejected(loaded, load_draft(head, loaded), [*range(9)])


def find_in_fields() -> str | None:
    """Return a fault if fields of a head that contradict each other, the tensors or the target are not refused, or if
    what is guessed or ignored is not named."""
    eagle, block = head_config(), block_config()
    shared = {name: one for name, one in block_tensors(block).items() if name != "embed_tokens.weight"}
    refused = (
        (block | {"sample_from_anchor": True, "query_zero_predicts_next": False}, block_tensors(block)),
        (eagle, head_tensors(eagle) | {"d2t": np.zeros_like(head_tensors(eagle)["d2t"])}),
        (block, shared),  # the target's embedding has no row for its mask
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, (config, tensors) in enumerate(refused):
            try:
                _read(write_folder(Path(folder) / str(number), config, tensors))
            except UserError:
                continue
            return f"the contradiction {number} is not refused"
        notices = _read(write_folder(Path(folder) / "named", eagle | {"mystery": 1}, head_tensors(eagle))).notices
    return None if len(notices) == 2 else f"of a guess and an unknown field, {len(notices)} are named"


def _read(path: Path) -> Any:
    return reader.read_head(open_head(path), {"hidden_size": 64, "vocab_size": 260}, 256, 8)


def first_name_of_layout(agreed: Original, config: Any, names: Sequence[str], read: Any) -> Any:
    return agreed(config, names[:1] if names[0] == "sample_from_anchor" else names, read)


def first_that_is_there(agreed: Original, config: Any, names: Sequence[str], read: Any) -> Any:
    return next((found for name in names if (found := agreed(config, [name], read))), None)


def trusted_map(draft_ids: Original, files: Any, head: Any) -> Any:
    return files.array("d2t") + np.arange(head.num_rows) if "d2t" in files else None


def any_mask(mask_token: Original, head: Any, config: Any, files: Any, target: Any) -> Any:
    return mask_token(head, config, files, {})


def unnamed(check_unread: Original, *fields: Any) -> Any:
    return []


def silent_guess(taps: Original, *arguments: Any) -> Any:
    return (taps(*arguments)[0], None)


def shift_features(fuse: Original, self: Any, hidden: Any) -> Any:
    rows = fuse(self, hidden)
    return np.concatenate([0.0 * rows[:1], rows[:-1]])


def without_norm(fuse: Original, self: Any, hidden: Any) -> Any:
    return self.receive(hidden[0])


def swap_sides(join_rows: Original, parts: Any, axis: Any = 0) -> Any:
    return join_rows(parts[::-1] if axis else parts, axis)


def keep_first_feature(read: Original, self: Any, sessions: Sequence[Any]) -> None:
    before = [session.outputs for session in sessions]
    read(self, sessions)
    for session, last in zip(sessions, before, strict=True):
        session.outputs = last


def one_layer_deeper(layer: Original, self: Any, request: Any, depth: Any, paths: Any) -> Any:
    return layer(self, request, min(depth + 1, LENGTH - 1), paths)


def shift_columns(fuse: Original, self: Any, hidden: Any) -> Any:
    return np.roll(fuse(self, hidden), self.spec.target_width // 2, 1)


def without_embedding(embed: Original, self: Any, part: Any) -> Any:
    return 0.0 * embed(self, part)


def embedding_of_token_before(embed: Original, self: Any, part: Any) -> Any:
    return embed(self, part._replace(tokens=[part.tokens[0], *part.tokens[:-1]]))


def reverse_slots(score: Original, self: Any, rows: Any) -> Any:
    found = score(self, rows)
    slots = found.values.reshape(-1, self.spec.block, found.values.shape[-1])[:, ::-1]
    return found._replace(values=np.ascontiguousarray(slots).reshape(found.values.shape))


def copy_nothing(copy: Original, self: Any, state: Any, other: Any, length: int) -> None:
    """Leave the new session empty."""


def forget_outputs(keep: Original, self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
    keep(self, path, live)
    self.outputs = [0.0 * row for row in self.outputs if row is not None]


def _mutation(name: str, owner: Any, attribute: str, mistake: Any, write: Any = exact_pair) -> Mutation:
    return Mutation(f"heads: {name}", [owner], attribute, mistake, partial(find_in, write))


def _of_reader(name: str, attribute: str, mistake: Any, find: Callable[[], str | None] = find_in_fields) -> Mutation:
    owners = [one for one in (reader, block) if hasattr(one, attribute)]
    return Mutation(f"heads: {name}", owners, attribute, mistake, find)


HEAD_MUTATIONS = [
    _of_reader("a field that shifts a block is not read", "agreed", first_name_of_layout, find_in_layout),
    _of_reader("fields that contradict each other are taken", "agreed", first_that_is_there),
    _of_reader("maps that contradict each other are taken", "draft_ids", trusted_map),
    _of_reader("a mask without a row in the embedding is taken", "read_mask", any_mask),
    _of_reader("unknown fields are ignored without a word", "check_unread", unnamed),
    _of_reader("layers are guessed without a word", "_taps", silent_guess),
    _mutation("features are those of the position before", Head, "fuse", shift_features),
    _mutation("the head's state of a shared prefix is not copied", HeadDrafter, "copy_prefix", copy_nothing),
    _mutation("a node reads no output of its parent", HeadSession, "keep", forget_outputs),
    _mutation("features of EAGLE-1 are not normed", JoinedHead, "fuse", without_norm, exact_joined),
    _mutation("fc reads embedding and feature in the wrong order", features, "join_rows", swap_sides, exact_joined),
    _mutation("SpecFormer reads older features", SlotHead, "fuse", shift_features, exact_states),
    _mutation("SpecFormer reads a part of another layer", SlotHead, "fuse", shift_columns, exact_states),
    _mutation("SpecFormer reads no embedding", JoinedHead, "embed", without_embedding, exact_slots),
    _mutation("SpecFormer reads the token before", JoinedHead, "embed", embedding_of_token_before, exact_slots),
    _mutation("SpecFormer's slots are in another order", SlotHead, "score_outputs", reverse_slots, exact_slots),
    _mutation("Medusa reads an older feature", MedusaHead, "read_features", keep_first_feature, exact_medusa),
    _mutation("Medusa's heads are taken in another order", BlockDraft, "layer", one_layer_deeper, exact_medusa),
]
