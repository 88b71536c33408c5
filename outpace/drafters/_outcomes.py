"""Where a drafter beside the target works that drafts for what the verification under way may come to.

Speculative speculative decoding, arXiv:2603.03251. There a geometric fan-out says for how many tokens after each
position of the chain under verification a chain of its own is drafted; it follows from a chance of acceptance that is
the same everywhere. Here the outcomes with the best path scores are taken: those are the estimated chances themselves.
"""

from __future__ import annotations

from collections.abc import Container

from outpace.core.tree import Role, TokenTree


def for_outcomes(tree: TokenTree, expanded: Container[int], length: int, count: int) -> list[int]:
    """The nodes that a forward expands, `count` at most: the tips of unfinished chains of `length` tokens, below the
    root and below the likeliest outcomes of that chain's verification. `expanded` are ids; what another drafter planted
    above a tip is expanded with it."""
    chain = _chain(tree, 0, length)
    on_chain = set(chain)
    others = [
        child
        for node in chain
        for child in tree.children(node)
        if child not in on_chain and tree.roles[child] is not Role.PROBE
    ]
    others.sort(key=lambda node: (-tree.scores[node], node))
    tips = [chain[-1]]  # its last token is expanded too: what the target writes after it is an outcome
    for outcome in others[:count]:
        branch = _chain(tree, outcome, length)
        if len(branch) <= length:
            tips.append(branch[-1])
    chosen: dict[int, None] = {}
    for tip in tips:
        above = [node for node in tree.ancestry(tip) if tree.ids[node] not in expanded]
        chosen |= dict.fromkeys(above[::-1]) if tree.ids[tip] not in expanded else {}
    return sorted(list(chosen)[:count])


def _chain(tree: TokenTree, node: int, length: int) -> list[int]:
    """The node, and `length` below it at most, each the likeliest child."""
    chain = [node]
    while len(chain) <= length:
        children = [child for child in tree.children(chain[-1]) if tree.roles[child] is not Role.PROBE]
        if not children:
            break
        chain.append(max(children, key=lambda child: (tree.scores[child], -child)))
    return chain
