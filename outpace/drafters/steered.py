"""A draft model grows a token tree; the target's hidden states at the last verified position bias its MLPs.

SD2, Steering Pretrained Drafters during Speculative Decoding, arXiv:2511.09844.

All nodes below a root are steered by the features of the position before the root. Nodes that were expanded keep
their steering; committed tokens that are read later are steered by the features of the position before each. Without
such features, as at the beginning of a text from the prefix cache, tokens are not steered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.types import Capabilities, DraftSource, Observation
from outpace.drafters._model_drafter import BaseModelDrafter, ModelOptions, OfferState
from outpace.drafters._tree_expander import CHUNK, TreeExpander
from outpace.models.base import Model, Part
from outpace.models.heads.head import stack_rows

Options = ModelOptions


@dataclass
class SteeredState(OfferState):
    """A request's state. By position: `features` [width] of the last positions with known hidden states, and `biases`
    [layers, MLP width] of the position before the root."""

    features: dict[int, Any] = field(default_factory=dict)
    biases: dict[int, Any] = field(default_factory=dict)

    @property
    def held_prefix(self) -> int:
        """Length of the text: missing features do not prevent drafting."""
        return len(self.tokens)


class SteeredExpander(TreeExpander):
    """Adds biases to the draft model's MLPs. Features are kept for as many positions as a session may have to read
    again."""

    model: Any

    @property
    def num_kept(self) -> int:
        return (self.window or CHUNK) + 1

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        features = 2 * self.num_kept * self.model.steering.width * 4
        return super().stored_bytes(lengths) + features * len(lengths)

    def add_features(self, state: SteeredState, hidden: Any, start: int) -> None:
        """Keep the features of hidden states, [taps, positions, width], of the positions from `start` on."""
        skipped = max(hidden.shape[1] - self.num_kept, 0)
        state.features |= enumerate(self.model.steering.features(hidden[:, skipped:]), start + skipped)
        if len(state.features) > 2 * self.num_kept:
            state.features = {place: state.features[place] for place in sorted(state.features)[-self.num_kept :]}

    def _score(self, states: Sequence[Any], parts: Sequence[Part]) -> SparseLogits:
        """Run one forward, after computing the biases of all parts together."""
        sources = [self._sources(*both) for both in zip(states, parts, strict=True)]
        new = [
            (state, source)
            for state, mine in zip(states, sources, strict=True)
            for source in dict.fromkeys(mine)
            if source in state.features and source not in state.biases
        ]
        if new:
            found = self.model.steering.biases(stack_rows([state.features[source] for state, source in new]))
            for (state, source), bias in zip(new, found, strict=True):
                state.biases[source] = bias
        steered = []
        for state, part, mine in zip(states, parts, sources, strict=True):
            steered.append(part._replace(mlp_bias=_bias_of([state.biases.get(source) for source in mine])))
            root = len(state.tokens) - 1
            state.biases = {source: bias for source, bias in state.biases.items() if source == root - 1}
        return super()._score(states, steered)

    def _sources(self, state: SteeredState, part: Part) -> list[int]:
        """Return the position whose features steer each node: the one before a committed token, or before the root."""
        missing = 0 if state.session.pending else min(state.missing, len(part.tokens))
        first = state.start + state.session.length
        return [*range(first - 1, first - 1 + missing), *[len(state.tokens) - 2] * (len(part.tokens) - missing)]


def _bias_of(biases: Sequence[Any]) -> Any:
    """Return the bias of a part from its nodes' biases: one for all if they are the same, None if no node has one."""
    known = [one for one in biases if one is not None]
    if not known or all(one is known[0] for one in biases):
        return known[0] if known else None
    return stack_rows([0 * known[0] if one is None else one for one in biases])


class SteeredDrafter(BaseModelDrafter):
    """Drafts as drafter `model` does, with a steered draft model."""

    capabilities = Capabilities(
        (DraftSource("steered", runs_model=True),),
        Needs(prompt=True),  # each instance adds the layers whose hidden states its steering reads
        q_at_leaves=True,
        cost="a forward of the draft model for each level, and of the steering for each round",
    )
    expander_type = SteeredExpander
    state_type = SteeredState
    _expander: SteeredExpander

    def __init__(self, model: Model, options: Options) -> None:
        super().__init__(model, options)
        self.capabilities = replace(self.capabilities, needs=Needs(layers=model.steering.taps, prompt=True))

    def observe(self, state: Any, seen: Observation) -> None:
        root = len(state.tokens) - 1
        if seen.tokens:
            super().observe(state, seen)
        if seen.seen is None or seen.seen.hidden is None:
            return
        if not seen.tokens:
            self._expander.add_features(state, seen.seen.hidden, seen.seen.ids[0])
            return
        rows = {node: row for row, node in enumerate(seen.seen.ids)}
        known = [rows[node] for node in seen.node_ids if node in rows]  # those of the last round, if there are several
        self._expander.add_features(state, seen.seen.hidden[:, known], root + len(seen.node_ids) - len(known))

    def copy_prefix(self, state: Any, other: Any, length: int) -> None:
        state.features |= {place: row for place, row in other.features.items() if place < length}

    def close(self, state: Any) -> None:
        """Keep only the features, for requests that share this prefix."""
        self.pause(state)


def build(options: Options, *, given: BuildContext) -> SteeredDrafter:
    """Build the drafter; raise UserError if the draft has no steering."""
    if given.draft is None or given.draft.steering is None:
        raise UserError(
            "drafter steered needs a draft model with a steering, as `outpace distill --kind steered` trains it: name"
            " it with --draft (or draft=...), or use drafter model"
        )
    return SteeredDrafter(given.draft, options)
