"""An EAGLE-3 head grows a token tree: one decoder layer that reads the target's hidden states.

EAGLE-3, arXiv:2503.01840; trees by the product of probabilities as in EAGLE-2, arXiv:2406.16858.

Between rounds the head's session holds only slots whose features come from the target: the root's slot stays, and the
accepted tokens are read again, with the target's hidden states, in the next forward. If features of the text are
missing, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outpace_kernels import attach_offers

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, number, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, Observation, Request, Source
from outpace.drafters._calibration import PickModels
from outpace.drafters._feature_expander import EagleState, FeatureExpander
from outpace.drafters._sampled import DrawCounts, draw_layer, is_drawn
from outpace.drafters._tree_expander import CHUNK, SPARE, ExpansionJob, as_top_k_rows, rows_of
from outpace.models.heads.eagle3 import EagleModel
from outpace.rules.base import top_k_rows


@dataclass(frozen=True)
class Options(MethodOptions):
    """`width`: nodes of a request in each forward, and children of each; `tree_nodes`: maximum size of the tree;
    `floor`: nodes that the target reaches with a lower probability are not expanded; `draws`: children drawn below a
    node of depth 0, 1, ..., for rules that judge several drawn children; `head_window`: number of trailing tokens that
    the head sees; 0: as the file says, usually all. Heads that were trained on short texts have a low acceptance rate
    in long ones; a window may raise it."""

    width: int = whole(4, 1, 512)
    tree_nodes: int = whole(256, 2, 1 << 20)
    floor: float = number(0.005, 0.0, 1.0)
    draws: str = "2,1"
    head_window: int = whole(0, 0, 1 << 30)

    def __post_init__(self) -> None:
        DrawCounts.read(self.draws)
        super().__post_init__()


class EagleDrafter(Drafter):
    """Keeps a session of the head for each request, one token behind the target's."""

    capabilities = Capabilities(
        (Source("eagle", runs_model=True, reads=0, by_length=True),),  # its inputs come with the target's passes
        Needs(prompt=True),  # each instance adds the layers
        q_at_leaves=True,
        cost="a forward of one layer and the head's output layer for each layer of the tree",
    )

    def __init__(self, head: EagleModel, options: Options) -> None:
        self._head, self._options = head, options
        self._draws, self._pick_models = DrawCounts.read(options.draws), PickModels()
        self._expander = FeatureExpander(head, options.width, options.tree_nodes, options.floor)
        needs = Needs(layers=head.head.taps, prompt=True)
        found = self._expander.capabilities(self.capabilities, self._pick_models, needs=needs)
        self.capabilities = replace(found, sources=(found.sources[0]._replace(reads=0),))

    def open(self, request: Request) -> EagleState:
        return EagleState(request, session=self._expander.open(request), start=1)  # no slot for the first token

    def grow(self, states: Sequence[EagleState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the head over the frontiers of all trees."""
        self._expander.grow(states, trees, self._expand)

    def observe(self, state: EagleState, seen: Observation) -> None:
        if seen.tokens:
            if not is_drawn(state.request):
                self._pick_models.of(state.request).learn_written(state.offers, seen.node_ids, seen.tokens)
            self._expander.follow(state, seen)
            state.offers.keep(state.slots)
        if seen.seen is not None and seen.seen.hidden is not None:
            hidden = seen.seen.hidden  # [taps, nodes, width]
            if seen.tokens:
                rows = {node: row for row, node in enumerate(seen.seen.ids)}
                hidden = hidden[:, [rows[node] for node in seen.node_ids]]
            state.session.add_features(self._head.fuse(hidden))
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

    def _expand(self, jobs: Sequence[ExpansionJob]) -> list[int]:
        """Run one forward over the frontiers; return the number of nodes added to each tree."""
        held, rows, added, first = self._expander.score(jobs), rows_of(jobs), [], 0
        for state, tree, frontier in jobs:
            mine = slice(first, first + len(frontier))
            first = mine.stop
            if is_drawn(state.request):
                added.append(draw_layer(tree, frontier, held.part(mine), rows[mine], self._draws))
                continue
            offers = as_top_k_rows(top_k_rows(held.part(mine), rows[mine], self._options.width + SPARE))
            width = min(state.directives.width or self._options.width, self._options.width)
            picks, most = self._pick_models.of(state.request), min(self._options.tree_nodes - len(tree), 2 * width)
            added += attach_offers([tree], [frontier], offers, [state.offers], [picks], [width], [most])
        return added


def build(options: Options, *, given: BuildContext) -> EagleDrafter:
    """Build the drafter; UserError without a head."""
    if not isinstance(given.draft, EagleModel):
        raise UserError(
            "drafter eagle needs an EAGLE-3 head for the target: name its folder with --draft (or draft=...)"
        )
    if options.head_window:
        given.draft.limit_window(options.head_window)
    return EagleDrafter(given.draft, options)
