"""A draft model grows a token tree; the target's hidden states at the last verified position bias its MLPs.

SD2, Steering Pretrained Drafters during Speculative Decoding, arXiv:2511.09844.

All nodes below a root are steered by the features of the position before the root. Nodes that were expanded keep
their steering; committed tokens that are read later are steered by the features of the position before each. Without
such features, as at the beginning of a text from the prefix cache, tokens are not steered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.types import Capabilities, Observation, Source
from outpace.drafters._model_drafter import BaseModelDrafter, ModelOptions
from outpace.drafters._steered_expander import SteeredExpander, SteeredState
from outpace.models.base import Model


@dataclass(frozen=True)
class Options(ModelOptions):
    """One draft step is taken at a time."""


class SteeredDrafter(BaseModelDrafter):
    """Drafts as drafter `model` does, with a steered draft model."""

    capabilities = Capabilities(
        (Source("steered", runs_model=True),),
        Needs(prompt=True),  # each instance adds the layers whose hidden states its steering reads
        q_at_leaves=True,
        cost="a forward of the draft model for each layer, and of the steering for each round",
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
