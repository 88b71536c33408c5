"""An exact model for tests: float64 scores that are a function of the last few tokens, looked up, never learnt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.models.base import Model, Part, Session


class ToySession(Session):
    """Keeps a token where a real model keeps keys and values: a wrong `keep` or mask shows in the scores."""

    block = 8

    def __init__(self, capacity: int, room: int) -> None:
        super().__init__(capacity, room)
        self.tokens = np.empty(0, dtype=np.int64)

    def _resize(self, slots: int) -> None:
        kept = self.tokens[:slots]
        self.tokens = np.concatenate([kept, np.full(slots - len(kept), -1, dtype=np.int64)])

    def _move(self, source: np.ndarray, start: int) -> None:
        self.tokens[start : start + len(source)] = self.tokens[source]

    def _copy(self, other: ToySession, length: int) -> None:
        self.tokens[:length] = other.tokens[:length]


class Toy(Model):
    """logits = the sum over i of table_i[token i back], the last `order` tokens counted.

    `agreement` blends the tables with those of another seed: a drafter that agrees with a target of `seed` the more,
    the nearer it is to 1.
    """

    token_bytes = 8

    def __init__(self, vocab_size: int = 16, order: int = 3, seed: int = 0, agreement: float = 1.0) -> None:
        self.vocab_size = vocab_size
        self.max_positions = 1 << 20
        self.device = torch.device("cpu")
        own, other = (torch.Generator().manual_seed(s) for s in (seed, seed + 7919))
        shape = (order, vocab_size + 1, vocab_size)  # one more row for "before the text"
        tables = torch.randn(shape, generator=own, dtype=torch.float64)
        noise = torch.randn(shape, generator=other, dtype=torch.float64)
        self._tables = 2.0 * (agreement * tables + (1.0 - agreement) * noise)

    def open(self, capacity: int, room: int) -> ToySession:
        return ToySession(capacity, room)

    def score(self, forest: Sequence[Part]) -> Tensor:
        """Logits of the wanted nodes, float64 [wanted rows, vocab]."""
        rows: list[Tensor] = []
        for part in forest:
            session = part.session
            if part.keep is not None:
                session.keep(part.keep)
            before = session.pending
            sees = session.extend(part.parents)
            start = session.length
            session.tokens[start + before : start + before + len(part.tokens)] = part.tokens
            for node in part.wanted:
                seen = np.flatnonzero(sees[node]) + start
                rows.append(self._row([*session.tokens[:start], *session.tokens[seen]]))
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)

    def _row(self, context: Sequence[int]) -> Tensor:
        logits = torch.zeros(self.vocab_size, dtype=torch.float64)
        for back, table in enumerate(self._tables, start=1):
            logits += table[context[-back] if back <= len(context) else self.vocab_size]
        return logits
