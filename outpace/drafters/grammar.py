"""Proposes the tokens that the answer's grammar forces: separators, names of fields, the frame of a tool call.

Like jump-forward decoding (L. Zheng et al., SGLang, arXiv:2312.07104), but verified like any other draft.

For requests with a constraint. The forced text is certain; how the model splits it into tokens is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from outpace.core.errors import UserError, check_whole
from outpace.core.tree import TokenTree, path_to
from outpace.core.types import Drafter, DraftState, Observation, Request, Source
from outpace.drafters._calibration import AcceptanceRate

_LEAST, _MOST = 0.01, 0.99  # bounds of a rate: no branch is certain


@dataclass(frozen=True)
class Options:
    """`forced`: most tokens proposed at one place; `leaves`: proposals start at the last token and at this many of the
    likeliest leaves of the other drafters' tree."""

    forced: int = 24
    leaves: int = 4

    def __post_init__(self) -> None:
        check_whole("forced", self.forced, 1, 256)
        check_whole("leaves", self.leaves, 0, 256)


@dataclass
class GrammarState(DraftState):
    """`asked`: ids of nodes that were extended or have no forced token. `proposed`: by node id, the forced token below
    it and whether it begins a forced text."""

    asked: set[int] = field(default_factory=set)
    proposed: dict[int, tuple[int, bool]] = field(default_factory=dict)


class GrammarDrafter(Drafter):
    """Proposes the forced text below the root and, when called again, below the leaves that other drafters have
    added."""

    name = "grammar"
    runs_model = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rates = {
            True: AcceptanceRate(0.8),
            False: AcceptanceRate(0.9),
        }  # by whether the token is the first of a forced text

    def sources_for(self, request: Request) -> Sequence[Source]:
        """Return no source for a request without a constraint."""
        return self.sources if request.constraint is not None else ()

    def open(self, request: Request) -> GrammarState:
        return GrammarState(request, list(request.prompt))

    def grow(self, states: Sequence[GrammarState], trees: Sequence[TokenTree]) -> list[int]:
        """Return the number of nodes added to each tree, 0 if nothing is forced."""
        return [
            self._grow(state, tree) if state.request.constraint is not None else 0
            for state, tree in zip(states, trees, strict=True)
        ]

    def observe(self, state: GrammarState, seen: Observation) -> None:
        for node, written in zip(seen.path, seen.tokens, strict=False):
            if node in state.proposed:
                token, is_first = state.proposed[node]
                self._rates[is_first].learn(token == written)
        state.tokens.extend(seen.tokens)
        alive = set(seen.tree.ids)
        state.asked &= alive
        state.proposed = {node: known for node, known in state.proposed.items() if node in alive}

    def close(self, state: GrammarState) -> None:
        state.proposed.clear()

    def state_dict(self) -> list[float]:
        """Return how often the first and the later forced tokens came true, for the profile."""
        return [rate.state_dict() for rate in self._rates.values()]

    def load_state_dict(self, kept: Sequence[float]) -> None:
        """Restore the rates from a profile."""
        for rate, value in zip(self._rates.values(), kept, strict=False):
            rate.load_state_dict(float(value))

    def _grow(self, state: GrammarState, tree: TokenTree) -> int:
        before = len(tree)
        for node in self._places(state, tree):
            state.asked.add(tree.ids[node])
            self._attach(state, tree, node, self._forced(state, tree, node))
        return len(tree) - before

    def _places(self, state: GrammarState, tree: TokenTree) -> list[int]:
        """Return the root and the likeliest leaves, unless they were extended before."""
        leaves = [node for node in tree.leaves() if tree.ids[node] not in state.asked]
        root = [0] if tree.ids[0] not in state.asked else []
        return [*root, *nlargest(self._options.leaves, leaves, key=tree.scores.__getitem__)]

    def _forced(self, state: GrammarState, tree: TokenTree, node: int) -> list[int]:
        assert state.request.constraint is not None
        path = [tree.tokens[above] for above in path_to(tree, node)[1:]]
        try:
            return state.request.constraint.forced(state.tokens, path)[: self._options.forced]
        except UserError:  # a failed constraint ends its request in the target pass
            return []

    def _attach(self, state: GrammarState, tree: TokenTree, node: int, tokens: Sequence[int]) -> None:
        """Attach the branch as far as it is new."""
        for place, token in enumerate(tokens):
            is_first = place == 0
            state.proposed.setdefault(tree.ids[node], (token, is_first))
            state.asked.add(tree.ids[node])
            child = tree.child(node, token)
            if child is None:
                chance = min(max(self._rates[is_first].value, _LEAST), _MOST)
                child = tree.add(node, token, tree.scores[node] + math.log(chance))
                assert child is not None
            node = child


def build(options: Options, **_: object) -> GrammarDrafter:
    """Build the drafter; it needs no model."""
    return GrammarDrafter(options)
