"""An exact model for tests: float64 logits looked up from random tables by the last few tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from outpace.core.logits import SparseLogits, TargetOutput
from outpace.models.base import Capability, Model, Part, Session


class ToySession(Session):
    """Stores tokens where a real model stores keys and values, so that a wrong `keep` or mask changes the logits."""

    block = 8

    def __init__(self, capacity: int, max_pending: int) -> None:
        super().__init__(capacity, max_pending)
        self.tokens = np.empty(0, dtype=np.int64)

    def _resize(self, slots: int) -> None:
        kept = self.tokens[:slots]
        self.tokens = np.concatenate([kept, np.full(slots - len(kept), -1, dtype=np.int64)])

    def _move(self, source: Sequence[int], start: int) -> None:
        self.tokens[start : start + len(source)] = self.tokens[source]

    def _copy(self, other: ToySession, length: int) -> None:
        self.tokens[:length] = other.tokens[:length]


class Toy(Model):
    """A model with one layer for each of the last `order` tokens.

    The attention of layer i adds a row of table i, chosen by the token i places back, to the residual stream; the MLP
    adds `mlp` * tanh of the stream. The stream after the last layer is the logits. `agreement` blends the tables with
    those of another seed: the nearer it is to 1, the more a drafter agrees with the target of the same `seed`.
    """

    token_bytes = 8
    capabilities = frozenset(Capability)

    def __init__(
        self, vocab_size: int = 16, order: int = 3, seed: int = 0, agreement: float = 1.0, mlp: float = 0.0
    ) -> None:
        self.vocab_size, self.num_layers = vocab_size, order
        self.mask_token = vocab_size  # a row of its own in the tables
        self.max_positions = 1 << 20
        self.device = torch.device("cpu")
        shape = (order, vocab_size + 1, vocab_size)  # the extra row is for positions before the text
        generators = (torch.Generator().manual_seed(one) for one in (seed, seed + 7919))
        tables, noise = (torch.randn(shape, generator=one, dtype=torch.float64) for one in generators)
        self._tables = 2.0 * (agreement * tables + (1.0 - agreement) * noise)
        self._mlp = [mlp] * order
        self._skipped: frozenset[int] = frozenset()  # attention layers

    def open(self, capacity: int, max_pending: int) -> ToySession:
        return ToySession(capacity, max_pending)

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Return float64 logits [logit rows, vocab] and hidden states [layers, hidden rows, vocab]."""
        rows, shown = list[Tensor](), list[Tensor]()
        for part in forest:
            contexts = self._contexts(part)
            for node in part.logit_rows:
                is_plain = part.inputs is None and part.mlp_bias is None
                rows.append(self._row(contexts[node]) if is_plain else self._stream(contexts[node], part, node)[-1])
            for node in part.hidden_rows:
                stream = self._stream(contexts[node], part, node)
                shown.append(torch.stack([stream[layer] for layer in layers]))
        nothing = torch.empty(0, self.vocab_size, dtype=torch.float64)
        return TargetOutput(torch.stack(rows) if rows else nothing, torch.stack(shown, 1) if shown else None)

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Toy:
        other = copy(self)
        other._skipped = self._skipped.union(attention)
        other._mlp = [0.0 if layer in mlp else strength for layer, strength in enumerate(self._mlp)]
        return other

    def project(self, hidden: Tensor) -> SparseLogits:
        return SparseLogits(hidden, None, self.vocab_size)

    def _contexts(self, part: Part) -> dict[int, list[int]]:
        """Store a part's tokens; return for each node with an output the trailing tokens that it sees, itself last."""
        session = part.session
        before = session.pending
        visible = session.extend(part.parents)
        start = session.length
        session.tokens[start + before : start + before + len(part.tokens)] = part.tokens
        end = start if part.length is None else part.length
        committed = session.tokens[max(0, end - self.num_layers) : end].tolist()
        nodes = {*part.logit_rows, *part.hidden_rows}
        return {node: committed + session.tokens[np.flatnonzero(visible[node]) + start].tolist() for node in nodes}

    def _row(self, context: Sequence[int]) -> Tensor:
        return self._stream(context)[-1]

    def _stream(self, context: Sequence[int], part: Part | None = None, node: int = 0) -> list[Tensor]:
        """Return the residual stream before the first layer and after each layer, each [vocab]."""
        inputs, bias = (part.inputs, part.mlp_bias) if part else (None, None)
        x = torch.zeros(self.vocab_size, dtype=torch.float64) if inputs is None else inputs[node].double()
        stream = [x]
        for layer, table in enumerate(self._tables):
            if layer not in self._skipped:
                back = layer + 1
                x = x + table[context[-back] if back <= len(context) else self.vocab_size]
            if self._mlp[layer]:
                x = x + self._mlp[layer] * torch.tanh(x if bias is None else x + bias[layer])
            stream.append(x)
        return stream
