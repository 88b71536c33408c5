"""Proposes the tokens that the answer's grammar forces: separators, names of fields, the frame of a tool call.

Like jump-forward decoding (L. Zheng et al., SGLang, arXiv:2312.07104), but verified like any other draft.

For requests with a constraint. The forced text is certain; how the model splits it into tokens is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest

from outpace.core.errors import UserError
from outpace.core.options import MethodOptions
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import LookupDrafter, LookupState, kind_of, lookup

_FORCED = 24  # tokens proposed at one place
_LEAVES = 4  # proposals start at the last token and at this number of the likeliest leaves of the other drafters' tree
_FIRST, _LATER = kind_of(5), kind_of(13)  # of a forced text's tokens; their rates begin at 0.8 and 0.9

Options = MethodOptions


@dataclass
class GrammarState(LookupState):
    """`asked`: ids of nodes that were extended or have no forced token."""

    asked: set[int] = field(default_factory=set)


class GrammarDrafter(LookupDrafter[GrammarState]):
    """Proposes the forced text below the root and, when called again, below the leaves that other drafters have
    added."""

    capabilities = lookup("grammar")

    def open(self, request: Request) -> GrammarState:
        return GrammarState(request, sources=None if request.constraint is not None else ())

    def propose(self, state: GrammarState, tree: TokenTree) -> None:
        """Attach the forced text below the root and the likeliest leaves, unless they were extended before."""
        if state.request.constraint is None:
            return
        root = [0] if tree.ids[0] not in state.asked else []
        leaves = [node for node in tree.leaves() if tree.ids[node] not in state.asked]
        for node in [*root, *nlargest(_LEAVES, leaves, key=tree.scores.__getitem__)]:
            state.asked.add(tree.ids[node])
            kind = _FIRST
            for token in self._forced(state, tree, node):
                state.asked.add(tree.ids[node])
                node, kind = self.attach(state, tree, node, token, kind), _LATER

    def observe(self, state: GrammarState, seen: Observation) -> None:
        super().observe(state, seen)
        state.asked &= set(seen.tree.ids)

    def _forced(self, state: GrammarState, tree: TokenTree, node: int) -> list[int]:
        assert state.request.constraint is not None
        path = [tree.tokens[above] for above in tree.path(node)[1:]]
        limit = max(min(_FORCED, tree.max_depth - len(path)), 0)
        try:
            return state.request.constraint.forced(state.tokens, path)[:limit]
        except UserError:  # a failed constraint ends its request in the target pass
            return []
