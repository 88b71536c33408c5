"""Draft lengths: fixed, adapted to the last result, or ended when the drafter is no longer confident.

A length may depend on drawn tokens without changing the distribution, because the token that makes drafting stop is
verified too. Everything learnt belongs to one request, so that its text does not depend on others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from outpace.core.tree import Role, TokenTree

_WINDOW = 256  # number of latest verified tokens that the threshold is fitted to
_MIN_SAMPLES = 8  # the threshold stays unchanged until more tokens than these were verified
# Cost of stopping before a token that is accepted, relative to drafting one that is rejected.
_FALSE_NEGATIVE_WEIGHT = 3.0
_FIRST_THRESHOLD = 0.4  # as in transformers
_MAX_REJECTION = 0.3  # chance of a rejection above which drafting stops, SpecDec++'s h
_BINS = 10


def chance_of(tree: TokenTree, node: int) -> float:
    """Return the drafter's chance of a node's token given that its parent is accepted."""
    return math.exp(tree.scores[node] - tree.scores[tree.parents[node]])


class Fixed:
    """The same length in every round."""

    def __init__(self, length: int) -> None:
        self.limit = length

    def is_enough(self, tree: TokenTree, new: Sequence[int]) -> bool:
        """Return whether drafting ends after these nodes, the last level."""
        return False

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a verified tree and its accepted path."""


class Heuristic(Fixed):
    """Drafts two tokens more after full acceptance, one less otherwise. As in transformers' assisted generation."""

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        if len(tree) > 1:
            longer = not any(tree.roles[child] != Role.PROBE for child in tree.children(path[-1]))
            self.limit = min(256, self.limit + 2) if longer else max(1, self.limit - 1)


class Confidence(Fixed):
    """Drafts until no token of the last level is as likely as a threshold, which is fitted to the accepted tokens.

    The threshold minimises FPR + 3 FNR, where false positives are tokens above it that were rejected. As in
    transformers' assisted generation.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.threshold = _FIRST_THRESHOLD
        self._judged: deque[tuple[float, bool]] = deque(maxlen=_WINDOW)

    def is_enough(self, tree: TokenTree, new: Sequence[int]) -> bool:
        return max(chance_of(tree, node) for node in new) < self.threshold

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        self._judged.extend(_judged(tree, path))
        kept = sorted(chance for chance, accepted in self._judged if accepted)
        lost = sorted(chance for chance, accepted in self._judged if not accepted)
        if kept and lost and len(self._judged) > _MIN_SAMPLES:
            self.threshold = min(sorted({*kept, *lost}), key=lambda one: _cost(one, kept, lost))


class Expected(Fixed):
    """Drafts until a rejection is likely enough, 1 - prod p_accept. SpecDec++, arXiv:2405.19715.

    The paper trains a head for p_accept; here it is the share of accepted tokens among those with a similar drafter's
    chance, with that chance as prior.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._trials = [2.0] * _BINS
        self._accepted = [2.0 * (number + 0.5) / _BINS for number in range(_BINS)]

    def is_enough(self, tree: TokenTree, new: Sequence[int]) -> bool:
        best = max(new, key=tree.scores.__getitem__)
        nodes = [node for node in tree.path(best) if node]
        return 1.0 - math.prod(self._acceptance(chance_of(tree, node)) for node in nodes) > _MAX_REJECTION

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        for chance, accepted in _judged(tree, path):
            self._trials[_bin(chance)] += 1.0
            self._accepted[_bin(chance)] += accepted

    def _acceptance(self, chance: float) -> float:
        return self._accepted[_bin(chance)] / self._trials[_bin(chance)]


def _bin(chance: float) -> int:
    return min(_BINS - 1, int(chance * _BINS))


def _judged(tree: TokenTree, path: Sequence[int]) -> list[tuple[float, bool]]:
    """Return the chance of the likeliest child of each accepted node, and whether the child was accepted."""
    found = []
    for node, following in zip(path, [*path[1:], None], strict=True):
        children = [child for child in tree.children(node) if tree.roles[child] != Role.PROBE]
        if children:
            best = max(children, key=tree.scores.__getitem__)
            found.append((chance_of(tree, best), best == following))
    return found


def _cost(threshold: float, kept: Sequence[float], lost: Sequence[float]) -> float:
    false_positives = sum(chance >= threshold for chance in lost) / len(lost)
    false_negatives = sum(chance < threshold for chance in kept) / len(kept)
    return false_positives + _FALSE_NEGATIVE_WEIGHT * false_negatives
