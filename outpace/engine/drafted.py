"""A request's side of a drafter that works in turn, and what that drafter is still to be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.core.needs import NOTHING, Needs
from outpace.core.types import DraftState, Observation


@dataclass(eq=False)
class Drafted:
    """The engine knows the drafter by `name`."""

    name: str | None = None
    needs: Needs = NOTHING  # the drafter's
    told: int = 0  # tokens of the prompt that a drafter with such needs was told of
    state: DraftState | None = None
    seconds: float = 0.0  # of the round under way
    is_asked: bool = False  # in the round under way
    untold: list[Observation] = field(default_factory=list)  # of the rounds since it was told last

    def take(self) -> Observation | None:
        """What it was not told, of all these rounds as if they were one; from now on it counts as told."""
        untold, self.untold, self.is_asked = self.untold, [], False
        if len(untold) < 2:
            return untold[0] if untold else None
        path = [node for seen in untold for node in seen.path]
        return untold[-1]._replace(path=path, tokens=[token for seen in untold for token in seen.tokens])
