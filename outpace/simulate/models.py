"""Replays a trace as a target and a draft model.

A node is on the path if the tokens up to it equal the recorded text; there the target returns the recorded token and
the draft its recorded row. Off the path the draft returns the row of another position of the same answer, chosen by a
hash of the path, so that wrong branches compete for width with realistic probabilities; the target's logits of such
nodes are never used.

Tokens are renumbered from 0 for each answer, so that a row of logits is short. A text begins with a token that
identifies its answer, so the models are functions of the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outpace.core.types import Ranks
from outpace.models.base import PREFIX, Model, Part, Session
from outpace.rules.greedy import Greedy
from outpace.simulate.trace import Trace

ON_PATH = 0  # the mark of a node on the path; the mark of others is a hash of their path, which is odd
_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class IndexedAnswer:
    """One answer: `text` is its identifying token, prompt and answer tokens; the answer begins at `start`."""

    text: tuple[int, ...]
    start: int
    draft_tokens: np.ndarray  # [tokens, ranks]
    draft_logprobs: np.ndarray
    temperature: float = 0.0  # at which it was written
    task: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.text[: self.start]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.text[self.start :]


@dataclass(frozen=True)
class IndexedTrace:
    """All answers; the index of a text's answer is its first token minus `first_id`."""

    first_id: int
    vocab_size: int
    answers: tuple[IndexedAnswer, ...]


def index_trace(trace: Trace, ranks: int | None = None) -> IndexedTrace:
    """Renumber a trace's tokens, keeping the draft's best `ranks` tokens at each position (None: all)."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for answer in trace.answers:
        drafts = answer.draft_tokens[:, :ranks]
        tokens = np.concatenate([np.array(answer.prompt), np.array(answer.tokens), drafts.ravel()])
        ids = np.unique(tokens, return_inverse=True)[1]
        prompt, written, rest = np.split(ids, np.cumsum([len(answer.prompt), len(answer.tokens)]))
        parts.append((prompt, written, rest.reshape(drafts.shape)))
    first_id = max(int(part.max()) + 1 for some in parts for part in some)
    answers = []
    for number, (answer, (prompt, written, rows)) in enumerate(zip(trace.answers, parts, strict=True)):
        text = (first_id + number, *prompt.tolist(), *written.tolist())
        logprobs = answer.draft_logprobs[:, :ranks]
        answers.append(IndexedAnswer(text, len(prompt) + 1, rows, logprobs, trace.temperature, answer.task))
    return IndexedTrace(first_id, first_id + len(answers), tuple(answers))


class RecordedGreedy(Greedy):
    """The greedy rule for a draft whose recorded rows are ranked already, by the trace's rule."""

    traits = replace(Greedy.traits, sampled=True, ranks=Ranks.SCORES)


class ReplaySession(Session):
    """Stores the session's answer and the mark of each slot."""

    def __init__(self, capacity: int, max_pending: int) -> None:
        super().__init__(capacity, max_pending)
        self.marks = np.zeros(0, dtype=np.int64)
        self.answer: IndexedAnswer | None = None

    def _resize(self, slots: int) -> None:
        kept = self.marks[:slots]
        self.marks = np.concatenate([kept, np.zeros(slots - len(kept), dtype=np.int64)])

    def _move(self, source: Sequence[int], start: int) -> None:
        self.marks[start : start + len(source)] = self.marks[source]


class _ScoredNode(NamedTuple):
    """A node whose logits are requested: the position in the answer that they predict, and the node's mark."""

    answer: IndexedAnswer
    position: int
    mark: int


class Replay(Model):
    """The common part of target and draft, which tracks the nodes on the path."""

    token_bytes = 8

    def __init__(self, indexed: IndexedTrace) -> None:
        self._indexed = indexed
        self.vocab_size = indexed.vocab_size
        self.max_positions = 1 << 30
        self.device = "cpu"

    def open(self, capacity: int, max_pending: int) -> ReplaySession:
        return ReplaySession(capacity, max_pending)

    def _score(self, forest: Sequence[Part]) -> np.ndarray:
        """Return the logits, float32 [logit rows, vocab]."""
        return self._rows([node for part in forest for node in self._scored_nodes(part)])

    def _rows(self, nodes: Sequence[_ScoredNode]) -> np.ndarray:
        raise NotImplementedError

    def _scored_nodes(self, part: Part) -> Iterator[_ScoredNode]:
        session: ReplaySession = part.session
        before = session.pending
        session.extend_bytes(part.parents)
        depths = session.depths_from(before)
        if session.answer is None:
            session.answer = self._indexed.answers[part.tokens[0] - self._indexed.first_id]
        for node, (token, parent) in enumerate(zip(part.tokens, part.parents, strict=True)):
            above = ON_PATH if parent == PREFIX else int(session.marks[session.length + parent])
            position = session.length + depths[node]
            session.marks[session.length + before + node] = _mark(session.answer, position, above, token)
        for node in part.logit_rows:
            predicted = session.length + depths[node] + 1 - session.answer.start
            yield _ScoredNode(session.answer, predicted, int(session.marks[session.length + before + node]))


def _mark(answer: IndexedAnswer, position: int, above: int, token: int) -> int:
    """Return ON_PATH if the token and all its ancestors are the recorded ones; else a hash of the difference.

    `above` is the parent's mark.
    """
    if above == ON_PATH:
        if position < len(answer.text) and answer.text[position] == token:
            return ON_PATH
        above = answer.text[0] * 1_000_003 + position
    mixed = (above * 6364136223846793005 + token * 1442695040888963407 + 1) & _MASK
    return (mixed ^ mixed >> 29) | 1


class ReplayTarget(Replay):
    """Predicts the recorded token on the path, and token 0 elsewhere."""

    def _rows(self, nodes: Sequence[_ScoredNode]) -> np.ndarray:
        rows = np.zeros((len(nodes), self.vocab_size), np.float32)
        for row, (answer, position, mark) in enumerate(nodes):
            if mark == ON_PATH and 0 <= position < len(answer.tokens):
                rows[row, answer.text[answer.start + position]] = 1.0
        return rows


class ReplayDraft(Replay):
    """Returns the recorded rows, and sums up the simulated time of its forwards."""

    def __init__(self, indexed: IndexedTrace, cost: Callable[[int], float]) -> None:
        super().__init__(indexed)
        self._cost = cost
        self._spent = 0.0

    def seconds(self) -> float:
        """Return the simulated time of the forwards since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _rows(self, nodes: Sequence[_ScoredNode]) -> np.ndarray:
        rows = np.full((len(nodes), self.vocab_size), -np.inf, np.float32)
        for row, (answer, position, mark) in enumerate(nodes):
            known = len(answer.draft_tokens)
            if mark != ON_PATH or not 0 <= position < known:  # also beyond the end of the recorded text
                position = (mark >> 17) % known
            rows[row, answer.draft_tokens[position]] = answer.draft_logprobs[position]
        self._spent += self._cost(len(nodes)) if nodes else 0.0
        return rows
