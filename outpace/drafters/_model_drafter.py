"""The base of drafters that run a draft model: one forward expands the most likely nodes of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.options import number, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request
from outpace.drafters._children import ChildAdder, ChildOptions, OfferState
from outpace.drafters._tree_expander import SPARE, ExpansionJob, TreeExpander, as_top_k_rows
from outpace.models.base import Model


@dataclass(frozen=True)
class ModelOptions(ChildOptions):
    """Options of drafters that run a draft model step by step."""

    width: int = whole(4, 1, 512, help="nodes that a forward expands in each tree, and children of each")
    floor: float = number(0.005, 0.0, 1.0, help="lowest estimated probability of a node that is expanded")
    draft_window: int | None = whole(
        None, 0, help="trailing tokens that a draft model reads at first; 0: all; the default is in its config.json"
    )


class BaseModelDrafter(Drafter):
    """Keeps a session of the draft model for each request, in step with what the target commits. A subclass sets
    `capabilities`."""

    expander_type = TreeExpander
    state_type = OfferState

    def __init__(self, model: Model, options: ModelOptions) -> None:
        window = model.draft_window if options.draft_window is None else options.draft_window
        count = options.width + SPARE
        self._expander = self.expander_type(
            model, options.width, options.tree_nodes, options.floor, window, proposed=count
        )
        self._children = ChildAdder(options.width, options.tree_nodes, options.draws, fills_tree=True)
        self.capabilities = self._expander.capabilities(self.capabilities, self._children.pick_models)

    def open(self, request: Request) -> OfferState:
        session, pick_model = self._expander.open(request), self._children.pick_models.for_request(request)
        return self.state_type(request, session=session, pick_model=pick_model)

    def grow(self, states: Sequence[OfferState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the draft model over the frontiers of all trees, and another one where another drafter's
        branch had all its nodes already."""
        if jobs := self._expander.jobs(states, trees):
            self._expand(jobs)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward over the frontiers and add the children that it proposes."""
        held = self._expander.score(jobs)
        offers = as_top_k_rows(held.best)
        if offers.is_complete:  # the model found every row's best tokens itself
            self._children.attach(jobs, offers)
        else:
            self._children.add(jobs, held)

    def observe(self, state: OfferState, seen: Observation) -> None:
        self._children.learn(state, seen)
        self._expander.follow(state, seen)
        state.offers.keep(state.slots)

    def likelihood(self, state: OfferState, tokens: Sequence[int]) -> list[float] | None:
        """Return log q of these tokens as a continuation of the text, by one forward; see `TreeExpander.likelihood`."""
        return self._expander.likelihood(state, tokens)

    def pause(self, state: OfferState) -> None:
        self._expander.pause(state)
