"""Copies cut where the request's constraint refuses them, before they take a place in the tree."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.errors import UserError
from outpace.core.types import DraftState


def allowed(state: DraftState, tokens: Sequence[int]) -> Sequence[int]:
    """Tokens that a drafter is about to pick below the root, as far as they may follow the text. For picked tokens
    alone: tokens that were drawn must not be pruned by what they are."""
    constraint = state.request.constraint
    if constraint is None:
        return tokens
    try:
        return tokens[: constraint.allowed(state.tokens, tokens)]
    except UserError:  # its request ends where the target asks it
        return tokens
