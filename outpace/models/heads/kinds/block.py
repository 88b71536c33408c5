"""Heads that draft a block of mask tokens in one forward: DFlash, arXiv:2602.06036, and DSpark, arXiv:2607.05147.

Slot t of a session holds keys and values of the target's hidden states at position t, one for each layer of the head. A
block begins with the last written token, whose hidden states are not known yet; its other slots are masks. All of them
attend to the session's slots and to each other, and are dropped after the forward. DSpark adds a bias that depends on
the token before, and a confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, best_tokens, host_array, select_rows
from outpace.core.tree import PREFIX
from outpace.models.base import Model, Part, chain
from outpace.models.heads.config import DFLASH, DSPARK, HeadConfig
from outpace.models.heads.fields import agreed, within
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head, Weights
from outpace.models.heads.reader import BLOCK_TAPS, MAX_DRAFTED, base_shapes, draft_ids, read_mask
from outpace.models.llama.config.fields import ReadFields, flag, size

CHUNK = 256  # features whose keys and values one forward computes
CANDIDATES = 64  # tokens of a row that can be drafted: the best before the Markov bias is added
CONFIDENCE = "confidence_head.proj."  # prefix of tensors
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
    """DFlash: calls the layers with blocks, after storing keys and values of the features before them."""

    kinds: tuple[str, ...] = (DFLASH,)
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


class Markov(NamedTuple):
    """The weights of a DSpark head's Markov bias and confidence in host memory, by name: float32 arrays. `kind`: see
    `HeadConfig.markov`. `tokens`: the token of each row of `markov_w2`, ascending; None: 0, 1, ..."""

    kind: str | None
    weights: dict[str, np.ndarray]
    tokens: np.ndarray | None

    @classmethod
    def from_files(cls, files: HeadFiles, head: HeadConfig) -> Markov:
        """Read the weights that the files hold, among them `markov_w1` and `markov_w2` if the kind is not None."""
        names = [name for name in files.tensors if name.startswith((MARKOV, CONFIDENCE))]
        weights = {name.removeprefix(MARKOV).removesuffix(".weight"): files.array(name) for name in names}
        if (ids := draft_ids(files, head)) is not None and head.markov:
            weights["markov_w2"] = weights["markov_w2"][np.argsort(ids)]
        return cls(head.markov, weights, None if ids is None else np.sort(ids))

    def outputs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rows of `markov_w2` for these tokens, [tokens, rank]."""
        rows: np.ndarray = self.weights["markov_w2"]
        return rows[tokens if self.tokens is None else np.searchsorted(self.tokens, tokens)]

    def embedding(self, token: int) -> np.ndarray:
        """Return the embedding [rank] of the preceding token; tokens beyond the table have that of its last row."""
        table = self.weights["markov_w1"]
        row: np.ndarray = table[min(token, len(table) - 1)]
        return row

    def vector(self, hidden: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the vector [rank] that `markov_w2` maps to the bias of a slot's logits. `hidden` [slots, width] are
        the outputs of the block's slots up to this one, `tokens` the token before each slot's prediction."""
        before = self.embedding(tokens[-1])
        if self.kind == "vanilla":
            return before
        if self.kind == "gated":
            return before * _sigmoid(self._linear("gate_proj", np.concatenate([hidden[-1], before])))
        state, output = np.zeros_like(before), before
        for row, token in zip(hidden, tokens, strict=True):
            joint = self._linear("joint_proj", np.concatenate([state, self.embedding(token), row]))
            gate, candidate, output = np.split(joint, 3)
            state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate)
        return np.tanh(output)

    def log_confidence(self, hidden: np.ndarray, token: int) -> float | None:
        """Return the logarithm of the estimated probability that the slot's token is accepted; None if the head gives
        no estimate. `hidden` [width] is the slot's output, `token` the preceding token."""
        weight = self.weights.get(CONFIDENCE.rstrip("."))
        if weight is None:
            return None
        read = hidden if weight.shape[1] == len(hidden) else np.concatenate([hidden, self.embedding(token)])
        score = float((weight @ read)[0] + self.weights[f"{CONFIDENCE}bias"][0])
        return -float(np.logaddexp(0.0, -score))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        product: np.ndarray = self.weights[name] @ x + self.weights[f"{name}.bias"]
        return product


class MarkovDraft(BlockDraft):
    """Logits with the bias of the token before."""

    def __init__(self, head: HeadConfig, logits: SparseLogits, hidden: Any, markov: Markov) -> None:
        super().__init__(head, logits, hidden)
        self._markov = markov

    def layer(self, request: int, depth: int, paths: Sequence[Sequence[int]]) -> SparseLogits:
        if self._head.markov is None:
            return super().layer(request, depth, paths)
        row = request * self._head.num_drafted + depth
        columns = np.sort(self._candidates[row])
        ids = columns if self._logits.ids is None else self._logits.ids[columns]
        vectors = np.stack([self._markov.vector(*self._slots(request, path)) for path in paths])
        biased = self._base[row, columns] + vectors @ self._markov.outputs(ids).T
        return SparseLogits(biased.astype(np.float32), ids, self._logits.vocab)

    def log_confidence(self, request: int, path: Sequence[int]) -> float | None:
        hidden, tokens = self._slots(request, path)
        return self._markov.log_confidence(hidden[-1], tokens[-1])

    def _slots(self, request: int, path: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return the outputs of the block's slots up to the one that predicts the node's children, and the token before
        each prediction."""
        tokens = [*path] if self._head.from_anchor else [path[0], *path]
        first = request * self._head.block
        return self._hidden[first : first + len(tokens)], tokens

    @cached_property
    def _candidates(self) -> np.ndarray:
        return best_tokens(self._logits.values, min(CANDIDATES, self._head.num_rows))

    @cached_property
    def _base(self) -> np.ndarray:
        return host_array(self._logits.values)


class MarkovHead(BlockHead):
    """DSpark: a DFlash head with a Markov bias, a confidence, or both."""

    kinds = (DSPARK,)
    from_anchor = True

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        super().__init__(spec, weights, layers)
        self.markov = Markov.from_files(weights.files, spec)

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        """Return also those of the Markov bias and of the confidence, which may read the embedding of the token
        before."""
        hidden, rank = head.layers.hidden_size, files.shape(f"{MARKOV}markov_w1.weight")[-1] if head.markov else 0
        shapes = super().shapes(head, files)
        if head.markov:
            shapes[f"{MARKOV}markov_w1.weight"] = (head.layers.vocab_size, rank)
            shapes[f"{MARKOV}markov_w2.weight"] = (head.num_rows, rank)
        if head.markov == "gated":
            shapes |= {f"{MARKOV}gate_proj.weight": (rank, hidden + rank), f"{MARKOV}gate_proj.bias": (rank,)}
        if head.markov == "rnn":
            sizes = 3 * rank, 2 * rank + hidden
            shapes |= {f"{MARKOV}joint_proj.weight": sizes, f"{MARKOV}joint_proj.bias": sizes[:1]}
        if f"{CONFIDENCE}weight" in files:
            reads_token = files.shape(f"{CONFIDENCE}weight")[-1] != hidden
            shapes |= {f"{CONFIDENCE}weight": (1, hidden + rank * reads_token), f"{CONFIDENCE}bias": (1,)}
        return shapes

    def _score_blocks(self, parts: Sequence[Part]) -> BlockDraft:
        if not self.markov.weights:
            return super()._score_blocks(parts)
        parts = [part._replace(hidden_rows=range(self.spec.block)) for part in parts]
        logits, outputs = self.layers.score_sparse_hidden(parts, (self.num_layers,))
        return MarkovDraft(self.spec, logits, host_array(self.normed("norm", outputs[0])), self.markov)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result
