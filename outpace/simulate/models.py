"""A target and a draft that replay a trace.

A node whose path equals the recorded text is on the path: the target says the recorded token there, the draft its
recorded row. Off the path the draft gives a row of some other place of the same answer, chosen by a hash of the path,
so that wrong branches compete for width with realistic chances; what the target says there is never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.logits import SparseLogits, largest_indices
from outpace.core.types import Row, TopK
from outpace.models.base import PREFIX, Model, Part, Session
from outpace.rules.base import without_excluded
from outpace.rules.greedy import Greedy
from outpace.simulate.indexed_trace import IndexedTrace, Script

ON_PATH = 0  # the mark of a node on the path; all others carry a hash of their path, which is odd
_MASK = (1 << 63) - 1


class Recorded(Greedy):
    """The rule greedy, for a draft whose rows are recorded as the trace's rule ranked them."""

    traits = replace(Greedy.traits, sampled=True)

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
        """The `count` best of each row of scores [rows, held], with their values as they are."""
        return [
            without_excluded((ids if held.ids is None else held.ids[ids]).tolist(), row[ids].tolist())
            for row in scores
            for ids in [largest_indices(row, count)]
        ]


class ReplaySession(Session):
    """Keeps whose answer this is, and each slot's mark."""

    def __init__(self, capacity: int, room: int) -> None:
        super().__init__(capacity, room)
        self.marks = np.zeros(0, dtype=np.int64)
        self.script: Script | None = None

    def _resize(self, slots: int) -> None:
        kept = self.marks[:slots]
        self.marks = np.concatenate([kept, np.zeros(slots - len(kept), dtype=np.int64)])

    def _move(self, source: Sequence[int], start: int) -> None:
        self.marks[start : start + len(source)] = self.marks[source]


class _Place(NamedTuple):
    """Where a wanted node stands: the place in its answer that its row decides, and the node's mark."""

    script: Script
    place: int
    mark: int


class Replay(Model):
    """What target and draft share: which node is on the path."""

    token_bytes = 8

    def __init__(self, scripts: IndexedTrace) -> None:
        self._scripts = scripts
        self.vocab_size = scripts.vocab_size
        self.max_positions = 1 << 30
        self.device = torch.device("cpu")

    def open(self, capacity: int, room: int) -> ReplaySession:
        return ReplaySession(capacity, room)

    def score(self, forest: Sequence[Part]) -> Tensor:
        """Logits of the wanted nodes, float32 [wanted rows, vocab]."""
        places = [place for part in forest for place in self._places(part)]
        return self._rows(places)

    def _rows(self, places: Sequence[_Place]) -> Tensor:
        raise NotImplementedError

    def _places(self, part: Part) -> Iterator[_Place]:
        session: ReplaySession = part.session
        if part.keep is not None:
            session.keep(part.keep)
        before = session.pending
        session.extend(part.parents)
        if session.script is None:
            session.script = self._scripts.scripts[part.tokens[0] - self._scripts.names]
        for node, (token, parent) in enumerate(zip(part.tokens, part.parents, strict=True), start=before):
            above = ON_PATH if parent == PREFIX else int(session.marks[session.length + parent])
            position = session.length + session.pending_depths[node]
            session.marks[session.length + node] = _mark(session.script, position, above, token)
        for node in part.wanted:
            place = session.length + session.pending_depths[before + node] + 1 - session.script.start
            yield _Place(session.script, place, int(session.marks[session.length + before + node]))


def _mark(script: Script, position: int, above: int, token: int) -> int:
    """ON_PATH where the token is the recorded one and so are all above it; else a hash of where the path left it and
    what it took since."""
    if above == ON_PATH:
        if position < len(script.text) and script.text[position] == token:
            return ON_PATH
        above = script.text[0] * 1_000_003 + position
    mixed = (above * 6364136223846793005 + token * 1442695040888963407 + 1) & _MASK
    return (mixed ^ mixed >> 29) | 1


class ReplayTarget(Replay):
    """Says the recorded token on the path, and token 0 elsewhere."""

    def _rows(self, places: Sequence[_Place]) -> Tensor:
        rows = torch.zeros(len(places), self.vocab_size)
        for row, (script, place, mark) in enumerate(places):
            if mark == ON_PATH and 0 <= place < len(script.tokens):
                rows[row, script.text[script.start + place]] = 1.0
        return rows


class ReplayDraft(Replay):
    """Gives the recorded rows. `seconds`: what its forwards took since they were last asked for, by their rows."""

    def __init__(self, scripts: IndexedTrace, cost: Callable[[int], float]) -> None:
        super().__init__(scripts)
        self._cost = cost
        self._spent = 0.0

    def seconds(self) -> float:
        """What was spent since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _rows(self, places: Sequence[_Place]) -> Tensor:
        rows = np.full((len(places), self.vocab_size), -np.inf, dtype=np.float32)
        for row, (script, place, mark) in enumerate(places):
            known = len(script.draft_tokens)
            if mark != ON_PATH or not 0 <= place < known:  # also behind the recorded text's end
                place = (mark >> 17) % known
            rows[row, script.draft_tokens[place]] = script.draft_logprobs[place]
        self._spent += self._cost(len(places)) if places else 0.0
        return torch.from_numpy(rows)
