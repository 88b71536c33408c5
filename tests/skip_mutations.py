"""Mistakes in drafting with the target's own session; the text or the acceptance must show each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from doubles import collect_warnings, decode, make_request, write
from mutation_checks import Mutation, Original
from toy import Toy

from outpace.core.types import Request
from outpace.drafters import layer_skip
from outpace.drafters.layer_skip import LayerSkipDrafter, Options, Sublayers, SublayerSearch, evenly_spaced
from outpace.engine import sequence as running
from outpace.models.base import chain

TARGET = Toy(16, 4, 0, mlp=0.5)
IDLE = 2  # the layer without effect
TARGET._tables[IDLE] = 0.0
TARGET._mlp[IDLE] = 0.0
LENGTH = 40


def find_in_skipping() -> str | None:
    """Try a set in every round, on few tokens, and look for faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_skip, "_WINDOW", 8)
        patch.setattr(layer_skip, "_EVERY", 1)
        return _find_fault()


def _find_fault() -> str | None:
    """Return the first fault: a text that differs from plain decoding, a drafter that fails, or a rejected draft token
    although only sublayers without effect are skipped."""
    requests = [
        make_request((3, 1, 4, 1, 5, seed), rule, LENGTH, seed=seed) for rule, seed in (("greedy", 1), ("gumbel", 2))
    ]
    expected = [write(TARGET, request) for request in requests]
    for sublayers, search in (
        (Sublayers((IDLE,), (IDLE,)), None),
        (Sublayers((1,), (1,)), SublayerSearch(evenly_spaced(4, 0.25), 4, 99, 1.0)),
    ):
        drafter = LayerSkipDrafter(TARGET, sublayers, Options(confidence=0.0), search)
        run, messages = collect_warnings(
            lambda of=drafter: decode(requests, "speculative", of, target=TARGET, check_storage=False, draft_length=3)
        )
        if run.texts != expected or messages:
            return messages[0] if messages else "a text differs from plain decoding"
        whole = run.figures.drafted - 2 * 3  # the last rounds are cut
        if search is None and run.figures.accepted < whole:
            return "drafts that skip only sublayers without effect are rejected"
        if search is not None and search.best.attention != (IDLE,):
            return "the search misses the layer without effect"
    return None


def commit_what_was_tried(
    agreements: Original, model: Any, session: Any, request: Request, text: Sequence[int], count: int
) -> list[bool]:
    found = agreements(model, session, request, text, count)
    model.score([chain(session, text[-count:])])
    session.keep(range(count))
    return list(found)


def keep_the_worse(learn: Original, self: Any, sublayers: Sublayers, agreement: float) -> bool:
    return bool(learn(self, sublayers, 1.0 - agreement))


def lend_before_it_is_committed(lend: Original, self: Any) -> None:
    if self.draft.state is not None:
        self.draft.state.target_session = self.kv.session


def skip_the_neighbours(check: Original, self: Any, sublayers: Sublayers) -> None:
    """Skip the layer above each requested layer."""
    check(self, Sublayers(*(tuple(min(layer + 1, 3) for layer in kind) for kind in sublayers)))


def _mutation(name: str, owner: Any, attribute: str, mistake: Any) -> Mutation:
    return Mutation(f"layer_skip: {name}", [owner], attribute, mistake, find_in_skipping)


SKIP_MUTATIONS = [
    _mutation("the tokens of a trial are committed", layer_skip, "find_agreements", commit_what_was_tried),
    _mutation("the search keeps the worse set", SublayerSearch, "learn", keep_the_worse),
    _mutation(
        "lent before the last round is committed",
        running.TokenSequence,
        "attach_target_session",
        lend_before_it_is_committed,
    ),
    _mutation("the next higher layers are skipped", LayerSkipDrafter, "_choose", skip_the_neighbours),
]
