"""The target without some of its attention and MLP sublayers drafts on the target's own keys and values.

Draft & Verify, arXiv:2309.08168, for sets that are named; SWIFT, arXiv:2410.06916, for sets that are found meanwhile.

Nothing is loaded and nothing is stored twice: the draft writes into pending slots of the target's session, which are
dropped before the target judges. A draft goes on while it is sure of its last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.needs import Given, Needs
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Offer, Request, Source
from outpace.drafters._calibration import PickModels
from outpace.drafters._grower import Grower, GrowState, Job
from outpace.drafters._rows import rows_of
from outpace.drafters._sublayers import Sublayers, agreements, check_target, read
from outpace.drafters._swift import Search
from outpace.models.base import Model
from outpace.rules.base import best_rows

COST = "a forward of a part of the target for each token"
_SPARE = 4  # proposals scored beyond the fan-out, so that their share of the chance is known


@dataclass(frozen=True)
class Options:
    """`skip_attention`, `skip_mlp`: the layers whose attention, whose MLP is left out, as in 3,5-8. Where neither is
    named, sets are tried on the last `skip_window` tokens of answers, one in `skip_every` rounds that are drafted: at
    first `skip_ratio` of the layers spread evenly, then others of the same size, until one agrees with the target as
    often as `skip_enough`, or `skip_trials` were made. A draft ends with a token that is less likely than
    `confidence`; `width` tokens are proposed in each place."""

    skip_attention: str | None = None
    skip_mlp: str | None = None
    skip_ratio: float = 0.45
    skip_window: int = 50
    skip_every: int = 4
    skip_enough: float = 0.93
    skip_trials: int = 1000
    confidence: float = 0.8
    width: int = 1
    tree_nodes: int = 256

    def __post_init__(self) -> None:
        self.named()
        check_range("skip_ratio", self.skip_ratio, 0.01, 0.99)
        check_whole("skip_window", self.skip_window, 4, 1024)
        check_whole("skip_every", self.skip_every, 1)
        check_range("skip_enough", self.skip_enough, 0.0, 1.0)
        check_whole("skip_trials", self.skip_trials, 1)
        check_range("confidence", self.confidence, 0.0, 1.0)
        check_whole("width", self.width, 1, 512)
        check_whole("tree_nodes", self.tree_nodes, 2, 16384)

    def named(self) -> Sublayers | None:
        """The sublayers that are named; None where neither option is."""
        if self.skip_attention is None and self.skip_mlp is None:
            return None
        return Sublayers(read("skip_attention", self.skip_attention), read("skip_mlp", self.skip_mlp))


@dataclass
class SkipState(GrowState):
    """`offers`: what was proposed below a tree node (by id). `is_unsure`: of its last token, so this round's draft is
    over. `rounds`: drafted since a set was tried on this text."""

    offers: dict[int, Offer] = field(default_factory=dict)
    is_unsure: bool = False
    rounds: int = 0


class LayerSkip(Drafter):
    """`search` None: the set stays."""

    name = "layer_skip"
    needs = Needs(session=1)  # of an instance: as many as its options allow

    def __init__(self, target: Model, sublayers: Sublayers, options: Options, search: Search | None = None) -> None:
        self._target, self._options, self.search = target, options, search
        self.needs = Needs(session=max(options.tree_nodes, options.skip_window))
        self._grower = Grower(target, options.width, options.tree_nodes, on_base=True)
        self._choices = PickModels()
        self._choose(sublayers)

    def weight_bytes(self, source: Source) -> int | None:
        """As if all sublayers were of one size, and nothing else had weights."""
        whole = self._target.weight_bytes
        return round(whole * (1 - self.sublayers.size / (2 * self._target.num_layers))) if whole else None

    def reads_at_most(self, source: Source) -> int | None:
        """Nothing: the target has read the text."""
        return 0

    def open(self, request: Request) -> SkipState:
        return SkipState(request, list(request.prompt))

    def grow(self, states: Sequence[SkipState], trees: Sequence[TokenTree]) -> list[int]:
        """One forward of what is left of the target over the frontiers of all trees; nodes added to each. Another one
        for a tree in which all that it proposed stood already."""
        for state in states:
            self._try(state)
        before = [len(tree) for tree in trees]
        sure = [pair for pair in zip(states, trees, strict=True) if not pair[0].is_unsure]
        while jobs := self._grower.jobs([state for state, _ in sure], [tree for _, tree in sure]):
            known = [len(job.tree) for job in jobs]
            self._expand(jobs)
            same = [job for job, count in zip(jobs, known, strict=True) if len(job.tree) == count and job.tree.has_room]
            sure = [(job.state, job.tree) for job in same if not job.state.is_unsure]
        return [len(tree) - count for tree, count in zip(trees, before, strict=True)]

    def observe(self, state: SkipState, seen: Observation) -> None:
        self._choices.learn(state.request, state.offers, seen)
        self._grower.follow(state, seen)
        state.offers, state.is_unsure = {}, False

    def pause(self, state: SkipState) -> None:
        self._grower.pause(state)

    def close(self, state: SkipState) -> None:
        state.session = state.base = None

    def remember(self) -> dict[str, Any]:
        """What a profile keeps: how the draft's chances came true."""
        return self._choices.remember()

    def recall(self, kept: Mapping[str, Any]) -> None:
        """Begins from a profile."""
        self._choices.recall(kept)

    def _choose(self, sublayers: Sublayers) -> None:
        self.sublayers = sublayers
        self._grower.model = self._target.without(*sublayers)

    def _expand(self, jobs: Sequence[Job]) -> None:
        offers = iter(best_rows(self._grower.score(jobs), rows_of(jobs), self._options.width + _SPARE))
        least = math.log(self._options.confidence) if self._options.confidence else -math.inf
        for state, tree, frontier in jobs:
            choice, surest = self._choices.of(state.request), -math.inf
            for node in frontier:
                tokens, values = next(offers)
                if not tokens:
                    continue  # a constraint allows nothing here
                state.offers[tree.ids[node]] = (tokens, values)
                chances = choice.log_chances(values, self._options.width)
                surest = max(surest, chances[0])
                children = [(tree.scores[node] + c, node, t) for t, c in zip(tokens, chances, strict=False)]
                tree.hang(children[: self._options.tree_nodes - len(tree)], self._options.width)
            state.is_unsure = surest < least

    def _try(self, state: SkipState) -> None:
        """One trial of the search, where it is time for one: before a round's first draft, when nothing is pending."""
        if self.search is None or self.search.is_over or state.slots or state.is_unsure:
            return
        state.rounds += 1
        session, count = state.base, self._options.skip_window
        has_text = session is not None and not session.pending and session.length == len(state.tokens) - 1
        has_text = has_text and len(state.tokens) - len(state.request.prompt) >= count and session.free >= count
        if state.rounds < self._options.skip_every or not has_text:
            return
        state.rounds = 0
        tried = self.search.propose()
        found = agreements(self._target.without(*tried), session, state.request, state.tokens, count)
        if self.search.learn(tried, sum(found) / count):
            self._choose(tried)


def build(options: Options, *, given: Given) -> LayerSkip:
    """The drafter for a target that can leave out sublayers; UserError for one that cannot, one that is inflated, and a
    set that does not fit it."""
    target = given.target
    if target is None:
        raise UserError("drafter layer_skip drafts on the target's own session, a worker has none: use it in turn")
    check_target(target)
    if target.inflate != 1:
        raise UserError(
            "drafter layer_skip does not draft for an inflated target: its added layers change nothing, so a draft"
            " without them would be right at no cost, and its speed would say nothing of any real model"
        )
    sublayers = options.named()
    if sublayers is not None:
        sublayers.check(target.num_layers)
        return LayerSkip(target, sublayers, options)
    search = Search(target.num_layers, options.skip_ratio, options.skip_enough, options.skip_trials)
    return LayerSkip(target, search.best, options, search)
