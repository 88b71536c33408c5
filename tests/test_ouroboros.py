"""Ouroboros: phrases begin and prolong the draft model's drafts; what the pool learns; fewer forwards of the draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from doubles import QuickToy, decode, make_request, write

from outpace.core.drafting import BuildContext, TargetFeedback
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import model, ouroboros
from outpace.drafters._phrases import PhraseTable
from outpace.drafters.ouroboros import Options, OuroborosDrafter
from outpace.engine.engine import EngineOptions
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)
WIDE = EngineOptions(nodes=32, rows=512)


class Counting(QuickToy):
    """Counts its forwards."""

    passes = 0

    def score(self, forest: Any) -> Any:
        self.passes += 1
        return super().score(forest)


def request(prompt: Sequence[int]) -> Request:
    return Request(tuple(prompt), Greedy(), 50)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    return write(TARGET, make_request(tuple(prompt), max_tokens=count))


def test_phrases_begin_a_draft_and_one_forward_reads_them() -> None:
    text = greedy((3, 1, 4), 9)
    drafter, counted = OuroborosDrafter(draft := Counting(16, 3, 0), Options()), 0
    drafter._pools.shared.learn(4, tuple(text[:4]))
    state, tree = drafter.open(request((3, 1, 4))), TokenTree(4)
    counted = draft.passes
    drafter.grow([state], [tree])
    assert draft.passes == counted + 1
    node, found = 0, []
    while tree.children(node):
        node = tree.children(node)[0]
        found.append(tree.tokens[node])
    assert found[:5] == text[:5], "the phrase, and the draft's own token behind it"


def test_phrases_prolong_a_draft() -> None:
    text = greedy((3, 1, 4), 9)
    drafter = OuroborosDrafter(TARGET, Options(phrase=3))
    state, tree = drafter.open(request((3, 1, 4))), TokenTree(4)
    state.pool = PhraseTable(64, 8)
    state.pool.learn(text[0], tuple(text[1:4]))
    drafter.grow([state], [tree])
    assert tree.tokens[1:] == text[:4]
    drafter.grow([state], [tree])
    assert tree.tokens[1:6] == text[:5], "which the draft agrees with"


def test_where_the_draft_disagrees_its_own_token_goes_on() -> None:
    text = greedy((3, 1, 4), 9)
    wrong = (text[0] + 1) % 16
    drafter = OuroborosDrafter(TARGET, Options(phrase=2))
    state, tree = drafter.open(request((3, 1, 4))), TokenTree(4)
    state.pool = PhraseTable(64, 8)
    state.pool.learn(4, (wrong, 5))
    for _ in range(3):
        drafter.grow([state], [tree])
    path = [0]
    while (below := tree.child(path[-1], text[len(path) - 1])) is not None:
        path.append(below)
    assert len(path) == 4
    assert tree.child(0, wrong) is not None, "the target may still judge it"


def test_the_pool_learns_what_is_said_behind_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all paths of the tree, one by one."""
    monkeypatch.setattr(ouroboros, "FOLLOWERS", 256)
    chance = random.Random(0)
    for _ in range(50):
        drafter = OuroborosDrafter(TARGET, Options(phrase=3))
        state, tree = drafter.open(request((3, 1, 4))), TokenTree(4)
        for node in range(25):
            tree.add(chance.randrange(len(tree)), chance.randrange(3), -0.1 * node)
        state.tree = tree
        top = np.array([[chance.randrange(3)] for _ in tree.ids])
        drafter._reuse(state, Observation([tree.ids[0]], [9], TokenTree(9), TargetFeedback(tree.ids, tree.tokens, top)))
        expected = set()
        for node in range(1, len(tree)):
            phrase, at = [int(top[node, 0])], tree.child(node, int(top[node, 0]))
            while at is not None and len(phrase) < 3:
                phrase.append(int(top[at, 0]))
                at = tree.child(at, phrase[-1])
            if len(phrase) > 1:
                expected.add((tree.tokens[node], *phrase))
        assert {(lead, *rest) for lead in range(16) for rest in state.pool.followers(lead)} == expected


def test_the_pool_serves_later_requests() -> None:
    drafter, asked = OuroborosDrafter(Counting(16, 3, 0), Options()), make_request((3, 1, 4), max_tokens=60)
    draft = drafter._expander.model
    forwards = []
    for _ in range(2):
        before = draft.passes
        outcome = decode([asked], "speculative", drafter, target=TARGET, engine=WIDE)
        assert outcome.texts == [write(TARGET, asked)]
        forwards.append((draft.passes - before, len(outcome.steps[0])))
    assert forwards[1][1] < forwards[0][1]


def test_it_needs_fewer_forwards_of_the_draft_than_a_chain() -> None:
    asked = make_request((3, 1, 4), max_tokens=80)
    counts = {}
    for name, module in (("ouroboros", ouroboros), ("model", model)):
        draft = Counting(16, 3, 0)
        options = module.Options(**({"width": 1} if name == "model" else {}))
        drafter = module.build(options, given=BuildContext(draft))
        found = decode([asked], "speculative", drafter, target=QuickToy(16, 3, 0), engine=WIDE)
        assert found.texts == [write(TARGET, asked)]
        counts[name] = draft.passes
    assert counts["ouroboros"] < counts["model"]


def test_a_draft_model_is_needed() -> None:
    with pytest.raises(UserError, match="ouroboros needs a draft model"):
        ouroboros.build(Options(), given=BuildContext())
