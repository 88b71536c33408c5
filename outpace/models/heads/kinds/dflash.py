"""DFlash: one forward over a block of mask tokens drafts several tokens. arXiv:2602.06036.

Slot t of a session holds keys and values of the target's hidden states at position t, one for each layer of the head. A
block begins with the last written token, whose hidden states are not known yet; its other slots are masks. All of them
attend to the session's slots and to each other, and are dropped after the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, host_array, select_rows
from outpace.core.tree import PREFIX
from outpace.models.base import Model, Part, chain
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.fields import agreed, within
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head, Weights
from outpace.models.heads.reader import BLOCK_TAPS, MAX_DRAFTED, base_shapes, read_mask
from outpace.models.llama.config.fields import ReadFields, flag, size

CHUNK = 256  # features whose keys and values one forward computes
PROJECTORS = ("dflash", "dspark")  # the output layers of blocks
MARKOV, MARKOV_KINDS = "markov_head.", ("vanilla", "gated", "rnn")  # DSpark's: a prefix of tensors, and the kinds
FROM_ANCHOR = {  # fields, and the value with which a slot predicts the token after it
    **dict.fromkeys(within("dflash_config", "sample_from_anchor", "query_zero_predicts_next", "shift_label"), True),
    **dict.fromkeys(within("dflash_config", "dspark_bonus_anchor"), False),
}


class BlockDraft:
    """The output of a forward over blocks, one for each request: logits of every drafted position."""

    def __init__(self, head: HeadConfig, logits: SparseLogits, hidden: Any = None) -> None:
        """`hidden` [requests * block, width]: the normed outputs of all slots; None if nothing reads them."""
        self._head, self._logits, self._hidden = head, logits, hidden

    def layer(self, request: int, depth: int, paths: Sequence[Sequence[int]]) -> SparseLogits:
        """Return the logits below nodes of this depth [nodes, kept tokens]. `paths`: the tokens of each, from the last
        written one down to the node."""
        row = request * self._head.num_drafted + depth
        return self._logits._replace(values=select_rows(self._logits.values, [row] * len(paths)))

    def log_confidence(self, request: int, path: Sequence[int]) -> float | None:
        """Return the logarithm of the estimated probability that the best token below a node is accepted, or None."""
        return None


class BlockHead(Head):
    """Calls the layers with blocks, after storing keys and values of the features before them."""

    drafter = "block"
    tap_fields = BLOCK_TAPS
    is_block = True
    from_anchor = False  # unless the file says so
    is_best_first = False  # whether the tree grows by its best node, not level by level

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        super().__init__(spec, weights, layers)
        self.store_features = weights.storing(self.layers)

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        if (files.path / "mask_embedding.pt").exists():
            raise UserError(
                "the folder holds mask_embedding.pt: a head with its own embedding of the mask is not supported"
            )
        is_speculators = "speculators_model_type" in config
        projector = agreed(config, within("dflash_config", "projector_type"), lambda fields, name: fields[name])
        if projector and projector[1] not in PROJECTORS:
            raise UserError(f"{projector[0]} is {projector[1]!r:.80}, it must be one of {', '.join(PROJECTORS)}")
        causal = agreed(config, within("dflash_config", "is_causal", "causal"), flag)
        slides = not flag(config, "sliding_window_non_causal")
        windows = map(head.layers.window, range(head.layers.num_layers))
        stated = agreed(config, (*within("dflash_config", "block_size"), "dspark_block_size"), size)
        block = stated[1] if stated else size({}, "block_size", 8 if is_speculators else None)
        anchor = agreed(config, [*FROM_ANCHOR], lambda fields, name: flag(fields, name) == FROM_ANCHOR[name])
        notices = head.notices
        if anchor is None and cls.from_anchor and (is_speculators or files.is_gguf):  # whose programs do not agree
            notices += ("sample_from_anchor is missing and taken as true: each slot predicts the token after it",)
        head = replace(
            head,
            mask_token=read_mask(head, config, files, target),
            block=block,
            from_anchor=anchor[1] if anchor else cls.from_anchor,
            causal=tuple(causal[1] if causal else slides and window is not None for window in windows),
            markov=_markov_kind(config, files),
        )
        if not 1 <= head.num_drafted <= MAX_DRAFTED:
            min_size = 1 if head.from_anchor else 2
            raise UserError(f"block_size is {block}, it must be between {min_size} and {min_size + MAX_DRAFTED - 1}")
        if (head.draft_length or 0) > head.num_drafted:
            notices += (f"it recommends {head.draft_length} tokens, and a block of {block} drafts {head.num_drafted}",)
        return replace(head, notices=notices)

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        return base_shapes(head, files, ("norm", "hidden_norm"))

    @classmethod
    def usual_taps(cls, own_layers: int, num_layers: int) -> tuple[int, ...]:
        """Return the outputs of evenly spread layers."""
        last, steps = num_layers - 4, max(own_layers - 1, 1)
        return tuple(
            1 + (round(1 + one * last / steps) if own_layers > 1 else num_layers // 2) for one in range(own_layers)
        )

    def read_features(self, sessions: Sequence[Any]) -> None:
        """Store the keys and values of all queued features and commit them."""
        while waiting := [session for session in sessions if len(session.features)]:
            parts = []
            for session in waiting:
                rows, session.features = session.features[:CHUNK], session.features[CHUNK:]
                parts.append(chain(session.stored, [0] * len(rows))._replace(inputs=rows, keep=None))
            self.store_features(parts)
            for part in parts:
                part.session.keep(range(len(part.tokens)))

    def draft(self, sessions: Sequence[Any], anchors: Sequence[int]) -> BlockDraft:
        """Run one forward over a block for each session. `anchors`: the last written token of each."""
        self.read_features(sessions)
        spec = self.spec
        masks, rows = [spec.mask_token or 0] * (spec.block - 1), range(spec.block - spec.num_drafted, spec.block)
        draft = self._score_blocks(
            [
                Part(session.stored, [anchor, *masks], range(PREFIX, spec.block - 1), rows)
                for session, anchor in zip(sessions, anchors, strict=True)
            ]
        )
        for session in sessions:
            session.keep(())
        return draft

    def _score_blocks(self, parts: Sequence[Part]) -> BlockDraft:
        return BlockDraft(self.spec, self.layers.score_sparse(parts))

    def _score_blocks_hidden(self, parts: Sequence[Part]) -> tuple[SparseLogits, Any]:
        """Run the forward over blocks; also return the normed outputs of all slots: [requests * block, width]"""
        parts = [part._replace(hidden_rows=range(self.spec.block)) for part in parts]
        logits, outputs = self.layers.score_sparse_hidden(parts, (self.num_layers,))
        return logits, host_array(self.normed("norm", outputs[0]))


def _markov_kind(config: ReadFields, files: HeadFiles) -> str | None:
    """Return `HeadConfig.markov`; UserError if the fields contradict the tensors."""
    name, tensor = "markov_head_type", f"{MARKOV}markov_w1.weight"
    kind = (agreed(config, within("dflash_config", name), lambda fields, key: fields[key]) or ("", MARKOV_KINDS[0]))[1]
    if kind not in MARKOV_KINDS:
        raise UserError(f"{name} is {kind!r:.80}, it must be one of {', '.join(MARKOV_KINDS)}")
    rank = files.shape(tensor)[-1] if tensor in files else 0
    ranks = (*within("dflash_config", "markov_rank"), "dspark_markov_rank")
    stated = agreed(config, ranks, partial(size, smallest=0))
    if stated and stated[1] != rank:
        held = f"{tensor!r} has rank {rank}" if rank else f"the files hold no tensor {tensor!r}"
        raise UserError(f"{stated[0]} is {stated[1]}, but {held}")
    return kind if rank else None
