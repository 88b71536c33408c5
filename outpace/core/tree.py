"""Token trees: candidate tokens that await verification, and functions on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.core.distribution import TokenDistribution


PREFIX = -1  # the parent of the root


class Role(Enum):
    """The purpose of a node."""

    PRIMARY = "primary"  # among the K best of its draft step: CARD's cache C
    SECONDARY = (
        "secondary"  # scored, but not among the K best of its draft step: CARD's cache B; verified like any other
    )
    PROBE = "probe"  # scored for the drafter only: never accepted, never counted as drafted


class Siblings(Enum):
    """How the children of one node were chosen; a rule refuses trees that it is not exact for."""

    PICKED = "picked"  # deterministically: no two alike
    DRAWN = "drawn"  # independently from q: duplicates count
    WITHOUT_REPLACEMENT = "without_replacement"


class DrawnChildren(NamedTuple):
    """The distribution from which the children of one node were drawn, and the outcome. The children are distinct."""

    q: TokenDistribution
    tokens: tuple[int, ...] = ()  # in the order drawn, repeats included; none below a leaf
    raw: Callable[[], TokenDistribution] | None = None  # q at temperature 1 and without filters, if the rule needs it


class TokenTree:
    """A tree of tokens that grows at its leaves and never loses a node.

    Node 0 is the root: the last committed token, whose keys and values are not stored yet. A parent precedes its
    children. `scores[i]` is the path score: the log of the estimated probability that the target accepts the path to
    node i; it never exceeds the parent's, so the best n nodes are always closed under ancestors. `ids` are unique
    within a request, over all its trees.

    If only `max_nodes` nodes can be verified, worse ones need not be added: see `bound`. Children that score below
    `min_score` need not be added either, except the best one below each node.

    One thread at a time writes: the one that grows the tree. Readers remember `len(tree)` and use the nodes before it.
    """

    def __init__(self, token: int, root_id: int = 0, next_id: int = 1) -> None:
        self.tokens = [token]
        self.parents = [PREFIX]
        self.scores = [0.0]
        self.roles = [Role.PRIMARY]
        self.ids = [root_id]
        self.sources = [""]  # by node: the drafter that added it, if known
        self.current_source = ""  # the drafter that is adding nodes now, if known
        self.siblings: dict[int, Siblings] = {}
        self.drawn: dict[int, DrawnChildren] = {}  # by node, in the order in which their children were drawn
        self.next_id = next_id
        self.max_nodes: int | None = None  # number of nodes that can be verified, if known
        self.min_score = -math.inf
        self._children: list[list[int]] = [[]]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        parent: int,
        token: int,
        score: float,
        role: Role = Role.PRIMARY,
        siblings: Siblings = Siblings.PICKED,
        node_id: int | None = None,
    ) -> int | None:
        """Add a child with a path score; return its number, or None if a picked sibling has the same token."""
        node = len(self.tokens)
        if not 0 <= parent < node:
            raise ValueError(f"parent {parent} is not in a tree of {node} nodes")
        if self.siblings.setdefault(parent, siblings) is not siblings:
            raise ValueError(f"children of node {parent} are {self.siblings[parent].value}, not {siblings.value}")
        if math.isnan(score):
            raise ValueError(f"the path score of token {token} is not a number")
        if self._children[parent] and siblings is Siblings.PICKED and self.child(parent, token) is not None:
            return None
        above = self.scores[parent]
        node_id = self.next_id if node_id is None else node_id
        self.append([parent], [token], [score if score < above else above], [role], [node_id])
        return node

    def append(
        self,
        parents: Sequence[int],
        tokens: Sequence[int],
        scores: Sequence[float],
        roles: Sequence[Role],
        ids: Sequence[int],
    ) -> None:
        """Append valid nodes, parents first."""
        children = self._children
        for node, parent in enumerate(parents, len(children)):
            children.append([])
            children[parent].append(node)
        self.tokens += tokens
        self.parents += parents
        self.scores += scores
        self.roles += roles
        self.ids += ids
        self.sources += [self.current_source] * len(tokens)
        self.next_id = max(self.next_id, max(ids) + 1)

    def attach_children(self, children: Sequence[tuple[float, int, int]], primary: int) -> None:
        """Add picked children, (path score, parent, token) each, except those below the bound.

        This decides which of CARD's caches a node is in: the first `primary` children get the role PRIMARY (C), the
        others SECONDARY (B). A drafter passes the children of one draft step, best first. They must differ in parent or
        token.
        """
        kids, siblings, scores = self._children, self.siblings, self.scores
        picked, role, left = Siblings.PICKED, Role.PRIMARY, primary
        fresh = []
        for score, parent, token in children:
            if siblings.setdefault(parent, picked) is not picked:
                raise ValueError(f"children of node {parent} are {siblings[parent].value}, not picked")
            if score != score:
                raise ValueError(f"the path score of token {token} is not a number")
            if not left:
                role = Role.SECONDARY
            left -= 1
            if not kids[parent] or self.child(parent, token) is None:
                above = scores[parent]
                fresh.append((parent, token, score if score < above else above, role))
        if self.max_nodes is not None and len(self.tokens) + len(fresh) > self.max_nodes:
            bound = self.bound([child[2] for child in fresh])
            fresh = [child for child in fresh if child[2] >= bound]
        if fresh:
            parents, tokens, path_scores, roles = zip(*fresh, strict=True)
            self.append(parents, tokens, path_scores, roles, range(self.next_id, self.next_id + len(fresh)))

    def chain(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> int:
        """Add picked tokens, each below the one before, and return the first node.

        The first token must be new below `parent`, and the path scores must not increase.
        """
        first, siblings = len(self.tokens), self.siblings
        if siblings.setdefault(parent, Siblings.PICKED) is not Siblings.PICKED:
            raise ValueError(f"children of node {parent} are {siblings[parent].value}, not picked")
        above = range(first, first + len(tokens) - 1)
        siblings.update(dict.fromkeys(above, Siblings.PICKED))
        ids = range(self.next_id, self.next_id + len(tokens))
        self.append([parent, *above], tokens, scores, [Role.PRIMARY] * len(tokens), ids)
        return first

    def draw(self, parent: int, drawn: DrawnChildren, siblings: Siblings = Siblings.DRAWN) -> int:
        """Add the distinct tokens of one draw as all the children of a node; return their number."""
        if self._children[parent] or parent in self.drawn:
            raise ValueError(f"node {parent} has children already, a group is drawn at once")
        self.drawn[parent] = drawn
        distinct = dict.fromkeys(drawn.tokens)
        for token in distinct:
            self.add(parent, token, self.scores[parent] + math.log(drawn.q.of(token)), siblings=siblings)
        return len(distinct)

    def bound(self, more: Sequence[float] = ()) -> float:
        """Return the path score below which no node can be among the best `max_nodes`, now or later.

        `more` are the scores of candidates that are about to be added.
        """
        if self.max_nodes is None or self.drawn or len(self.tokens) + len(more) <= self.max_nodes:
            return -math.inf  # all nodes fit
        return sorted([*self.scores, *more], reverse=True)[self.max_nodes - 1]

    @property
    def has_room(self) -> bool:
        """Return whether any added node can be verified, however unlikely it is."""
        return self.max_nodes is None or bool(self.drawn) or len(self.tokens) < self.max_nodes

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node, in the order in which they were added."""
        return self._children[node]

    def leaves(self) -> list[int]:
        """Return the nodes without children, except the root and probes."""
        roles = self.roles
        return [
            node for node, below in enumerate(self._children) if not below and node and roles[node] is not Role.PROBE
        ]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that carries `token`; probes are not considered."""
        for child in self._children[node]:
            if self.tokens[child] == token and self.roles[child] is not Role.PROBE:
                return child
        return None

    def ancestry(self, node: int) -> Iterator[int]:
        """Yield the node, its parent, and so on up to the root."""
        while node != PREFIX:
            yield node
            node = self.parents[node]

    def depth(self, node: int) -> int:
        """Return the number of edges between the node and the root."""
        return sum(1 for _ in self.ancestry(node)) - 1

    def copy(self, nodes: Sequence[int]) -> TokenTree:
        """Return a tree of these nodes only; the first becomes the root, and ancestors below it must be included."""
        root, rest = nodes[0], nodes[1:]
        tree = TokenTree(self.tokens[root], self.ids[root], self.next_id)
        index = dict(zip(nodes, range(len(nodes)), strict=True))
        if rest:
            parents, scores = [], []
            for node in rest:
                parent = self.parents[node]
                parents.append(index[parent])
                scores.append(self.scores[node] - self.scores[root])
                tree.siblings[index[parent]] = self.siblings[parent]
            tokens, ids = [*map(self.tokens.__getitem__, rest)], [*map(self.ids.__getitem__, rest)]
            tree.append(parents, tokens, scores, [*map(self.roles.__getitem__, rest)], ids)
            tree.sources[1:] = map(self.sources.__getitem__, rest)
        for node, drawn in self.drawn.items():
            if node in index:
                is_leaf = not tree._children[index[node]]
                tree.drawn[index[node]] = drawn._replace(tokens=()) if is_leaf else drawn
        tree.next_id = self.next_id
        return tree

    def subtree(self, node: int) -> list[int]:
        """Return the node and all its descendants, parents first."""
        inside = {node}
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] in inside:
                inside.add(other)
        return sorted(inside)


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Return the nodes from the root to `node`, both included."""
    return list(tree.ancestry(node))[::-1]


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


def best_nodes(tree: TokenTree, count: int, q_at_leaves: bool = False) -> list[int]:
    """Return the `count` nodes with the best path scores, parents first. They are closed under ancestors.

    Drawn nodes must not be chosen by their tokens, which would bias every rule: whole groups of siblings are taken in
    the order in which they were drawn, counted in draws. A chain may be cut, which depends on its length only. With
    `q_at_leaves`, every drawn node that is taken has a q of its own.
    """
    if tree.drawn:
        return _first_groups(tree, count, q_at_leaves)
    if count >= len(tree):
        return list(range(len(tree)))
    if all(parent == node - 1 for node, parent in enumerate(tree.parents)):
        return list(range(count))
    if any(kind is not Siblings.PICKED for kind in tree.siblings.values()):
        raise ValueError("only trees of picked siblings may be pruned by score")
    return sorted(sorted(range(len(tree)), key=tree.scores.__getitem__, reverse=True)[:count])


def _first_groups(tree: TokenTree, count: int, q_at_leaves: bool) -> list[int]:
    """Return the root and as many whole groups as fit, which depends on how many tokens were drawn, not on which."""
    nodes, room = [0], count - 1
    for node, drawn in tree.drawn.items():
        room -= len(drawn.tokens)
        children = tree.children(node)
        if room < 0 or (q_at_leaves and any(child not in tree.drawn for child in children)):
            break
        nodes += children
    return sorted(nodes)
