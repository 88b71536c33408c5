"""The acceptance model: how likely the target is to accept the nodes of a round's tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from outpace.core.stats import BatchedUpdates
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Source
from outpace.planning.cost_model import CostModel

_CONTINUES = 0.97  # factor for each token of a source that calibrates its own chances
_BATCH = 3  # rounds that are learnt together


class AcceptanceModel:
    """Calibrates one request's predicted chances, round by round.

    A node's chance is at most its parent's. The drafter's prediction is multiplied by the source's trust, the ratio of
    accepted tokens to predicted ones. A source that calibrates its own chances for each length is taken at its word
    except for a small doubt at each token: its rate is a mean of texts that continue and of places where they end, and
    a long branch is accepted or rejected as a whole.
    """

    def __init__(self, costs: CostModel, sources: Iterable[Source]) -> None:
        self._costs = costs
        self._trust = {one.name: costs.initial_trust(one.name) for one in sources if not one.is_calibrated}
        self._values = [1.0]
        self._judged = BatchedUpdates[tuple[TokenTree, Sequence[int]]](self._learn_round, _BATCH)

    def begin(self) -> None:
        """Begin a round, whose tree is only a root."""
        self._values = [1.0]

    def trust(self, source: Source) -> float:
        """Return the factor by which this source's chances are multiplied."""
        return self._trust[source.name].value if source.name in self._trust else 1.0

    def of(self, tree: TokenTree) -> list[float]:
        """Return the chance of each node."""
        values, first = self._values, len(self._values)
        if first < len(tree):
            scores = [*tree.scores]
            for source, parent, score in zip(tree.sources[first:], tree.parents[first:], scores[first:], strict=True):
                trust, above = self._trust.get(source), values[parent]
                own = above * exp(score - scores[parent]) * _CONTINUES if trust is None else exp(score) * trust.value
                values.append(own if own < above else above)
        return values

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Add a verified tree and the path that the target accepted."""
        self._judged.add(((tree, path),))

    def work_in(self) -> None:
        """Learn from all verified trees that were added."""
        self._judged.work_in()

    def _learn_round(self, judged: tuple[TokenTree, Sequence[int]]) -> None:
        """Compare each source's accepted nodes with the sum of their predicted chances."""
        tree, path = judged
        promised, walked, sources, trusts = dict[str, float](), dict[str, int](), [*tree.sources], self._trust
        for source, role, score in zip(sources[1:], tree.roles[1:], tree.scores[1:], strict=True):
            if source in trusts and role != Role.PROBE:  # a probe predicts nothing for a round
                promised[source] = promised.get(source, 0.0) + exp(score)
        for node in path[1:]:
            walked[sources[node]] = walked.get(sources[node], 0) + 1
        for source, chances in promised.items():
            came = walked.get(source, 0)
            trusts[source].learn(came, chances)
            self._costs.trust(source).learn(came, chances)
