"""The planner's choices told beforehand, for rounds that the models carry out by themselves (core/carried.py), and what
it learns of these.

What changes from round to round with the texts is theirs to see: the chances of the nodes. Prices, growth and trust are
those of the moment in which the first of the rounds begins, for as many as are over within some milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection

from outpace.core.carried import Carried, Forward, Plan, resting
from outpace.core.tree import TokenTree
from outpace.core.types import Source
from outpace.planning.cost_model import GROWS, Costs
from outpace.planning.planner import UNPLANNED, Planner
from outpace.planning.sources import Grower


def note_forward(costs: Costs, source: Source, forward: Forward, requests: int) -> None:
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

    def _first_layer_pays(self, tree: TokenTree, grower: Grower) -> bool:
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

    def _due_layers(self, grower: Grower) -> list[bool]:
        """Whether each layer is due for a trial, as it stands before any is grown."""
        cost, share = self._costs.draft(grower.source, self._place.requests), self._options.trials
        bound = cost * self._place.requests
        deeper = [bound < share * (self._seconds - last) for last in grower.grown[1:]]
        return [self._is_due(grower), *deeper]
