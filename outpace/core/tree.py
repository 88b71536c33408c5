"""Token trees: candidate tokens that await verification, and functions on them.

The tree itself is native (`kernels/src/tree.h`); `tests/tree_twin.py` is a reference implementation in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.arrays import kernels, torch

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.core.distribution import TokenDistribution


PREFIX = -1  # the parent of the root
UNLIMITED = 1 << 30  # a depth or a number of tokens that nothing reaches


class LabelledEnum(IntEnum):
    """Numbers that the kernels share, with names for people."""

    @property
    def label(self) -> str:
        """Return the name in figures and messages: "primary", "drawn", ..."""
        return self.name.lower()


class Role(LabelledEnum):
    """The purpose of a node.

    PRIMARY: among the K best of its draft step: CARD's cache C. SECONDARY: scored, but not among them: CARD's cache B;
    verified like any other. PROBE: scored for the drafter only: never accepted, never counted as drafted.
    """

    PRIMARY = 0
    SECONDARY = 1
    PROBE = 2


class Siblings(LabelledEnum):
    """How the children of one node were chosen; a rule refuses trees that it is not exact for.

    PICKED: deterministically, no two alike. DRAWN: independently from q, duplicates count. WITHOUT_REPLACEMENT: from q,
    each without the tokens drawn before it.
    """

    PICKED = 1
    DRAWN = 2
    WITHOUT_REPLACEMENT = 3


class DrawnChildren(NamedTuple):
    """The distribution from which the children of one node were drawn, and the outcome. The children are distinct."""

    q: TokenDistribution
    tokens: tuple[int, ...] = ()  # in the order drawn, repeats included; none below a leaf
    raw: Callable[[], TokenDistribution] | None = None  # q at temperature 1 and without filters, if the rule needs it


class TokenTree(kernels.TokenTree):
    """A tree of tokens that grows at its leaves and never loses a node.

    Node 0 is the root: the last committed token, whose keys and values are not stored yet. A parent precedes its
    children. Columns by node, which behave like lists: `tokens`, `parents`, `depths`, `roles`, `sources` (the drafter
    that added it, "" if unknown), `ids` (unique within a request, over all its trees) and `scores`: the path score is
    the log of the estimated probability that the target accepts the path to the node; it never exceeds the parent's,
    so the best n nodes are always closed under ancestors.

    If only `max_nodes` nodes can be verified, worse ones need not be added: see `bound`. `current_source` is the
    drafter that is adding nodes now, `width` the most nodes that its model may expand in one forward (0: the drafter's
    own limit). Nodes deeper than `max_depth` cannot be written any more; they need not be added, and `copy` omits them.
    `drawn` has the drawn children by node, in the order in which they were drawn.

    One thread at a time uses a tree.
    """

    def __init__(self, token: int, root_id: int = 0, next_id: int = 1) -> None:
        super().__init__(token, root_id, next_id)
        self.drawn: dict[int, DrawnChildren] = {}
        self.width, self.max_depth = 0, UNLIMITED

    def siblings_of(self, node: int) -> Siblings:
        """Return how the children of a node are chosen; PICKED if it has none yet."""
        return Siblings(super().siblings_of(node))

    def draw(self, parent: int, drawn: DrawnChildren, siblings: Siblings = Siblings.DRAWN) -> int:
        """Add the distinct tokens of one draw as all the children of a node; return their number."""
        if self.has_children(parent) or parent in self.drawn:
            raise ValueError(f"node {parent} has children already, a group is drawn at once")
        self.drawn[parent], self._is_drawn = drawn, True
        distinct = dict.fromkeys(drawn.tokens)
        for token in distinct:
            self.add(parent, token, self.scores[parent] + math.log(drawn.q.probability(token)), siblings=siblings)
        return len(distinct)

    def below(self, node: int) -> TokenTree:
        """Return a tree of picked nodes that begins at this node."""
        tree = TokenTree(0)
        tree.take_below(self, node)
        return tree

    def best_copy(self, count: int) -> TokenTree:
        """Return a tree of the picked nodes with the `count` best path scores."""
        tree = TokenTree(0)
        tree.take_best(self, count)
        return tree

    def copy(self, nodes: Sequence[int]) -> TokenTree:
        """Return a tree of these nodes only; the first becomes the root, and ancestors below it must be included."""
        if self.deepest > self.max_depth:
            nodes = [node for node in nodes if self.depth(node) <= self.max_depth]
        tree = TokenTree(0)
        tree.max_depth = self.max_depth - self.depth(nodes[0])
        tree.take(self, nodes)
        if self.drawn:
            index = {node: place for place, node in enumerate(nodes)}
            for node, drawn in self.drawn.items():
                if node in index:
                    is_leaf = not tree.has_children(index[node])
                    tree.drawn[index[node]] = drawn._replace(tokens=()) if is_leaf else drawn
            tree._is_drawn = bool(tree.drawn)
        return tree


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node; the root has depth 0."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent == PREFIX else result[parent] + 1)
    return result


def positions(parents: Sequence[int], length: int) -> list[int]:
    """Return the position of every node in its text if `length` tokens precede the root."""
    return [length + depth for depth in depths(parents)]


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Return which nodes each node attends to: itself and its ancestors. bool [nodes, nodes]"""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != PREFIX:
            mask[node] |= mask[parent]
    return mask


def best_chain(tree: TokenTree, count: int | None = None) -> list[int]:
    """Return the chain of best children from the root, at most `count` nodes."""
    path = [0]
    while (count is None or len(path) < count) and (children := tree.children(path[-1])):
        path.append(max(children, key=lambda child: (tree.scores[child], -child)))
    return path


def best_nodes(tree: TokenTree, count: int, q_at_leaves: bool = False) -> list[int]:
    """Return the `count` nodes with the best path scores, parents first. They are closed under ancestors.

    Drawn nodes must not be chosen by their tokens, which would bias every rule: whole groups of siblings are taken in
    the order in which they were drawn, counted in draws. A chain may be cut, which depends on its length only. With
    `q_at_leaves`, every drawn node that is taken has a q of its own.
    """
    return _first_groups(tree, count, q_at_leaves) if tree.drawn else tree.best(count)


def _first_groups(tree: TokenTree, count: int, q_at_leaves: bool) -> list[int]:
    """Return the root and as many whole groups as fit, which depends on how many tokens were drawn, not on which."""
    nodes, num_left = [0], count - 1
    for node, drawn in tree.drawn.items():
        num_left -= len(drawn.tokens)
        children = tree.children(node)
        if num_left < 0 or (q_at_leaves and any(child not in tree.drawn for child in children)):
            break
        nodes += children
    return sorted(nodes)
