"""Drafts for an engine that verifies one chain per request and passes only the token ids of the rows of a batch.

Rows have no request ids, so each is matched to its state by its tokens. A state holds a `TokenSequence` whose decoder
runs until it yields `Verify`; the next call passes the tokens that the target wrote, from which the verdict follows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outpace.core.errors import check_whole
from outpace.core.stats import DecayedMean
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Request, Verify
from outpace.decoders.base import Decoder
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.sequence import TokenSequence
from outpace.planning.cost_model import CostModel
from outpace.planning.sources import BatchRows
from outpace.rules.greedy import Greedy

TRIALS = 0.01  # share of the time for trying drafts in batches of a size in which they have not paid


def _option(requests: int) -> tuple[str, int]:
    """Return the key in the exploration budget for batches of about this size."""
    return "batch", requests.bit_length()


class DraftedRow:
    """One request: its sequence, its text as an array, and the chain that the target verifies now."""

    def __init__(self, sequence: TokenSequence, capacity: int) -> None:
        self.sequence = sequence
        self.length = len(sequence.committed)
        self.rounds = 0  # number that the target has verified
        self._text = np.empty(capacity, np.int32)
        self._text[: self.length] = sequence.committed

    @property
    def chain(self) -> TokenTree | None:
        """The chain that the target verifies; None if the decoder has failed."""
        return self.sequence.action.tree if isinstance(self.sequence.action, Verify) else None

    def precedes(self, text: np.ndarray, num_sampled: int) -> bool:
        """Return whether `text` [tokens] is this row's text and `num_sampled` more tokens."""
        return len(text) == self.length + num_sampled and np.array_equal(self._text[: self.length], text[: self.length])

    def extend(self, tokens: Sequence[int]) -> None:
        self._text[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.rounds += 1


class RowDrafter:
    """Plans and drafts for all rows of a batch, with the planner of method `auto` or the cache of method `card`."""

    def __init__(
        self,
        drafting: DraftRunner,
        costs: CostModel,
        decoder: type[Decoder],
        options: Any,
        *,
        draft_length: int,
        max_positions: int,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`draft_length`: maximum number of tokens in a chain. `max_rows`: maximum number of rows in a pass, drafts
        included; larger batches get no drafts."""
        check_whole("max_rows", max_rows, 1)
        self._drafting, self._costs, self._decoder, self._options = drafting, costs, decoder, options
        self._draft_length, self._max_positions, self._max_rows = draft_length, max_positions, max_rows
        self._clock, self._keys = clock, itertools.count()
        self._rows: list[DraftedRow | None] = []  # by row of the last call
        self._began = 0.0  # when the last call began
        self._drafted = 0.0  # seconds that it spent on drafting

    def propose(self, sampled: Sequence[Sequence[int]], lengths: Any, texts: Any) -> list[list[int]]:
        """Return a chain of tokens for each row, [] where none pays.

        `sampled`: the tokens that the target has just written in each row; none while it reads a prompt. `texts`
        [rows, positions] holds the token ids, `lengths` [rows] their numbers, with these tokens.
        """
        began = self._clock()
        drafting = [row for row, tokens in enumerate(sampled) if len(tokens)]
        if self._max_rows < 2 * len(drafting):
            self.close()
            return [[] for _ in sampled]
        found = self._match(sampled, lengths, texts)
        self._commit(found, sampled, began)
        rows = [found.get(row) or self._open(texts[row][: lengths[row]]) for row in drafting]
        self._rows = [None] * len(sampled)
        for row, drafted in zip(drafting, rows, strict=True):
            self._rows[row] = drafted
        self._draft(rows)
        self._began = began
        return [[] if drafted is None else self._chain(drafted) for drafted in self._rows]

    def close(self) -> None:
        """End all requests."""
        for drafted in self._rows:
            if drafted is not None:
                self._end(drafted)
        self._rows = []

    def _match(self, sampled: Sequence[Sequence[int]], lengths: Any, texts: Any) -> dict[int, DraftedRow]:
        """Return the states of the rows that have one; end all others. A row's last place is tried first."""
        free = {place: drafted for place, drafted in enumerate(self._rows) if drafted is not None}
        found: dict[int, DraftedRow] = {}
        unknown = []
        for row, tokens in enumerate(sampled):
            if not len(tokens):
                continue
            if row in free and free[row].precedes(texts[row][: lengths[row]], len(tokens)):
                found[row] = free.pop(row)
            else:
                unknown.append(row)
        for row in unknown:
            text, count = texts[row][: lengths[row]], len(sampled[row])
            place = next((place for place, one in free.items() if one.precedes(text, count)), None)
            if place is not None:
                found[row] = free.pop(place)
        for drafted in free.values():
            self._end(drafted)
        return found

    def _commit(self, found: dict[int, DraftedRow], sampled: Sequence[Sequence[int]], now: float) -> None:
        """Give each decoder the target's tokens, and record how long the pass took, unless it read a prompt too."""
        rows = sum(len(one.chain) if one.chain is not None else 1 for one in found.values())
        is_first = any(not one.rounds for one in found.values())
        self._drafting.take_times()
        written = {row: [int(token) for token in sampled[row]] for row in found}
        for row, drafted in found.items():
            if drafted.chain is not None:
                drafted.sequence.advance(written[row])
        self._drafting.run_drafters([one.sequence for one in found.values()])
        for row, drafted in found.items():
            tokens, sequence = written[row], drafted.sequence
            sequence.committed += tokens
            drafted.extend(tokens)
            if isinstance(sequence.action, Commit):
                tree, verdict, *_ = sequence.action
                sequence.end_round(self._drafting.follow(sequence, tree, verdict, tokens))
        if not found or len(found) < len(sampled) or (is_first and self._costs.is_timed(rows, 1)):
            return
        tokens_written, seconds = sum(map(len, sampled)), now - self._began
        self._costs.record_round(len(found), rows, tokens_written, seconds, self._drafted, every=True)
        if rows > len(found) > 1 and (plain := self._costs.plain_seconds(len(found))):
            lost = seconds - plain * tokens_written / len(found)
            self._lost_seconds(len(found)).learn(lost)
            self._costs.exploration.record_use(_option(len(found)), -lost)

    def _lost_seconds(self, requests: int) -> DecayedMean:
        """Return how much longer passes with drafts take than plain ones that write as many tokens, for about as many
        requests."""
        return self._costs.statistic(" ".join(map(str, _option(requests))), 0.0, 2.0)

    def _may_draft(self, requests: int) -> bool:
        """Return whether a batch gets drafts: always for one request, for several if passes with drafts have paid, or
        as a trial. The planner assumes that each row adds a little time, but in some engines the first draft of a batch
        already slows down the whole pass."""
        lost = self._lost_seconds(requests).value
        return requests == 1 or lost <= 0.0 or self._costs.exploration.is_due(_option(requests), lost, TRIALS)

    def _open(self, text: np.ndarray) -> DraftedRow:
        prompt = tuple(map(int, text))
        request = Request(prompt, Greedy(), max_tokens=max(self._max_positions - len(prompt), 1))
        sequence = TokenSequence(request, self._decoder(), self._options, next(self._keys), self._costs)
        sequence.context.chains = True
        self._drafting.choose(sequence, None)
        self._drafting.open(sequence)
        sequence.coroutine = sequence.decoder.decode(sequence.context, sequence.options)
        return DraftedRow(sequence, self._max_positions + self._draft_length + 1)

    def _end(self, drafted: DraftedRow) -> None:
        sequence = drafted.sequence
        if sequence.coroutine is not None:
            sequence.coroutine.close()
        sequence.coroutine = sequence.action = None
        self._drafting.close(sequence)

    def _draft(self, rows: Sequence[DraftedRow]) -> None:
        """Start the next round of all rows and draft until every decoder wants to verify."""
        self._costs.begin_round(None)
        may_draft = self._may_draft(len(rows))
        for drafted in rows:
            context = drafted.sequence.context
            context.budget = min(self._draft_length + 1, self._max_rows // len(rows)) if may_draft else 1
            context.tokens_left = max(self._max_positions - drafted.length, 1)
        BatchRows.of([drafted.sequence.context for drafted in rows])
        self._drafting.take_times()
        for drafted in rows:
            if drafted.sequence.finish_reason is None:
                root, drafted.sequence.root = drafted.sequence.root, None
                drafted.sequence.advance(root)
        self._drafting.run_drafters([drafted.sequence for drafted in rows])
        self._drafting.check_worker()
        self._drafted = self._drafting.take_times().seconds

    def _chain(self, drafted: DraftedRow) -> list[int]:
        """Return the tokens of a row's chain. A failed decoder raises."""
        if drafted.sequence.error is not None:
            raise drafted.sequence.error
        max_length = min(self._draft_length, self._max_positions - drafted.length - 1)
        return [] if drafted.chain is None else [*drafted.chain.tokens[1:]][: max(max_length, 0)]
