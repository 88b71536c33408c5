"""Suffix decoding: the tree of what followed, against a twin that looks everywhere; past answers; bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import pytest
from doubles import QuickToy, decode, make_request, write

from outpace.core.stats import acceptance_rate
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import suffix
from outpace.drafters._lookup import Certainty, LookupMatch, TreeLimits, grow_continuations, kind_of
from outpace.drafters.suffix import Options, SuffixDrafter
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)
LENGTHS = (4, 2, 1)


def request(prompt: Sequence[int]) -> Request:
    return Request(tuple(prompt), Greedy(), 50)


def grown(drafter: SuffixDrafter, prompt: Sequence[int]) -> TokenTree:
    tree = TokenTree(prompt[-1])
    drafter.grow([drafter.open(request(prompt))], [tree])
    return tree


def places_slowly(text: Sequence[int]) -> list[tuple[int, int]]:
    """(length of the match, place) of the places that are looked at."""
    ranked = []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, suffix._DEPTH) and text[place - length - 1] == text[len(text) - length - 1]:
            length += 1
        if length:
            ranked.append((max(known for known in LENGTHS if known <= length), place, length))
    most = max((known for known, _, _ in ranked), default=0)
    found = sorted(((place, length) for known, place, length in ranked if known == most), reverse=True)
    return [(length, place) for place, length in found[: suffix._PLACES]]


def grow_slowly(
    drafter: SuffixDrafter, state: Any, tree: TokenTree, copies: Sequence[LookupMatch], limits: TreeLimits
) -> None:
    """What `grow_copies` does, node by node."""
    least, waiting, left = math.log(limits.least_chance), [(0.0, 0, 0, copies)], limits.offered
    while waiting and left > 0:
        loss, depth, node, here = heappop(waiting)
        weights: dict[int, float] = {}
        for place, copy in enumerate(here):
            for token in copy.tokens[depth : depth + 1]:
                weights[token] = weights.get(token, 0.0) + copy.length**2 * 0.9**place
        for rank, token in enumerate(sorted(weights, key=lambda t: -weights[t])[: limits.branches]):
            those = [copy for copy in here if list(copy.tokens[depth : depth + 1]) == [token]]
            sure = weights[token] >= 0.8 * sum(weights.values())
            grade = Certainty.SURE if sure else Certainty.OTHER if rank else Certainty.LIKELY
            kind = kind_of(max(copy.length for copy in those) + depth, grade, min(copy.origin for copy in those))
            if left > 0 and (drafter.log_rate(state, kind) - loss >= least or not (depth or rank)):
                child = drafter.attach(state, tree, node, token, kind)
                heappush(waiting, (-tree.scores[child], depth + 1, child, those))
                left -= 1


@pytest.mark.parametrize("seed", range(40))
def test_what_the_places_agree_on_is_planted_at_once_as_it_would_be_node_by_node(seed: int) -> None:
    chance = random.Random(seed)
    drafter = SuffixDrafter(Options())
    drafter._rates = [acceptance_rate(chance.uniform(0.3, 0.99)) for _ in drafter._rates]
    for _ in range(30):
        copies = []
        for _ in range(chance.randrange(5)):
            like = list(chance.choice(copies).tokens) if copies else []
            tokens = like[: chance.randrange(len(like) + 1)]
            tokens += [chance.randrange(3) for _ in range(chance.randrange(12))]
            copies.append(LookupMatch(chance.randrange(1, 30), tokens, chance.randrange(2)))
        limits = TreeLimits(chance.randrange(1, 30), chance.randrange(1, 4), chance.choice([0.01, 0.05, 0.3]))
        base = TokenTree(7)
        for _ in range(chance.choice([0, 0, 3])):  # another drafter's nodes
            node = chance.randrange(len(base))
            base.add(node, chance.randrange(3), base.scores[node] - chance.random())
        made = []
        for grow in (grow_continuations, grow_slowly):
            state, tree = drafter.open(request([7])), base.copy(range(len(base)))
            grow(drafter, state, tree, copies, limits)
            made.append((tree.tokens, tree.parents, tree.scores, tree.ids, state.proposed))
        assert made[0] == made[1]


def test_past_answers_have_rates_of_their_own() -> None:
    """What is copied of past answers came false, what is copied of the text came true."""
    drafter = SuffixDrafter(Options())
    first = drafter.open(request([9]))
    drafter.observe(first, Observation([0], [1, 2, 3, 4, 1, 2, 3, 5], TokenTree(5)))
    drafter.close(first)
    state, tree = drafter.open(request([6, 1, 2, 3])), TokenTree(3)
    drafter.grow([state], [tree])
    past = tree.scores[1]
    for turn in range(1, 20):
        root = TokenTree(3, 100 * turn, 100 * turn + 1)
        drafter.observe(state, Observation([tree.ids[0]], [8, turn + 20, 1, 2, 3], root))
        tree = root
        drafter.grow([state], [tree])
    assert tree.tokens[1] == 8
    assert tree.scores[1] > past


@pytest.mark.parametrize("seed", range(10))
def test_the_tree_is_that_of_looking_everywhere(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_COPIES", 6), ("_OFFERED", 4096), ("_PLACES", 9)):
        monkeypatch.setattr(suffix, name, value)
    chance = random.Random(seed)
    drafter = SuffixDrafter(Options(branches=3))
    drafter._rates = [acceptance_rate(chance.uniform(0.1, 0.95)) for _ in drafter._rates]
    text = [chance.randrange(5) for _ in range(30)]
    for _ in range(12):
        start = chance.randrange(len(text) - 1)
        text += [*text[start : start + chance.randrange(1, 25)], chance.randrange(5)]
        mine, slow = grown(drafter, text), TokenTree(text[-1])
        found = [LookupMatch(n, text[at : at + 6]) for n, at in places_slowly(text)]
        grow_slowly(drafter, drafter.open(request(text)), slow, found, TreeLimits(4096, 3, 0.05))
        assert (mine.tokens, mine.parents, mine.scores) == (slow.tokens, slow.parents, slow.scores)


def test_the_likeliest_are_offered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [*range(20), 50, *range(20), 51, *range(20), 50, *range(15)]
    every = grown(SuffixDrafter(Options()), text)
    monkeypatch.setattr(suffix, "_OFFERED", 4)
    few = grown(SuffixDrafter(Options()), text)
    assert few.tokens[1:] == [15, 16, 17, 18]
    assert len(every) > len(few)


def test_the_longest_match_stands_first_however_often_a_shorter_one_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_PLACES", 4)
    text = [1, 2, 3, 7, *[3, 8] * 200, 1, 2, 3]
    tree = grown(SuffixDrafter(Options()), text)
    assert tree.tokens[1] == 7


@pytest.mark.parametrize(("past", "copied"), [(2048, [12, 13]), (0, [])])
def test_past_answers_are_copied_and_prompts_of_others_are_not(past: int, copied: list[int]) -> None:
    drafter = SuffixDrafter(Options(past=past))
    state = drafter.open(request([1, 2, 3]))
    drafter.observe(state, Observation([0], [10, 11, 12, 13], TokenTree(13)))
    drafter.close(state)
    assert [*grown(drafter, [5, 10, 11]).tokens[1:]] == copied
    assert len(grown(drafter, [5, 1, 2])) == 1
    assert len(grown(drafter, [9, 12, 13])) == 1, "an answer ends where it ended"


def test_memory_is_bounded_over_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_WINDOW", 2048)
    chance, drafter = random.Random(0), SuffixDrafter(Options(past=2048))
    for _ in range(10):
        state = drafter.open(request([chance.randrange(40) for _ in range(1000)]))
        for turn in range(90):
            written = [chance.randrange(40) for _ in range(100)]
            tree = TokenTree(state.tokens[-1], 1000 * turn, 1000 * turn + 1)
            drafter.grow([state], [tree])
            assert len(tree) <= 1 + 24 + 4
            root = TokenTree(written[-1], 1000 * turn + 1000, 1000 * turn + 1001)
            drafter.observe(state, Observation([1000 * turn], written, root))
            assert len(state.index) <= 2048 + 16 + 1024
            assert state.index.entries <= 5 * 2048
            assert len(state.rates) <= len(drafter._rates)
            assert state.proposed == {}
        drafter.close(state)
        assert state.past is not None
        assert state.past.entries <= 5 * 2048


def test_a_repeated_answer_is_written_in_fewer_passes() -> None:
    drafter, asked = SuffixDrafter(Options()), make_request((3, 1, 4), "gumbel", 40, temperature=1.0)
    first, again = (decode([asked], "speculative", drafter, target=TARGET) for _ in range(2))
    assert first.texts == again.texts == [write(TARGET, asked)]
    assert len(again.steps[0]) < 0.5 * len(first.steps[0])
