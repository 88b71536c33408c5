"""The base of drafters that run a draft model: one forward expands the most likely nodes of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace_kernels import OfferMap, TopKRows, attach_offers

from outpace.core.logits import SparseLogits
from outpace.core.options import MethodOptions, number, parsed, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request, Row, TopK
from outpace.drafters._calibration import PickModel, PickModels
from outpace.drafters._multi_step import MultiStepCache, MultiStepExpander
from outpace.drafters._sampled import DrawCounts, draw_layer, is_drawn
from outpace.drafters._tree_expander import SPARE, ExpansionJob, ExpansionState, TreeExpander, as_top_k_rows, rows_of
from outpace.models.base import Model
from outpace.rules.base import top_k_rows

PRODUCT_OF_Q = PickModel(has_shares=True)  # its parameters leave log q unchanged; it never learns
PRODUCT_OF_Q.restore(1.0, 1.0, 1.0, 1.0, 1.0)
_CHILDREN = 2  # children per expanded node that a forward may always add


@dataclass(frozen=True)
class ModelOptions(MethodOptions):
    """`width`: number of nodes that a forward expands in each request, and of children that each of them gets;
    `tree_nodes`: maximum size of the tree; `floor`: lowest estimated probability of a node that is expanded;
    `draft_window`: number of trailing tokens that the draft model reads when drafting begins (0: all; default: the one
    in its config.json); `draws`: number of children drawn below a node at depth 0, 1, ..., for rules that verify
    several drawn children."""

    width: int = whole(4, 1, 512)
    tree_nodes: int = whole(256, 2, 1 << 20)
    floor: float = number(0.005, 0.0, 1.0)
    draft_window: int | None = whole(None, 0)
    draws: str = parsed("2,1", DrawCounts.read)


@dataclass
class ModelState(ExpansionState):
    """A request's state. `offers`: the proposals below a tree node, by node id. `pick_model`: the fitted `PickModel` of
    requests with the same kind of sampling."""

    offers: OfferMap = field(default_factory=OfferMap)
    multi_step: MultiStepCache = field(default_factory=MultiStepCache)
    pick_model: PickModel = field(default_factory=PickModel)
    is_drawn: bool = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_drawn = is_drawn(self.request)


class BaseModelDrafter(Drafter):
    """Keeps a session of the draft model for each request, in step with what the target commits. A subclass sets
    `capabilities`."""

    expander_type = TreeExpander
    state_type = ModelState

    def __init__(self, model: Model, options: ModelOptions, steps: int | None = 1) -> None:
        """`steps`: draft steps in one graph; see `MultiStepExpander`."""
        self._options = options
        window = model.draft_window if options.draft_window is None else options.draft_window
        count = options.width + SPARE
        self._expander = self.expander_type(
            model, options.width, options.tree_nodes, options.floor, window, proposed=count
        )
        self._draws = DrawCounts.read(options.draws)
        self._pick_models = PickModels()
        self._multi_step = MultiStepExpander(model, self._pick_models, options, steps)
        capture = self._multi_step.capture
        self.capabilities = self._expander.capabilities(self.capabilities, self._pick_models, capture=capture)

    def open(self, request: Request) -> ModelState:
        session, pick_model = self._expander.open(request), self._pick_models.of(request)
        return self.state_type(request, session=session, pick_model=pick_model)

    def grow(self, states: Sequence[ModelState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the draft model over the frontiers of all trees, and another one where another drafter's
        branch had all its nodes already."""
        self._multi_step.num_steps = 1
        self._expander.grow(states, trees, self._expand)
        for state in states:
            state.num_steps = self._multi_step.num_steps

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward over the frontiers, or use forwards taken in advance."""
        takes_several = self._multi_step.takes_several
        known = self._multi_step.known(jobs) if takes_several else None
        if known is None:
            held = self._expander.score(jobs)
            known = self._multi_step.steps(jobs, held) if takes_several else None
        if known is not None:
            self._add(jobs, TopKRows([row for mine in known for row in mine]))
            return
        offers = as_top_k_rows(held.best)
        if offers.is_complete:  # the model found every row's best tokens itself
            self._add(jobs, offers)
            return
        rows = rows_of(jobs)
        offers = self._offers(held, rows)
        if not any(job.state.is_drawn for job in jobs):
            self._add(jobs, offers)
            return
        first = 0
        for job in jobs:
            mine = slice(first, first + len(job.frontier))
            first = mine.stop
            if job.state.is_drawn:
                draw_layer(job.tree, job.frontier, held.part(mine), rows[mine], self._draws)
            else:
                self._add([job], offers[mine])

    def _offers(self, held: SparseLogits, rows: Sequence[Row]) -> TopKRows:
        """Return the proposals below each row's node; none for rules that draw children."""
        count = self._options.width + SPARE
        for row in rows:
            if is_drawn(row.request):
                break
        else:
            return as_top_k_rows(top_k_rows(held, rows, count))
        offers: list[TopK] = [([], []) for _ in rows]
        for n, row in enumerate(rows):
            if not is_drawn(row.request):
                offers[n] = top_k_rows(held.part(slice(n, n + 1)), [row], count)[0]
        return TopKRows(offers)

    def observe(self, state: ModelState, seen: Observation) -> None:
        if not state.is_drawn:
            state.pick_model.learn_written(state.offers, seen.node_ids, seen.tokens)
        if self._multi_step.takes_several:
            self._expander.follow(state, seen, self._multi_step.follow(state, seen))
            state.multi_step.settle(state.slots, state.session.pending)
        else:
            self._expander.follow(state, seen)
        state.offers.keep(state.slots)

    def likelihood(self, state: ModelState, tokens: Sequence[int]) -> list[float] | None:
        """Return log q of these tokens as a continuation of the text, by one forward; see `TreeExpander.likelihood`."""
        return self._expander.likelihood(state, tokens)

    def pause(self, state: ModelState) -> None:
        state.multi_step = MultiStepCache()
        self._expander.pause(state)

    def _add(self, jobs: Sequence[ExpansionJob], offers: TopKRows) -> None:
        """Add the best children below each frontier: the best `width` of them all are primary (CARD's cache C), the
        others secondary (B). The best child of each node is added whatever its probability, so that the node does not
        look unexpanded."""
        widths, most, picks = [], [], []
        for state, tree, _ in jobs:
            directives, width = state.directives, self._options.width
            if directives.width:
                width = min(directives.width, width)
            room = self._options.tree_nodes - len(tree)
            widths.append(width)
            most.append(min(room, max(_CHILDREN * width, int(room * directives.share))))
            picks.append(PRODUCT_OF_Q if directives.in_layers else state.pick_model)
        states, trees, frontiers = zip(*jobs, strict=True)
        attach_offers(trees, frontiers, offers, [state.offers for state in states], picks, widths, most)
