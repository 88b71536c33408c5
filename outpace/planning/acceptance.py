"""How likely the target is to walk to the nodes of a round's tree: a drafter's word, trusted as far as it came true."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from outpace.core.stats import BatchedUpdates
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Source
from outpace.planning.cost_model import CostModel

_ON = 0.97  # of the chance that a copy goes on
_TOGETHER = 3  # rounds


class AcceptanceModel:
    """Those of one request's nodes, round by round.

    A node's chance is at most its parent's, trusted as far as those of its source came true; who fits chances to each
    length is taken at its word, but for a doubt at each token: a rate is a mean of texts that go on and of places where
    they end, and a long branch stands or falls with which it is.
    """

    def __init__(self, costs: CostModel, sources: Iterable[Source]) -> None:
        self._costs = costs
        self._trust = {one.name: costs.trust_of_one(one.name) for one in sources if not one.is_fitted}
        self._values = [1.0]
        self._judged = BatchedUpdates[tuple[TokenTree, Sequence[int]]](self._trust_by, _TOGETHER)

    def begin(self) -> None:
        """A round begins, with a tree that is a root."""
        self._values = [1.0]

    def trust(self, source: Source) -> float:
        """How far this source's chances are trusted."""
        return self._trust[source.name].value if source.name in self._trust else 1.0

    def of(self, tree: TokenTree) -> list[float]:
        """By node."""
        values, trusts, sources, parents, scores = self._values, self._trust, tree.sources, tree.parents, tree.scores
        for node in range(len(values), len(scores)):
            trust, parent = trusts.get(sources[node]), parents[node]
            above, score = values[parent], scores[node]
            own = exp(score) * trust.value if trust is not None else above * exp(score - scores[parent]) * _ON
            values.append(own if own < above else above)
        return values

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """The target has judged the tree and walked this path."""
        self._judged.add(((tree, path),))

    def work_in(self) -> None:
        """What was judged counts from now on."""
        self._judged.work_in()

    def _trust_by(self, judged: tuple[TokenTree, Sequence[int]]) -> None:
        """By each source's nodes that were walked, beside what they promised."""
        tree, path = judged
        promised, walked, sources, trusts = dict[str, float](), dict[str, int](), tree.sources, self._trust
        for node in range(1, len(sources)):
            if sources[node] in trusts and tree.roles[node] is not Role.PROBE:  # that promises nothing in this round
                promised[sources[node]] = promised.get(sources[node], 0.0) + exp(tree.scores[node])
        for node in path[1:]:
            walked[sources[node]] = walked.get(sources[node], 0) + 1
        for source, chances in promised.items():
            came = walked.get(source, 0)
            trusts[source].learn(came, chances)
            self._costs.trust(source).learn(came, chances)
