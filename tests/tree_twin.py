"""The slow twin of the native token tree: what `outpace.core.tree.TokenTree` must do, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from outpace.core.tree import PREFIX, Role, Siblings


class TreeTwin:
    """The same methods in plain Python, without drawn children."""

    def __init__(self, token: int, root_id: int = 0, next_id: int = 1) -> None:
        self.tokens = [token]
        self.parents = [PREFIX]
        self.scores = [0.0]
        self.roles = [Role.PRIMARY]
        self.ids = [root_id]
        self.sources = [""]  # by node: the drafter that added it, if known
        self.current_source = ""  # the drafter that is adding nodes now, if known
        self.siblings: dict[int, Siblings] = {}
        self.next_id = next_id
        self.max_nodes: int | None = None  # number of nodes that can be verified, if known
        self.num_confirmed = 0
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
        if self.siblings.setdefault(parent, siblings) != siblings:
            raise ValueError(f"children of node {parent} are {self.siblings[parent].name}, not {siblings.name}")
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
            if siblings.setdefault(parent, picked) != picked:
                raise ValueError(f"children of node {parent} are {siblings[parent].name}, not picked")
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

    def confirm(self, parent: int, token: int, chance: float) -> None:
        """If a node has this child with a lower score, raise it and those below by as much, and change its source."""
        node = self.child(parent, token)
        if node is None:
            return
        self.num_confirmed += 1
        old, score = self.scores[node], self.scores[parent] + min(chance, 0.0)
        if score > old:
            self.sources[node] = self.current_source
            more = score - old if old > -math.inf else 0.0
            for below in self.subtree(node):
                raised = min(self.scores[below] + more, self.scores[self.parents[below]])
                self.scores[below] = score if below == node else raised

    def chain(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> int:
        """Add picked tokens, each below the one before, and return the first node.

        The first token must be new below `parent`, and the path scores must not increase.
        """
        first, siblings = len(self.tokens), self.siblings
        if siblings.setdefault(parent, Siblings.PICKED) is not Siblings.PICKED:
            raise ValueError(f"children of node {parent} are {siblings[parent].name}, not picked")
        above = range(first, first + len(tokens) - 1)
        siblings.update(dict.fromkeys(above, Siblings.PICKED))
        ids = range(self.next_id, self.next_id + len(tokens))
        self.append([parent, *above], tokens, scores, [Role.PRIMARY] * len(tokens), ids)
        return first

    def bound(self, more: Sequence[float] = ()) -> float:
        """Return the path score below which no node can be among the best `max_nodes`, now or later.

        `more` are the scores of candidates that are about to be added.
        """
        if self.max_nodes is None or len(self.tokens) + len(more) <= self.max_nodes:
            return -math.inf  # all nodes fit
        return sorted([*self.scores, *more], reverse=True)[self.max_nodes - 1]

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node, in the order in which they were added."""
        return self._children[node]

    def leaves(self) -> list[int]:
        """Return the nodes without children, except the root and probes."""
        roles = self.roles
        return [node for node, below in enumerate(self._children) if not below and node and roles[node] != Role.PROBE]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that carries `token`; probes are not considered."""
        for child in self._children[node]:
            if self.tokens[child] == token and self.roles[child] != Role.PROBE:
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

    def copy(self, nodes: Sequence[int]) -> TreeTwin:
        """Return a tree of these nodes only; the first becomes the root, and ancestors below it must be included."""
        root, rest = nodes[0], nodes[1:]
        tree = TreeTwin(self.tokens[root], self.ids[root], self.next_id)
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
        tree.next_id = self.next_id
        return tree

    def subtree(self, node: int) -> list[int]:
        """Return the node and all its descendants, parents first."""
        inside = {node}
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] in inside:
                inside.add(other)
        return sorted(inside)


def best_nodes(tree: TreeTwin, count: int) -> list[int]:
    """Return the `count` nodes with the best path scores, parents first."""
    if count >= len(tree) or all(parent == node - 1 for node, parent in enumerate(tree.parents)):
        return list(range(min(count, len(tree))))
    return sorted(sorted(range(len(tree)), key=tree.scores.__getitem__, reverse=True)[:count])


def chances(tree: TreeTwin, factors: Mapping[str, float], other: float) -> list[float]:
    """Return the chance of each node: at each step the predicted one times the factor of the node's source."""
    found = [1.0]
    for source, parent, score in zip(tree.sources[1:], tree.parents[1:], tree.scores[1:], strict=True):
        step = math.exp(score - tree.scores[parent]) * factors.get(source, other)
        found.append(found[parent] * min(step, 1.0))
    return found


def parent_chances(
    tree: TreeTwin, chances: Sequence[float], source: str, last_lookup_node: int, factor: float, with_root: bool
) -> list[float]:
    """Return the chances of leaves, and of looked-up nodes that the source has not expanded, less their children's."""
    found = [chances[leaf] for leaf in tree.leaves()]
    for node in range(last_lookup_node + 1):
        children = tree.children(node)
        if source not in {tree.sources[child] for child in children} and (children if node else with_root):
            found.append(factor * (chances[node] - sum(chances[child] for child in children)))
    return found


def follow(tree: TreeTwin, picks: Sequence[int]) -> tuple[list[int], int | None]:
    """Return the path along the picks, and the pick after its end; None if it ends on a node without one."""
    path = [0]
    while path[-1] < len(picks):
        child = tree.child(path[-1], picks[path[-1]])
        if child is None:
            return path, picks[path[-1]]
        path.append(child)
    return path, None


def log_chances(values: Sequence[float], temperature: float, coverage: float, width: int) -> list[float]:
    """Return the log probabilities of the best `width` proposals: coverage * softmax(values / temperature)."""
    logs = [(value - values[0]) / temperature for value in values]
    shift = math.log(coverage / sum(map(math.exp, logs)))
    return [value + shift for value in logs][:width]


def attach_offers(
    tree: TreeTwin,
    frontier: Sequence[int],
    offers: Sequence[tuple[list[int], list[float]]],
    fit: Sequence[float],
    width: int,
    most: int,
) -> None:
    """Add the best proposals below these nodes."""
    found: list[tuple[float, int, int]] = []
    for node, (tokens, values) in zip(frontier, offers, strict=True):
        for token, chance in zip(tokens, log_chances(values, fit[0], fit[1], width) if tokens else (), strict=False):
            tree.confirm(node, token, chance)
    for node, (tokens, values) in zip(frontier, offers, strict=True):
        for rank, chance in enumerate(log_chances(values, fit[0], fit[1], width) if tokens else ()):
            found.append((tree.scores[node] + chance, node, tokens[rank]))
    if len(frontier) > 1:
        found.sort(key=lambda child: child[0], reverse=True)
    tree.attach_children(found[:most], width)
