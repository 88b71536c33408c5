"""A DFlash, DSpark, JetSpec or Medusa head drafts a block of tokens in one forward, from the target's hidden states.

DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147; JetSpec, arXiv:2606.18394; Medusa, arXiv:2401.10774.

A block consists of the last written token and mask tokens. They attend to each other and to keys and values computed
from the target's hidden states; the block's own keys and values are dropped after the forward. A DFlash head predicts
each position independently of the drafted tokens before it, so the tree consists of the paths with the largest products
of probabilities; a DSpark head adds a bias that depends on the preceding token. Medusa has an output layer for each
position instead, on the last hidden state. Nothing is drafted if hidden states of the text are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, DraftSource, Observation
from outpace.drafters._feature_drafter import BlockExpander, HeadDrafter, HeadState, given_head
from outpace.drafters._model_drafter import HeadOptions
from outpace.drafters._tree_expander import CHUNK, ExpansionJob, tokens_below_root

Options = HeadOptions


class BlockDrafter(HeadDrafter):
    """Keeps keys and values of the target's hidden states for each request."""

    capabilities = Capabilities(
        (
            DraftSource("block", runs_model=True, reads=0, by_length=True),
        ),  # reads nothing itself: the passes deliver it
        Needs(prompt=True),  # each instance adds the layers whose hidden states its head reads
        cost="a forward of the head over a block for all levels of the tree together",
    )

    def __init__(self, head: Any, options: Options) -> None:
        super().__init__(head, BlockExpander(head, head.spec.block, options.tree_nodes), options)

    def observe(self, state: HeadState, seen: Observation) -> None:
        if seen.tokens:
            self._children.learn(state, seen)
            state.tokens += seen.tokens
            self._forget(state)
        self._add_features(state, seen)
        if state.session.num_features > CHUNK:
            self._head.read_features([state.session])

    def pause(self, state: HeadState) -> None:
        """Forget the tree. Keep the text, because its hidden states are not delivered a second time."""
        self._forget(state)

    def close(self, state: HeadState) -> None:
        """Store keys and values of the text whose hidden states are known, for requests that share this prefix."""
        self._head.read_features([state.session])
        state.session.trim()

    def _forget(self, state: HeadState) -> None:
        state.slots.clear()
        state.offers.keep(state.slots)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward and add all levels."""
        for state, tree, _ in jobs:
            state.slots[tree.ids[0]] = 0
        draft = self._head.draft([job.state.session for job in jobs], [job.tree.tokens[0] for job in jobs])
        numbers = {id(job.tree): number for number, job in enumerate(jobs)}

        def logits_of(number: int, depth: int, nodes: Sequence[int]) -> SparseLogits:
            return draft.layer(number, depth, [_path(jobs[number].tree, node) for node in nodes])

        def log_confidence(job: ExpansionJob, node: int) -> float | None:
            return draft.log_confidence(numbers[id(job.tree)], _path(job.tree, node))

        add = self._children.add_best_first if self._head.is_best_first else self._children.add_levels
        add(jobs, self._head.spec.num_drafted, logits_of, log_confidence)


def _path(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Return the tokens from the root down to a node."""
    return (tree.tokens[0], *tokens_below_root(tree, node))


def build(options: Options, *, given: BuildContext) -> BlockDrafter:
    """Build the drafter; raise UserError if the draft is not such a head."""
    head = given_head(given, options, "block", "a DFlash, DSpark or Medusa head for the target")
    return BlockDrafter(head, options)
