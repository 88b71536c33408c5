"""What drafters share that read the target's hidden states, or draft several tokens in one forward by mask tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request
from outpace.drafters._model_drafter import ChildAdder, ChildOptions, HeadOptions, OfferState
from outpace.drafters._tree_expander import CHUNK, ExpansionJob, ExpansionState, TreeExpander
from outpace.models.base import Model, chain
from outpace.models.heads.head import Head


class HeadState(OfferState):
    """A request's state; its session stores the text as far as the target's hidden states are known."""

    @property
    def held_prefix(self) -> int:
        return self.session.length


def given_head(given: BuildContext, options: HeadOptions, drafter: str, heads: str) -> Any:
    """Return the draft, with the window of the options. UserError, which names the drafter's `heads`, unless it is a
    head for this drafter."""
    if not isinstance(given.draft, Head) or given.draft.drafter != drafter:
        raise UserError(f"drafter {drafter} needs {heads}: name it with --draft (or draft=...)")
    if options.head_window:
        given.draft.limit_window(options.head_window)
    return given.draft


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

    def read_features(self, state: HeadState, max_features: int) -> None:
        """Read committed tokens whose features are known, until at most `max_features` features are stored."""
        session = state.session
        while session.num_features > max_features and (count := min(session.num_features, state.missing, CHUNK)) > 0:
            first = state.start + session.length
            self.model.score_sparse([chain(session, self.clamp_ids(state.tokens[first : first + count]))])
            session.keep(range(count))

    def pause(self, state: Any) -> None:
        """Drop the tree except its root. The text stays, because its hidden states are not given a second time."""
        state.slots.clear()
        state.session.keep([0] if state.session.pending else ())  # 0: the root


def _ready(state: HeadState, tree: TokenTree, nodes: list[int]) -> list[int]:
    """Return the nodes whose parents were scored; none if the root is the first token or features are missing."""
    wanted, chosen = 0 if state.session.pending else state.missing + 1, set(nodes)
    has_features = state.missing >= 0 and state.session.num_features == wanted
    ready = [node for node in nodes if has_features and (not node or tree.parents[node] not in chosen)]
    if len(ready) < len(nodes):
        state.slots.reset()
    return ready


class BlockExpander(HeadExpander):
    """Expands the root of each tree, once in a round, if the hidden states of the whole text before it are known."""

    def _frontiers(self, open_trees: Sequence[tuple[Any, TokenTree]]) -> list[list[int]]:
        return [[0] if self._is_ready(state, tree) else [] for state, tree in open_trees]

    def _is_ready(self, state: HeadState, tree: TokenTree) -> bool:
        is_new = tree.ids[0] not in state.slots and state.deepest(tree) >= 0
        return is_new and state.missing == state.session.num_features


class MaskExpander(TreeExpander):
    """Scores the root of each tree and `block` - 1 mask tokens after it."""

    def __init__(self, model: Model, mask: int, block: int, tree_nodes: int) -> None:
        super().__init__(model, block, tree_nodes, window=model.draft_window)
        self._mask, self._block = mask, block

    def _frontiers(self, open_trees: Sequence[tuple[Any, TokenTree]]) -> list[list[int]]:
        """Return the root of each tree that was not expanded in this round."""
        return [[] if tree.ids[0] in state.slots or state.deepest(tree) < 0 else [0] for state, tree in open_trees]

    def score(self, jobs: Sequence[ExpansionJob]) -> SparseLogits:
        """Run one forward and return `block` rows of logits per job: of the root and of the masks after it."""
        self._catch_up([job.state for job in jobs])
        parts, roots = [], []
        for job in jobs:
            part = self._part(*job)
            root = len(part.tokens) - 1
            masks = [self._mask] * (self._block - 1)
            parents = [*part.parents, *range(root, root + len(masks))]
            rows = range(root, root + self._block)
            parts.append(part._replace(tokens=[*part.tokens, *masks], parents=parents, logit_rows=rows, best=0))
            roots.append(root)
            self._prepare(job.state)
        held = self.model.score_sparse(parts)
        for job, root in zip(jobs, roots, strict=True):
            job.state.session.keep(range(root), (root,))
        return held

    def _prepare(self, state: ExpansionState) -> None:
        """Prepare a session for the masks of a forward."""


class RootExpander(FeatureExpander, MaskExpander):
    """Scores the root of each tree with a head."""


class FeatureMaskExpander(RootExpander):
    """Scores the root and mask slots with a head; the mask slots read a feature of their own."""

    model: Any

    def _prepare(self, state: Any) -> None:
        state.session.add_features(self.model.mask_features(self._block - 1))


class HeadDrafter(Drafter):
    """Keeps a session of the head for each request, which reads the hidden states that the target's passes deliver."""

    first_position = 0  # of a session

    def __init__(self, head: Any, expander: TreeExpander, options: ChildOptions) -> None:
        """The drafter needs the hidden states of the layers that the head reads, and reads no text itself."""
        self._head: Any = head
        self._expander: Any = expander
        self._children = ChildAdder(options.width, options.tree_nodes, options.draws)
        needs = Needs(layers=head.spec.taps, prompt=True)
        found = expander.capabilities(self.capabilities, self._children.pick_models, needs=needs)
        self.capabilities = replace(found, sources=(found.sources[0]._replace(reads=0),))

    def open(self, request: Request) -> HeadState:
        session, pick_model = self._expander.open(request), self._children.pick_models.for_request(request)
        return HeadState(request, session=session, start=self.first_position, pick_model=pick_model)

    def grow(self, states: Sequence[HeadState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the head over the frontiers of all trees."""
        if jobs := self._expander.jobs(states, trees):
            self._expand(jobs)

    def copy_prefix(self, state: HeadState, other: HeadState, length: int) -> None:
        state.session.start_from(other.session, length)

    def _add_features(self, state: HeadState, seen: Observation) -> bool:
        """Queue the features of the prompt's or the accepted tokens' hidden states; return whether there were any."""
        if seen.seen is None or seen.seen.hidden is None:
            return False
        hidden = seen.seen.hidden  # [taps, nodes, width]
        if seen.tokens:
            rows = {node: row for row, node in enumerate(seen.seen.ids)}
            copied = hidden[:, [rows[node] for node in seen.node_ids]]  # indexing copies the rows
            state.session.add_hidden(copied, self._head.fuse)
        else:
            state.session.add_features(self._head.fuse(hidden))
        return True

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward and add nodes."""
        raise NotImplementedError


class FeatureDrafter(HeadDrafter):
    """Keeps a session one token behind the target's: of an EAGLE, P-EAGLE or SpecFormer head, or an MTP layer."""

    first_position = 1  # no slot for the first token
    _block = 0  # rows of logits that a forward gives for each job; 0: one for each node

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        if self._block:
            self._children.add_block(jobs, self._expander.score(jobs), self._block)
        else:
            self._children.add(jobs, self._expander.score(jobs))

    def observe(self, state: HeadState, seen: Observation) -> None:
        if seen.tokens:
            self._children.learn(state, seen)
            self._expander.follow(state, seen)
            state.offers.keep(state.slots)
        if self._add_features(state, seen):
            self._expander.read_features(state, CHUNK if seen.tokens else 0)

    def pause(self, state: HeadState) -> None:
        self._expander.pause(state)

    def close(self, state: HeadState) -> None:
        """Read the rest of the text as far as its features are known, for requests with this prefix."""
        self._expander.pause(state)
        self._expander.read_features(state, 0)
        state.session.trim()
