"""What a planner knows of the sources of one request's drafts."""

from __future__ import annotations

from outpace.core.types import Source
from outpace.decoders._costs import Mean


class Copier:
    """A source that runs no model, and what this request had of it."""

    def __init__(self, source: Source, gain: Mean) -> None:
        self.source = source
        self.gain = gain  # tokens that it gives a round in which it is asked, less what its rows cost
        self.skipped = 0  # rounds since it was asked
        self.is_asked = False  # in this round


class Grower:
    """A source that runs a model, and how its layers did for this request."""

    def __init__(self, source: Source, deepest: int) -> None:
        self.source = source
        self.layers = 0  # that it grew in this round
        self.is_trial = False  # the last of them does not pay, as far as is known
        self.grown = [0.0] * deepest  # by layer: when it was grown last, in seconds of rounds
        self.failures = 0  # trials since a layer last paid
        self.trial_cost = 0.0  # seconds that the last trial took: it reads what was written since the one before
        self.is_following = False  # it has read all but what was written in the last round
        self.has_read = False  # the prompt

    @property
    def tries(self) -> bool:
        """Whether its first layer is a trial."""
        return self.is_trial and self.layers == 1
