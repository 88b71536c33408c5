"""What a planner knows about the sources of one request's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core.types import Source
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import DecayedMean


@dataclass
class BatchRows:
    """Number of rows in the pass that is being built: for each request those of this round or, until it has chosen,
    those of its last pass. A request that plans later sees what was planned before."""

    rows: int = 0


@dataclass(eq=False, kw_only=True)
class PlanningContext:
    """One request and its share of the batch. `budget` is the number of nodes, root included, that the batch allows it
    in this round."""

    committed: Sequence[int]  # the prompt and the tokens written so far
    costs: CostModel = field(repr=False)  # shared by all requests of the engine
    sources: Sequence[Source] = ()  # of its drafter, where drafting and verification alternate
    budget: int = 1
    requests: int = 1  # running requests, this one included
    rows: int = 1  # its own part of `batch`
    batch: BatchRows = field(default_factory=lambda: BatchRows(1), repr=False)
    tokens_left: int = 1  # that may still be written

    @property
    def rows_of_others(self) -> int:
        """Rows of other requests in the pass."""
        return self.batch.rows - self.rows

    def set_rows(self, rows: int) -> None:
        """Set the number of rows that this request has in the pass."""
        self.batch.rows += rows - self.rows
        self.rows = rows


_SKIPS, _MOST_SKIPS = 8, 64  # rounds until a source without gain is asked again: at first, and at most
_REPEATED, _KNOWN = 4, 8192  # tokens that make a repetition; trailing tokens of the text that are searched for it
_EXPLORED = 3  # rounds at the beginning of an answer that find out what a model is worth for its text
_SAVED = 0.15  # fraction of plain decoding's time that a model is assumed to save, weighed against reading the text


class RepetitionDetector:
    """Detects whether a text repeats itself, which is cheaper than asking the lookup sources."""

    def __init__(self, text: Sequence[int]) -> None:
        """`text` may grow; it is read when `follow` is called."""
        self._text = text
        self._read = -1  # tokens read so far
        self._seen: set[int] = set()  # hashes of 4-grams
        self._run = 0  # consecutive tokens that ended a known 4-gram

    def follow(self) -> int:
        """Return roughly how many of the last tokens occurred before; 0 if they are too few for a repetition."""
        text = self._text
        start = max(len(text) - _KNOWN, 0) if self._read < 0 else self._read
        for end in range(max(start + 1, _REPEATED), len(text) + 1):
            key = hash(tuple(text[end - _REPEATED : end]))
            self._run = self._run + 1 if key in self._seen else 0
            self._seen.add(key)
        self._read = len(text)
        return self._run + _REPEATED - 1 if self._run else 0


class LookupSource:
    """A source that runs no model, and what it gave this request.

    While it gains nothing it is asked less and less often, but at once when the text repeats itself for longer than it
    did when asking was in vain.
    """

    def __init__(self, source: Source, gain: DecayedMean) -> None:
        self.source = source
        self.gain = gain  # tokens that it adds to a round that asks it, minus the price of its rows
        self.is_asked = False  # in this round
        self._skipped = 0  # rounds since it was asked
        self._wait = _SKIPS  # rounds until it is asked again
        self._min_repetition = _REPEATED  # repeated tokens that make it worth asking

    def is_due(self, repetitions: RepetitionDetector) -> bool:
        """Count a round and return whether to ask the source although it gains nothing."""
        self._skipped += 1
        return self._skipped >= self._wait or repetitions.follow() >= self._min_repetition

    def asked(self, gains: bool, repetitions: RepetitionDetector) -> None:
        """Adapt the waiting time after a round in which it was asked."""
        if gains:
            self._wait, self._min_repetition = _SKIPS, _REPEATED
        elif self._skipped >= self._wait:
            self._wait = min(2 * self._wait, _MOST_SKIPS)
        elif self._skipped:
            self._min_repetition = 2 * max(repetitions.follow(), _REPEATED)
        self._skipped = 0


class ModelSource:
    """A source that runs a model, and what its layers gave this request.

    A request that runs alone explores in its first rounds what the model gives for its text, whatever it gave for
    others, as long as these rounds cost less than the model is expected to save.
    """

    def __init__(self, source: Source, deepest: int, context: PlanningContext) -> None:
        self.source = source
        self.layers = 0  # grown in this round
        self.is_trial = False  # whether the last of them does not pay as far as is known
        self.grown_at = [0.0] * deepest  # by layer: when it was last grown, in seconds of rounds
        self.failures = 0  # trials since a layer last paid
        self.trial_cost = 0.0  # seconds of the last trial, which also reads the text written since the one before
        self.is_following = False  # it has read everything except the tokens of the last round
        self.has_read = False  # the prompt
        self._context, self._costs = context, context.costs
        self._yields: dict[int, DecayedMean] = {}  # by layer, of this request
        self._rounds = 0  # in which it drafted

    @property
    def is_first_layer_trial(self) -> bool:
        """Whether its first layer in this round is a trial."""
        return self.is_trial and self.layers == 1

    @property
    def layer_yield(self) -> DecayedMean:
        """Yield of the next layer: this request's own if it runs alone, else that of all requests."""
        return self._yield_of(self.layers)

    def _yield_of(self, layer: int) -> DecayedMean:
        if self._context.requests > 1:
            return self._costs.layer_yield(self.source, layer, self._context.requests)
        if layer not in self._yields:
            self._yields[layer] = self._costs.initial_layer_yield(self.source, layer)
        return self._yields[layer]

    def gave(self, worth: float, at_leaves: float) -> None:
        """Learn that the next layer added `worth` below leaves with the chance `at_leaves`."""
        self._costs.layer_yield(self.source, self.layers, self._context.requests).learn(worth, at_leaves)
        if self._context.requests == 1:
            self.layer_yield.learn(worth, at_leaves)

    @property
    def prefill_seconds(self) -> float:
        """Seconds that the model needs to read the text, 0 if it has."""
        return 0.0 if self.has_read else self._costs.draft_prefill_seconds(self.source, len(self._context.committed))

    def is_worth_reading(self) -> bool:
        """Return whether the rest of the answer may be long enough to repay reading the text."""
        return self.prefill_seconds <= self._may_save

    @property
    def _may_save(self) -> float:
        """Seconds that the model is assumed to save in the rest of the answer."""
        context = self._context
        return _SAVED * context.tokens_left * self._costs.pass_seconds(context.requests) / context.requests

    def explores(self) -> bool:
        """Return whether to grow the first layer only to see what it gives for this text."""
        if self.layers or self._rounds >= _EXPLORED or self._context.requests > 1:
            return False
        step = self._costs.draft_seconds(self.source)
        cost = _EXPLORED * 2 * step + self.prefill_seconds  # its rows cost about as much as the step
        return cost < self._costs.payoff_rate(self.source).value * self._may_save

    def end_round(self, price: float) -> None:
        """Count a round in which it drafted; the last one of the exploration updates the source's payoff rate."""
        self._rounds += 1
        if self._rounds == _EXPLORED and 0 in self._yields:
            pays = self._yields[0].value > price * self._costs.draft_seconds(self.source)
            self._costs.payoff_rate(self.source).learn(float(pays))
