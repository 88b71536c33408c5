"""Copies the caller's predicted answer, or an earlier answer to the prompt, and resumes after each difference.

As in OpenAI's predicted outputs (2024, platform.openai.com/docs/guides/predicted-outputs); no training, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core.alignment import Alignment
from outpace.core.options import MethodOptions, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, lookup

_AHEAD = 32  # tokens copied from the prediction
_VOUCHED = 4  # matching tokens that the caller's prediction counts as at the beginning of an answer


@dataclass(frozen=True)
class Options(MethodOptions):
    """What is copied."""

    branches: int = whole(2, 1, 64, help="most places in the prediction from which tokens are copied")


@dataclass
class PredictionState(LookupState):
    """`alignment`: the answer's position in its prediction. `is_new`: nothing has been written yet, and the prediction
    is the caller's."""

    alignment: Alignment = field(default_factory=lambda: Alignment(()))
    is_new: bool = True


class PredictionDrafter(LookupDrafter[PredictionState]):
    """Proposes the next tokens of the prediction, for each position that the answer may have in it."""

    capabilities = lookup("prediction")

    def open(self, request: Request) -> PredictionState:
        is_own = bool(request.prediction)
        guess, before = (request.prediction, 0) if is_own else (request.recalled, len(request.prompt))
        sources = None if guess else ()
        return PredictionState(request, alignment=Alignment(guess, before), is_new=is_own, sources=sources)

    def propose(self, state: PredictionState, tree: TokenTree) -> None:
        """Attach branches below the root, the likelier position first."""
        grade, vouched = Certainty.SURE, _VOUCHED if state.is_new else 0
        for offer in state.alignment.offers[: self._options.branches]:
            tokens: Sequence[int] = state.alignment.tokens(offer, _AHEAD)
            self.attach_branch(state, tree, tokens, offer.length + vouched, grade)
            grade = Certainty.OTHER

    def observe(self, state: PredictionState, seen: Observation) -> None:
        super().observe(state, seen)
        state.alignment.follow(seen.tokens)
        state.is_new = False
