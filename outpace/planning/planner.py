"""The choices of the planner (auto.py) for one request, round by round: who is asked, how many layers are grown, and
how many rows are verified.

Rounds that the models carry out by themselves go by the same choices: `_ahead.py` tells them beforehand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, log

from outpace.core.carried import Carried, Forward, Plan, resting
from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Source
from outpace.decoders.base import RequestContext
from outpace.planning.acceptance import AcceptanceModel
from outpace.planning.cost_model import GROWS, CostModel
from outpace.planning.sources import LookupSource, ModelSource, RepetitionDetector

LITTLE = 0.5  # that copies may promise below the root, and what a layer of the model adds still tells of it
_BEAM = 4  # leaves that one layer is expected to expand; and the rows that tell what a row below them costs
_DOUBT = 1.1  # what is chosen because it looks best is a little worse than it looks
_PLAIN = 24  # rounds at the beginning of an answer that may be plain until one was timed: none is beside a prompt
_CROWDED, _LOOKS = 0.35, 64  # tokens that a row may cost; rounds
UNPLANNED = 7  # plain rounds that may follow one in which nobody was asked
_HOPE = 0.4  # what a model must promise below the root, for that to be tried in a new text
_UNPAID = 0.25  # of what a row must bring: a node that is less likely than that is not even planted
_UNKNOWN = 2  # layers at most before the draft's time is known, and the price


@dataclass(frozen=True)
class Options:
    """`deepest`: the most draft layers in a round; `trials`: the share of time for trying again what did not pay."""

    deepest: int = 16
    trials: float = 0.01

    def __post_init__(self) -> None:
        check_whole("deepest", self.deepest, 1, 256)
        check_range("trials", self.trials, 0.0, 1.0)


class Planner:
    """The choices of one request, by the engine's costs and what this request's drafts were worth so far."""

    def __init__(self, place: RequestContext, options: Options) -> None:
        self._place, self._options = place, options
        self._costs: CostModel = place.costs
        self._chances = AcceptanceModel(self._costs, place.sources)  # of this round's nodes
        copiers = [source for source in place.sources if not source.runs_model]
        self.copiers = [LookupSource(one, self._costs.copies_of_one(one.name, place.requests)) for one in copiers]
        self._repeats = RepetitionDetector(place.committed)
        self.growers = [ModelSource(source, options.deepest, place) for source in place.sources if source.runs_model]
        self._worth = 0.0  # of this round's tree
        self._copied = 0.0  # the chance that the walk comes to a copy in it
        self._price = 0.0  # tokens that a second is worth in this round
        self._row = 0.0  # tokens that one of a few more rows is worth in it
        self._seconds = 0.0  # of rounds so far
        self._plain = 0.0  # seconds of a plain round
        self._at_leaves = 1.0
        self._rounds = 0
        self._is_look = False  # this round asks in a crowd, whatever pays or not
        self.is_plain = False  # this round writes plainly in any case
        self.asks = False  # somebody for drafts in this round

    def begin(self) -> None:
        """A round begins: the prices that hold in it. It is plain where that has no price yet, and where so many write
        at once that one more row costs a good part of a token: what may still be gained is not worth the host's time,
        but for who copies."""
        requests = self._place.requests
        prices = self._costs.prices(requests)
        self._price, self._plain = _DOUBT * prices.second, prices.plain
        is_crowded = requests > 1 and self._price * prices.row > _CROWDED
        self._is_look = is_crowded and self._costs.is_turn(_LOOKS)
        gains = self._is_look or not is_crowded or any(map(self._gains, self.copiers))
        is_new = self._rounds < _PLAIN and not prices.is_known
        self.is_plain = self._place.budget < 2 or is_new or self._costs.is_stale(requests) or not gains
        self._rounds, self.asks = self._rounds + 1, False
        for copier in self.copiers:
            copier.is_asked = False
        if self.is_plain:
            return
        self._worth = self._copied = 0.0
        self._row = self._price * self._costs.more(self._place.rows_of_others + 1, _BEAM)[-1] / _BEAM
        self._chances.begin()
        for grower in self.growers:
            grower.layers, grower.is_trial = 0, False
        for copier in self.copiers:
            copier.is_asked = self._gains(copier) or self._is_look or copier.is_due(self._repeats)
            self.asks = self.asks or copier.is_asked

    def _gains(self, copier: LookupSource) -> bool:
        """Whether a source that runs no model gives more than it takes of the host's time."""
        return copier.gain.value > self._price * self._costs.draft(copier.source)

    def copied(self, tree: TokenTree, copier: LookupSource) -> None:
        """The source has added what it has."""
        self._copied = sum(map(self._chances.of(tree).__getitem__, tree.children(0)))

    def pays(self, tree: TokenTree, grower: ModelSource) -> bool:
        """Whether one more layer of the draft model brings more than it costs; or is due for a trial."""
        requests = self._place.requests
        cost = self._price * self._costs.draft(grower.source, requests)
        if grower.is_trial or grower.layers >= (self._options.deepest if cost else _UNKNOWN):
            return False
        if not grower.has_read and not grower.is_worth_reading():
            return False
        self._at_leaves = self._reach(tree, grower)
        if self._brings(grower, self._at_leaves, cost):
            return self._asks(tree, grower)
        grower.is_trial = self._is_due(grower)
        return grower.is_trial and self._asks(tree, grower)

    def _brings(self, grower: ModelSource, at_leaves: float, cost: float) -> bool:
        """Whether a layer below leaves with this chance brings more than its cost; or is grown to see what it gives in
        this text, whatever it gave in others."""
        if grower.growth.value * at_leaves > cost:
            return True
        return self._chances.trust(grower.source) * (1.0 - self._copied) > _HOPE and grower.explores()

    def _asks(self, tree: TokenTree, grower: ModelSource) -> bool:
        """A layer is asked for, which is no mere step where text is read that was written without the draft."""
        if not grower.layers:
            tree.min_score = self._least(self._chances.trust(grower.source))
            if not grower.is_following:
                self._costs.reads(grower.source)
        self.asks = True
        return True

    def _least(self, trust: float) -> float:
        """The path score below which a node is not even planted."""
        return log(_UNPAID * self._row / trust) if self._row > 0.0 < trust else -inf

    def grown(self, tree: TokenTree, grower: ModelSource) -> None:
        """The model has added a layer."""
        grower.has_read = True
        # Beside copies a layer adds what they leave to add, which says nothing of other rounds.
        if self._copied <= LITTLE:
            chances, before = sorted(self._chances.of(tree)[1:], reverse=True), self._worth
            rows, self._worth = self._best(chances[: self._place.budget - 1])
            most = self._costs.most_more(self._place.rows_of_others)
            is_cut = len(chances) >= rows > most  # by what is known, not by what pays
            if not is_cut:
                grower.gave(self._worth - before, self._at_leaves)
        self._costs.stepped(grower.source, self._place.requests)
        if grower.is_trial and not grower.layers:
            grower.trial_cost = self._costs.latest_draft
        grower.layers += 1

    def _is_due(self, grower: ModelSource) -> bool:
        """Whether a layer that does not pay is tried again."""
        cost = self._costs.draft(grower.source, self._place.requests)
        if not grower.layers:
            cost = max(grower.trial_cost, 3 * cost) + grower.reading
        is_told = not grower.layers or self._copied <= LITTLE  # beside copies a deeper layer says nothing
        failures = max(grower.failures, self._costs.failures(grower.source, self._place.requests))
        share = self._options.trials / 2 ** (0 if grower.layers else failures)
        idle = self._seconds - grower.grown[grower.layers] if grower.layers else self._costs.idle(grower.source)
        return is_told and cost * self._place.requests < share * idle

    def chosen(self, tree: TokenTree) -> list[int]:
        """The nodes that are verified, the root included, closed under ancestors: those with the best trusted chances.
        Now and then fewer than pay, to know what so few cost."""
        chances = self._chances.of(tree)
        order = sorted(range(1, len(tree)), key=chances.__getitem__, reverse=True)[: self._place.budget - 1]
        return sorted([0, *order[: self._count([*map(chances.__getitem__, order)]) - 1]])

    def _count(self, chances: Sequence[float]) -> int:
        """How many rows are verified, the root's included, of nodes with these falling chances."""
        for grower in self.growers:
            if grower.tries:
                return 2
        others = self._place.rows_of_others
        best, _ = self._best(chances)
        fewer = (best + 1) // 2
        return fewer if best > 1 and self._costs.is_worth_trying(others + fewer) else best

    def _best(self, chances: Sequence[float]) -> tuple[int, float]:
        """How many rows pay, the root's included, and what they bring above their price."""
        return self._costs.best(chances, self._place.rows_of_others, self._price)

    def is_over(self, tree: TokenTree, path: Sequence[int]) -> None:
        """A round is, or several plain ones are: the target has judged the tree and walked this path."""
        if self.asks:
            self.learn(tree, path)
        else:
            self.wrote(len(path))

    def wrote(self, rounds: int) -> None:
        """So many plain rounds are over, in which nobody was asked."""
        self._seconds += self._plain * rounds
        for grower in self.growers:
            grower.is_following = False
        for copier in self.copiers:
            copier.skipped(rounds - 1)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """The target has judged the tree and walked this path."""
        self._seconds += self._plain
        for grower in self.growers:
            grower.is_following = grower.layers > 0
            grower.grown[: grower.layers] = [self._seconds] * grower.layers
            if grower.layers:
                grower.failures = grower.failures + 1 if grower.tries else 0
                if self._place.requests > 1:
                    self._costs.tried(grower.source, self._place.requests, pays=not grower.tries)
                grower.judged(self._price)
        self._chances.learn(tree, path)
        for copier in self.copiers:
            if copier.is_asked:
                self._learn_copies(copier, tree, path)

    def end(self) -> None:
        """The request is over."""
        self._chances.work_in()

    def _learn_copies(self, copier: LookupSource, tree: TokenTree, path: Sequence[int]) -> None:
        """What a source without a model gave, and what its rows cost."""
        name, gain, count = copier.source.name, 0.0, len(tree) - 1
        if rows := tree.sources.count(name):
            seconds = self._costs.more(self._place.rows_of_others + 1, count)[-1] / count
            gain = [*map(tree.sources.__getitem__, path)].count(name) - self._price * seconds * rows
        copier.gain.learn(gain)
        copier.asked(self._gains(copier), self._repeats)
        self._costs.copies(name, self._place.requests).learn(gain)

    def _reach(self, tree: TokenTree, grower: ModelSource) -> float:
        """The chance that the walk comes to where the model's next layer would stand: below the likeliest leaves, and
        first of all beside the copies below the root; of each what is above the price of a row there, for four unlikely
        leaves give less than one that is as likely as all of them."""
        chances, least = self._chances.of(tree), self._row / GROWS
        leaves = sorted(map(chances.__getitem__, tree.leaves()), reverse=True)[:_BEAM]
        if not grower.layers:
            beside = 1.0 - sum(map(chances.__getitem__, tree.children(0)))
            leaves.append(self._chances.trust(grower.source) * beside)
        reach = 0.0
        for chance in leaves:
            reach += max(0.0, chance - least)
        return reach


def note_forward(costs: CostModel, source: Source, forward: Forward, requests: int) -> None:
    """What a forward took that was carried out, while so many requests write."""
    if not forward.is_step:
        costs.reads(source)
    costs.drafted(forward.seconds, forward.requests, source)
    costs.stepped(source, requests)


class PlannerAhead(Planner):
    """Plans rounds step by step, or some of them at once."""

    @property
    def names(self) -> tuple[str, str]:
        """Of the source that runs a model, and of the one that copies in rounds that are carried out."""
        return self.growers[0].source.name, self.copiers[0].source.name if self.copiers else ""

    def leaves_copies(self, names: Collection[str]) -> bool:
        """Whether all copies are those of one source, which has one of these names."""
        return len(self.copiers) == 1 and self.copiers[0].source.name in names

    def plan(self, tree: TokenTree) -> Plan | None:
        """What rounds go by that are carried out without being asked about, none of them plain in any case; None where
        there is not one model to ask. Copies that are left to whoever carries them out are made in every round."""
        if len(self.growers) != 1:
            return None
        (grower,), place, costs = self.growers, self._place, self._costs
        reads = grower.has_read or grower.is_worth_reading()
        if not self.asks and not (reads and self._first_layer_pays(tree, grower)):
            return resting(UNPLANNED + 1)
        leaves_copies = place.carries is not None and self.leaves_copies(place.carries)
        rounds = place.left
        for copier in self.copiers:
            if not copier.is_asked:
                rounds = min(rounds, copier.rests)
            elif not leaves_copies or not self._gains(copier):
                rounds = 1
        trust = self._chances.trust(grower.source)
        return Plan(
            rounds=rounds,
            follows=grower.is_following,
            deepest=self._options.deepest if reads else 0,
            explores=grower.explored,
            price=self._price,
            cost=self._price * costs.draft(grower.source, place.requests),
            trust=trust,
            row=self._row / GROWS,
            least=self._least(trust),
            copied=self._copied,
            growth=grower.growths,
            due=self._due_layers(grower),
            chances=self._chances.of(tree),
            times=costs.pass_times(place.requests * place.budget + 1),
            most=place.budget,
            copies=leaves_copies and self.copiers[0].is_asked,
        )

    def _first_layer_pays(self, tree: TokenTree, grower: ModelSource) -> bool:
        """Whether a layer would be grown."""
        cost = self._price * self._costs.draft(grower.source, self._place.requests)
        return self._brings(grower, self._reach(tree, grower), cost) or self._is_due(grower)

    def carried(self, carried: Carried) -> None:
        """A round was carried out by the plan."""
        (grower,), costs = self.growers, self._costs
        if carried.planted:
            costs.drafted(carried.copy_seconds, self._place.requests, self.copiers[0].source)
        for layer, forward in zip(carried.layers, carried.forwards, strict=False):
            note_forward(costs, grower.source, forward, self._place.requests)
            if layer.counts:
                grower.gave(layer.worth, layer.at_leaves)
            grower.has_read = True
            grower.layers += 1
        if carried.is_trial and grower.layers == 1:
            grower.trial_cost = costs.latest_draft
        grower.is_trial = carried.is_trial
        if carried.is_fewer:
            costs.tries()
        self.asks = self.asks or grower.layers > 0

    def goes_on(self) -> None:
        """One more round goes by the same plan."""
        self._rounds, self.asks = self._rounds + 1, False
        for grower in self.growers:
            grower.layers, grower.is_trial = 0, False
        for copier in self.copiers:
            if copier.is_asked:
                self.asks = True
            else:
                copier.skipped(1)

    def _due_layers(self, grower: ModelSource) -> list[bool]:
        """Whether each layer is due for a trial, as it stands before any is grown."""
        cost, share = self._costs.draft(grower.source, self._place.requests), self._options.trials
        bound = cost * self._place.requests
        deeper = [bound < share * (self._seconds - last) for last in grower.grown[1:]]
        return [self._is_due(grower), *deeper]
