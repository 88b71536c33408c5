"""Expand token trees with a trained head, whose slots read features of the target or of their parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Observation
from outpace.drafters._children import ChildAdder, HeadOptions, OfferState
from outpace.drafters._tree_expander import CHUNK, ExpansionState, TreeExpander
from outpace.models.base import chain
from outpace.models.heads.eagle3 import HeadModel

H = TypeVar("H", bound=HeadModel)


class EagleState(OfferState):
    """A request's state, whose session is one token behind the target's."""

    @property
    def held_prefix(self) -> int:
        return self.session.length


def head_capabilities(
    declared: Capabilities, head: HeadModel, expander: TreeExpander, children: ChildAdder
) -> Capabilities:
    """Return the capabilities of a drafter with a head: it needs the hidden states of the layers that the head reads,
    and reads no text, because the target's passes deliver them."""
    needs = Needs(layers=head.head.taps, prompt=True)
    found = expander.capabilities(declared, children.pick_models, needs=needs)
    return replace(found, sources=(found.sources[0]._replace(reads=0),))


def given_head(given: BuildContext, options: HeadOptions, head_type: type[H], drafter: str, heads: str) -> H:
    """Return the draft, with the window of the options. UserError, which names the drafter's `heads`, unless it is a
    head of this type."""
    if not isinstance(given.draft, head_type):
        raise UserError(f"drafter {drafter} needs {heads}: name it with --draft (or draft=...)")
    if options.head_window:
        given.draft.limit_window(options.head_window)
    return given.draft


def add_features(head: HeadModel, state: ExpansionState, seen: Observation) -> bool:
    """Queue the features of the prompt's or the accepted tokens' hidden states; return whether there were any."""
    if seen.seen is None or seen.seen.hidden is None:
        return False
    hidden = seen.seen.hidden  # [taps, nodes, width]
    if seen.tokens:
        rows = {node: row for row, node in enumerate(seen.seen.ids)}
        state.session.add_hidden(
            hidden[:, [rows[node] for node in seen.node_ids]], head.fuse
        )  # indexing copies the rows
    else:
        state.session.add_features(head.fuse(hidden))
    return True


class HeadExpander(TreeExpander):
    """Expands with a head, for which the target's passes deliver the text."""

    def _read_long_texts(self, states: Sequence[ExpansionState]) -> set[int]:
        """Return no request: texts are read as their hidden states arrive."""
        return set()


class FeatureExpander(HeadExpander):
    """Expands only nodes whose parents were scored in an earlier forward, because a slot reads its parent's output."""

    def _frontiers(self, open_trees: Sequence[tuple[Any, TokenTree]]) -> list[list[int]]:
        found = super()._frontiers(open_trees)
        return [_ready(*pair, nodes) for pair, nodes in zip(open_trees, found, strict=True)]

    def follow(self, state: Any, seen: Observation, extra: Sequence[int] = ()) -> None:
        """Commit the root's slot and drop the others, whose features are the head's own outputs."""
        state.tokens += seen.tokens
        path, _ = state.slots.follow(seen.node_ids, seen.tree)
        state.slots.clear()
        state.session.keep(path[:1])

    def read_features(self, state: EagleState, most: int) -> None:
        """Read committed tokens whose features are known, until at most `most` features are stored."""
        session = state.session
        while session.num_features > most and (count := min(session.num_features, state.missing, CHUNK)) > 0:
            first = state.start + session.length
            self.model.score_held([chain(session, self.clamp_ids(state.tokens[first : first + count]))])
            session.keep(range(count))

    def pause(self, state: Any) -> None:
        """Drop the tree except its root. The text stays, because its hidden states are not given a second time."""
        state.slots.clear()
        state.session.keep([0] if state.session.pending else ())  # 0: the root


def _ready(state: EagleState, tree: TokenTree, nodes: list[int]) -> list[int]:
    """Return the nodes whose parents were scored; none if the root is the first token or features are missing."""
    wanted, chosen = 0 if state.session.pending else state.missing + 1, set(nodes)
    has_features = state.missing >= 0 and state.session.num_features == wanted
    ready = [node for node in nodes if has_features and (not node or tree.parents[node] not in chosen)]
    if len(ready) < len(nodes):
        state.slots.reset()
    return ready


class BlockState(OfferState):
    """A request's state; its session stores the text as far as the target's hidden states are known."""

    @property
    def held_prefix(self) -> int:
        return self.session.length


class BlockExpander(HeadExpander):
    """Expands the root of each tree, once in a round, if the hidden states of the whole text before it are known."""

    def _frontiers(self, open_trees: Sequence[tuple[Any, TokenTree]]) -> list[list[int]]:
        return [[0] if self._is_ready(state, tree) else [] for state, tree in open_trees]

    def _is_ready(self, state: BlockState, tree: TokenTree) -> bool:
        is_new = tree.ids[0] not in state.slots and state.deepest(tree) >= 0
        return is_new and state.missing == state.session.num_features
