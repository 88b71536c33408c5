"""DFlash and DSpark as draft models: one forward over a block of mask tokens drafts several tokens.

DFlash: arXiv:2602.06036. DSpark, which adds a Markov bias and a confidence: arXiv:2607.05147.

Slot t of a session holds keys and values of the target's hidden states at position t, one for each layer of the head. A
block begins with the last written token, whose hidden states are not known yet; its other slots are masks. All of them
attend to the session's slots and to each other, and are dropped after the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from outpace.core.logits import SparseLogits, best_tokens, host_array, select_rows
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.eagle3 import FeatureSession, HeadModel
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import CONFIDENCE, MARKOV, draft_ids

CHUNK = 256  # features whose keys and values one forward computes
CANDIDATES = 64  # tokens of a row that can be drafted: the best before the Markov bias is added


class BlockSession(FeatureSession):
    """A session whose new slots attend to each other. `features`: those whose keys and values are not stored yet."""

    def extend_bytes(self, parents: Sequence[int]) -> bytes:
        return b"\1" * len(super().extend_bytes(parents))


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


class BlockDraft:
    """The output of a forward over blocks, one for each request: logits of every drafted position."""

    def __init__(self, head: HeadConfig, markov: Markov, logits: SparseLogits, hidden: Any) -> None:
        """`hidden` [requests * block, width]: the normed outputs of all slots; None if nothing reads them."""
        self._head, self._markov, self._logits, self._hidden = head, markov, logits, hidden

    def layer(self, request: int, depth: int, paths: Sequence[Sequence[int]]) -> SparseLogits:
        """Return the logits below nodes of this depth [nodes, kept tokens]. `paths`: the tokens of each, from the last
        written one down to the node."""
        row = request * self._head.num_drafted + depth
        if self._head.markov is None:
            return self._logits._replace(values=select_rows(self._logits.values, [row] * len(paths)))
        columns = np.sort(self._candidates[row])
        ids = columns if self._logits.ids is None else self._logits.ids[columns]
        vectors = np.stack([self._markov.vector(*self._slots(request, path)) for path in paths])
        biased = self._base[row, columns] + vectors @ self._markov.outputs(ids).T
        return SparseLogits(biased.astype(np.float32), ids, self._logits.vocab)

    def log_confidence(self, request: int, path: Sequence[int]) -> float | None:
        """Return the logarithm of the estimated probability that the best token below a node is accepted, or None."""
        if self._hidden is None:
            return None
        hidden, tokens = self._slots(request, path)
        return self._markov.log_confidence(hidden[-1], tokens[-1])

    def _slots(self, request: int, path: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return the outputs of the block's slots up to the one that predicts the node's children, and the token before
        each prediction. The first slot predicts nothing in most DFlash heads."""
        tokens = [*path] if self._head.from_anchor else [path[0], *path]
        first = request * self._head.block
        hidden = np.empty((len(tokens), 0)) if self._hidden is None else self._hidden[first : first + len(tokens)]
        return hidden, tokens

    @cached_property
    def _candidates(self) -> np.ndarray:
        return best_tokens(self._logits.values, min(CANDIDATES, self._head.num_rows))

    @cached_property
    def _base(self) -> np.ndarray:
        return host_array(self._logits.values)


class BlockModel(HeadModel):
    """Adds blocks to a runtime whose model consists of the head's layers."""

    markov: Markov

    def store_features(self, parts: Sequence[Part]) -> None:
        """Store the keys and values of the parts' inputs, which are features, in every layer."""
        raise NotImplementedError

    def read_features(self, sessions: Sequence[Any]) -> None:
        """Store the keys and values of all queued features and commit them."""
        while waiting := [session for session in sessions if len(session.features)]:
            parts = []
            for session in waiting:
                rows, session.features = session.features[:CHUNK], session.features[CHUNK:]
                parts.append(chain(session, [0] * len(rows))._replace(inputs=rows, keep=None))
            self.store_features(parts)
            for part in parts:
                part.session.keep(range(len(part.tokens)))

    def draft(self, sessions: Sequence[Any], anchors: Sequence[int]) -> BlockDraft:
        """Run one forward over a block for each session. `anchors`: the last written token of each."""
        self.read_features(sessions)
        head = self.head
        masks, rows = [head.mask_token or 0] * (head.block - 1), range(head.block - head.num_drafted, head.block)
        parts = [
            Part(session, [anchor, *masks], range(PREFIX, head.block - 1), rows, hidden_rows=range(head.block))
            for session, anchor in zip(sessions, anchors, strict=True)
        ]
        hidden = None
        if self.markov.weights:
            logits, outputs = self.score_sparse_hidden(parts, (self.num_layers,))
            hidden = host_array(self.normed("norm", outputs[0]))
        else:
            logits = self.score_sparse([part._replace(hidden_rows=()) for part in parts])
        for session in sessions:
            session.keep(())
        return BlockDraft(head, self.markov, logits, hidden)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result
