"""What a planner knows about the sources of one request's drafts, and the chances of their nodes to be accepted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp

from outpace.core.stats import BatchedUpdates, DecayedMean, PlanEstimates, RoundPlan
from outpace.core.tree import Role, TokenTree
from outpace.core.types import DraftSource
from outpace.planning.cost_model import LOOKUP_WEIGHT, CostModel
from outpace.planning.estimators import FADE, PRIOR_WEIGHT, LevelMeans
from outpace.planning.plan import BatchPlan, BatchState, plan_batch

_PRICE_MARGIN = 1.1  # factor on prices: corrects for the optimism of a maximum of estimates (winner's curse)
_CONTINUES = 0.97  # factor of a source that calibrates its own chances
_BATCH = 3  # rounds that are learnt together
_USUAL_ANSWER = 512  # tokens; a longer answer may still begin to draft later
_SEEN = (
    2.5  # outcomes of drafts that say what a model is worth: for one text, or before it reads the texts of all others
)
_REPEATED, _KNOWN = 4, 8192  # tokens that make a repetition; trailing tokens of the text that are searched for it
_SAVED = 0.15  # fraction of plain decoding's time that a model is assumed to save, weighed against reading the text


@dataclass
class BatchRows:
    """The pass that is being built, and what its requests plan together. A request that plans later sees what was
    planned before.

    `rows` are for each request those of this round or, until it has chosen, those of its last pass.
    """

    costs: CostModel = field(repr=False)
    rows: int = 1
    state: BatchState = field(default_factory=lambda: BatchState(1, 0, 0, 0, 1.0))
    estimates: PlanEstimates | None = None  # of the last plan of this round
    is_tried: bool = False  # whether a trial was considered in this round; one request tries for all
    _new_readers: int = 0  # requests whose texts the draft model may begin to read in this round
    _num_begun: int = 0  # how many of them have
    _plain_plan: RoundPlan | None = None
    _plans: dict[str, BatchPlan] = field(default_factory=dict)  # by source

    @classmethod
    def of(cls, contexts: Sequence[PlanningContext]) -> BatchRows:
        """Return the batch of these requests, before they plan a round, and set it in their contexts."""
        batch, readers, tokens, behind, unread, left = cls(contexts[0].costs, 0), 0, 0, 0, 0, 0
        for context in contexts:
            length, read = len(context.committed), context.num_read
            if read:
                readers, behind = readers + 1, behind + length - read
            else:
                unread += length
            tokens += length
            left += context.expected_tokens
            batch.rows += context.rows
            context.requests, context.batch = len(contexts), batch
        batch.state = BatchState(len(contexts), readers, behind, unread, float(left))
        batch.costs.set_context(tokens)
        return batch

    @cached_property
    def price(self) -> float:
        """Tokens that a second is worth in this round."""
        return _PRICE_MARGIN * self.costs.tokens_per_second(self.state.requests)

    @cached_property
    def is_plain(self) -> bool:
        """Whether all requests decode plainly, because the time of such a round is not known or was not measured for
        long."""
        return self.costs.needs_plain_round(self.state.requests)

    def plain_plan(self, why: str) -> RoundPlan:
        """Return the plan of a request that decodes plainly for this reason."""
        if self._plain_plan is None or self._plain_plan.why != why:
            seconds = self.costs.plain_seconds(self.state.requests)
            self._plain_plan = RoundPlan((), 1.0, seconds, self.price, why, self.estimates)
        return self._plain_plan

    def plan(self, source: DraftSource, acceptance: LevelMeans, max_levels: int) -> BatchPlan:
        """Return the plan of this round for all requests together: see `plan_batch`."""
        plan = self._plans.get(source.name)
        if plan is None:
            state, estimates = self.state, self.costs.estimates(source, acceptance, self.state.requests)
            plan = plan_batch(state, max_levels, estimates) if estimates.plain > 0.0 else BatchPlan(0, 0, 0.0)
            self.estimates = estimates.at(state, plan.levels, plan.drafting or state.requests)
            if plan.drafting > state.readers:
                self._new_readers = state.requests if acceptance.weight >= _SEEN else int(not state.readers)
            self._plans[source.name] = plan
        return plan

    @property
    def num_drafting(self) -> int:
        """Requests that may draft with a model in this round, at least 1; known once there is a plan."""
        return min(max(self.state.readers + self._new_readers, 1), self.state.requests)

    def may_read(self) -> bool:
        """Return whether the draft model may begin to read the text of one more request, and count it."""
        self._num_begun += 1
        return self._num_begun <= self._new_readers


@dataclass(eq=False, kw_only=True)
class PlanningContext:
    """One request and its share of the batch. `budget` is the number of nodes, root included, that the batch allows it
    in this round."""

    committed: Sequence[int]  # the prompt and the tokens written so far
    costs: CostModel = field(repr=False)  # shared by all requests of the engine
    sources: Sequence[DraftSource] = ()  # sources of its drafter, where drafting and verification alternate
    budget: int = 1
    requests: int = 1  # running requests, this one included
    rows: int = 1  # its own part of `batch`
    tokens_left: int = 1  # tokens that may still be written
    num_read: int = 0  # tokens of the text that the draft model has read
    batch: BatchRows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.batch = BatchRows(self.costs)

    @property
    def rows_of_others(self) -> int:
        """Rows of other requests in the pass."""
        return self.batch.rows - self.rows

    @property
    def expected_tokens(self) -> int:
        """Tokens that are expected to be written: few answers are as long as their limit, which says little."""
        return max(min(self.tokens_left, _USUAL_ANSWER), 1)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows that this request has in the pass."""
        self.batch.rows += rows - self.rows
        self.rows = rows


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
    """A source that runs no model, and what it gained for this request: tokens that it adds to a round that asks it,
    minus the price of its rows. It is asked while that pays for its CPU time, and now and then if it does not."""

    def __init__(self, source: DraftSource, context: PlanningContext) -> None:
        self.source = source
        self.is_active = False  # whether it drafts in this round
        self._context, self._costs = context, context.costs
        self._gain = DecayedMean(self._costs.lookup_gain(source.name, context.requests).value, LOOKUP_WEIGHT)
        self._option: Hashable = None  # the exploration budget's name for asking it in this round

    def should_draft(self, price: float, share: float, repeated: int) -> bool:
        """Return whether to ask the source in this round, in which a second is worth `price` tokens and about
        `repeated` of the last tokens occurred before. What failed at shorter repetitions says nothing."""
        seconds = self._costs.draft_seconds(self.source)
        self._option = self.source.name, self._context.requests > 1, repeated.bit_length()
        return self._gain.value > price * seconds or self._costs.exploration.is_due(self._option, seconds, share)

    def learn(self, gain: float, price: float) -> None:
        """Learn from a round that asked it."""
        self._gain.learn(gain)
        self._costs.lookup_gain(self.source.name, self._context.requests).learn(gain)
        self._costs.exploration.record_use(self._option, gain - price * self._costs.draft_seconds(self.source))


class ModelSource:
    """A source that runs a model, and how many of its tokens were accepted for this request."""

    def __init__(self, source: DraftSource, context: PlanningContext) -> None:
        self.source = source
        self.levels = 0  # of this round's tree
        self.first = 0  # levels that a worker had drafted before the round
        self.drafts_during_passes = False  # a worker, of whose levels something is learnt without waiting for them
        self.max_levels = 0  # of this round's tree
        self.plan: BatchPlan | None = None  # this round's for all requests together
        self.is_trial = False  # whether the last of them is a trial, which is not expected to pay
        self.trial_seconds = 0.0  # its expected time
        self.trial_price = 0.0  # tokens that it must add to pay for its time, reading excluded
        self._context, self._costs = context, context.costs
        self._common = self._costs.acceptance(source)
        self._own = LevelMeans(self._common.value(0))
        self.spent = 0.0  # seconds of this request's trials of a first level that failed

    @property
    def acceptance(self) -> LevelMeans:
        """The chances of its tokens to be accepted, by level: this request's own if it runs alone, else those of all
        requests."""
        return self._own if self._context.requests == 1 else self._common

    def begin_round(self) -> None:
        self.levels, self.first, self.is_trial, self.plan = 0, 0, False, None

    def record_acceptance(self, level: int, accepted: float) -> None:
        """Learn whether a token of this level was accepted after one of the level above."""
        self._common.learn(level, accepted, self._context.requests)
        if self._context.requests == 1:
            self._own.learn(level, accepted)

    @property
    def has_read(self) -> bool:
        """Whether the model has read the beginning of the text."""
        return self._context.num_read > 0

    @property
    def catch_up_seconds(self) -> float:
        """Expected seconds for reading the text that the model has not read."""
        unread = len(self._context.committed) - self._context.num_read
        return self._costs.draft_prefill_seconds(self.source, unread) if unread > 0 and not self.levels else 0.0

    def may_try(self, seconds: float, share: float) -> bool:
        """Return whether to try another level that takes `seconds` and is not expected to pay. Those of a new text that
        is written alone may cost what the model is assumed to save in it."""
        credit = 0.0
        if self._context.requests == 1 and not self.levels:
            credit = _SAVED * self._context.expected_tokens * self._costs.plain_seconds(1)
        option = self.level_option(self.levels)
        return self._costs.exploration.is_due(option, seconds, share, credit, self.spent)

    def end_round(self, emitted: int) -> None:
        """End a round in which it drafted and the target wrote `emitted` tokens."""
        self._context.num_read = len(self._context.committed) + emitted

    def level_option(self, level: int) -> tuple[str, bool, bool]:
        """Return the exploration budget's name for growing a first or a further level that does not pay."""
        return self.source.name, level > 0, self._context.requests > 1


class AcceptanceModel:
    """Calibrates one request's predicted chances, round by round.

    A node's chance is its parent's chance times the chance that the node is accepted if its parent is. For the latter
    the drafter's prediction is multiplied by the source's calibration factor: the number of accepted children of
    accepted nodes, divided by the sum of these children's predicted chances. Other nodes are no evidence: a long branch
    that fails at its first token is one failure. The factor of a source that calibrates its own chances is a constant
    just below 1.
    """

    def __init__(self, costs: CostModel, sources: Sequence[DraftSource], text: Sequence[int]) -> None:
        """`text`: the request's tokens; the caller extends this list."""
        self._costs, self._text = costs, text
        self._by_length = {source.name for source in sources if source.by_length}
        self._means = {source.name: DecayedMean(0.0, 0.0, FADE) for source in sources if not source.is_calibrated}
        self._tree: TokenTree | None = None
        self._factors = self._current_factors()  # by source, for this tree
        self._verified = BatchedUpdates[tuple[TokenTree, Sequence[int]]](self._learn_round, _BATCH)

    def calibration_factor(self, source: DraftSource) -> float:
        """Return the factor by which this source's chances are multiplied at each token."""
        return self._factors.get(source.name, 1.0)

    def _current_factors(self) -> dict[str, float]:
        """Return this request's own factor of each source, which starts from that of all requests."""
        return {name: mean.given(self._common(name).value, PRIOR_WEIGHT) for name, mean in self._means.items()}

    def _common(self, name: str) -> DecayedMean:
        """Return the factor of all requests; for sources with `by_length`, of all with texts of about this length."""
        return self._costs.calibration_factor(name, len(self._text) if name in self._by_length else 0)

    def chances(self, tree: TokenTree) -> list[float]:
        """Return the chance that the target accepts each node and all its ancestors."""
        if tree is not self._tree:
            self._tree, self._factors = tree, self._current_factors()
        chances: list[float] = tree.chances(self._factors, _CONTINUES)
        return chances

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Add a verified tree and the path that the target accepted."""
        if self._means:
            self._verified.add(((tree, path),))

    def flush(self) -> None:
        """Learn from all verified trees that were added."""
        self._verified.flush()

    def _learn_round(self, verified: tuple[TokenTree, Sequence[int]]) -> None:
        """Compare the accepted children of accepted nodes with the sum of the children's predicted chances."""
        tree, path = verified
        predicted, accepted = dict[str, float](), dict[str, int]()
        sources, scores = [*tree.sources], [*tree.scores]
        for node, following in zip(path, [*path[1:], None], strict=True):
            for child in tree.children(node):
                source = sources[child]
                if source in self._means and tree.roles[child] != Role.PROBE:  # a probe predicts nothing for a round
                    predicted[source] = predicted.get(source, 0.0) + exp(scores[child] - scores[node])
                    accepted[source] = accepted.get(source, 0) + (child == following)
        for source, chances in predicted.items():
            self._means[source].learn(accepted[source], chances)
            self._common(source).learn(accepted[source], chances)
