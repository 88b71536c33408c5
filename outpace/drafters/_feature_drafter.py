"""What drafters with an EAGLE-3 or P-EAGLE head share: sessions that follow the text and its hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request
from outpace.drafters._children import ChildAdder
from outpace.drafters._feature_expander import EagleState, FeatureExpander, add_features, head_capabilities
from outpace.drafters._tree_expander import CHUNK, ExpansionJob
from outpace.models.heads.eagle3 import EagleModel


class FeatureDrafter(Drafter):
    """Keeps a session of the head for each request, one token behind the target's."""

    def __init__(self, head: EagleModel, expander: FeatureExpander, children: ChildAdder) -> None:
        self._head, self._expander, self._children = head, expander, children
        self.capabilities = head_capabilities(self.capabilities, head, expander, children)

    def open(self, request: Request) -> EagleState:
        return EagleState(request, session=self._expander.open(request), start=1)  # no slot for the first token

    def grow(self, states: Sequence[EagleState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the head over the frontiers of all trees."""
        self._expander.grow(states, trees, self._expand)

    def observe(self, state: EagleState, seen: Observation) -> None:
        if seen.tokens:
            self._children.learn(state, seen)
            self._expander.follow(state, seen)
            state.offers.keep(state.slots)
        if add_features(self._head, state, seen):
            self._expander.read_features(state, CHUNK if seen.tokens else 0)

    def copy_prefix(self, state: EagleState, other: EagleState, length: int) -> None:
        state.session.start_from(other.session, length)

    def pause(self, state: EagleState) -> None:
        self._expander.pause(state)

    def close(self, state: EagleState) -> None:
        """Read the rest of the text as far as its features are known, for requests with this prefix."""
        self._expander.pause(state)
        self._expander.read_features(state, 0)
        state.session.trim()

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward and add nodes."""
        raise NotImplementedError
