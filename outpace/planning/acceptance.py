"""The acceptance model: how likely the target is to accept the nodes of a round's tree."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from outpace.core.stats import BatchedUpdates, DecayedMean
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Source
from outpace.planning.cost_model import CostModel

_CONTINUES = 0.97  # trust in a source that calibrates its own chances
_BATCH = 3  # rounds that are learnt together
_FADE = 0.97  # how fast one request's trust follows its own drafts: a few bad rounds are chance
_COMMON = 2.0  # weight of all requests' trust in that of one


class AcceptanceModel:
    """Calibrates one request's predicted chances, round by round.

    A node's chance is its parent's chance times the chance that the node is accepted if its parent is. For the latter
    the drafter's prediction is multiplied by the source's trust: the number of accepted children of accepted nodes,
    divided by the sum of these children's predicted chances. Other nodes are no evidence: a long branch that fails at
    its first token is one failure. The trust in a source that calibrates its own chances is a constant just below 1.
    """

    def __init__(self, costs: CostModel, sources: Sequence[Source], text: Sequence[int]) -> None:
        """`text`: the request's tokens; the caller extends this list."""
        self._costs, self._text = costs, text
        self._by_length = {one.name for one in sources if one.by_length}
        self._own = {one.name: DecayedMean(0.0, 0.0, _FADE) for one in sources if not one.is_calibrated}
        self._tree: TokenTree | None = None
        self._trusts = self._known_trusts()  # by source, for this tree
        self._judged = BatchedUpdates[tuple[TokenTree, Sequence[int]]](self._learn_round, _BATCH)

    def trust(self, source: Source) -> float:
        """Return the factor by which this source's chances are multiplied at each token."""
        return self._trusts.get(source.name, 1.0)

    def _known_trusts(self) -> dict[str, float]:
        """Return this request's own trust in each source, which starts from that of all requests."""
        return {name: own.given(self._common(name).value, _COMMON) for name, own in self._own.items()}

    def _common(self, name: str) -> DecayedMean:
        """Return the trust of all requests; for sources with `by_length`, of all with texts of about this length."""
        return self._costs.trust(name, len(self._text) if name in self._by_length else 0)

    def of(self, tree: TokenTree) -> list[float]:
        """Return the chance that the target accepts each node and all its ancestors."""
        if tree is not self._tree:
            self._tree, self._trusts = tree, self._known_trusts()
        chances: list[float] = tree.chances(self._trusts, _CONTINUES)
        return chances

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Add a verified tree and the path that the target accepted."""
        self._judged.add(((tree, path),))

    def work_in(self) -> None:
        """Learn from all verified trees that were added."""
        self._judged.work_in()

    def _learn_round(self, judged: tuple[TokenTree, Sequence[int]]) -> None:
        """Compare the accepted children of accepted nodes with the sum of the children's predicted chances."""
        tree, path = judged
        promised: dict[str, float] = {}
        accepted: dict[str, int] = {}
        sources, scores = [*tree.sources], [*tree.scores]
        for node, following in zip(path, [*path[1:], None], strict=True):
            for child in tree.children(node):
                source = sources[child]
                if source in self._own and tree.roles[child] != Role.PROBE:  # a probe predicts nothing for a round
                    promised[source] = promised.get(source, 0.0) + exp(scores[child] - scores[node])
                    accepted[source] = accepted.get(source, 0) + (child == following)
        for source, chances in promised.items():
            self._own[source].learn(accepted[source], chances)
            self._common(source).learn(accepted[source], chances)
