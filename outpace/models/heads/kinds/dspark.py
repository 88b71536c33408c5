"""DSpark: DFlash with a bias that depends on the token before, and a confidence. arXiv:2607.05147."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from outpace.core.logits import SparseLogits, best_tokens, host_array
from outpace.models.base import Model, Part
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Weights
from outpace.models.heads.kinds.dflash import MARKOV, BlockDraft, BlockHead
from outpace.models.heads.reader import draft_ids

CANDIDATES = 64  # tokens of a row that can be drafted: the best before the Markov bias is added
CONFIDENCE = "confidence_head.proj."  # prefix of tensors


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
    """A DFlash head with a Markov bias, a confidence, or both."""

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
        return MarkovDraft(self.spec, *self._score_blocks_hidden(parts), self.markov)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result
