"""The base of lookup drafters: the n-gram index against a linear search, its bounds and the fitted acceptance rates."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from light import grown

from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import ngram
from outpace.drafters._lookup import (
    BREAK,
    Certainty,
    LookupDrafter,
    LookupState,
    NgramIndex,
    NgramMatch,
    kind_of,
    lookup,
)
from outpace.rules.greedy import Greedy


def request(*prompt: int) -> Request:
    return Request(prompt, Greedy(), 50)


def rate_of(drafter: LookupDrafter[Any], state: LookupState, kind: int) -> float:
    return math.exp(drafter.log_rate(state, kind))


def common(text: Sequence[int], whole: Sequence[int], place: int) -> int:
    """Count the tokens before a place that equal the last tokens of another text."""
    length = 0
    while length < min(place, len(text)) and whole[place - length - 1] == text[-length - 1]:
        length += 1
    return length


def search_linearly(
    whole: Sequence[int], text: Sequence[int], lengths: Sequence[int], memory: int, count: int
) -> list[NgramMatch]:
    """Search all remembered places, ordered by the longest indexed length that matches, then the latest first."""
    found = []
    for place in range(max(len(whole) - memory, min(lengths)), len(whole)):
        known = [length for length in lengths if length <= common(text, whole, place)]
        if known:
            found.append((max(known), place))
    return [NgramMatch(min(common(text, whole, place), 64), place) for _, place in sorted(found, reverse=True)[:count]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lengths", [(1, 2, 3), (2, 4, 8, 16)])
def test_the_index_against_a_linear_search(seed: int, lengths: tuple[int, ...]) -> None:
    chance = random.Random(seed)
    index, whole, memory = NgramIndex(lengths, 200), [], 200
    for turn in range(120):
        if whole and turn % 3:
            start = chance.randrange(max(len(whole) - 300, 0), len(whole))
            piece = whole[start : start + chance.randrange(1, 40)]
        else:
            piece = [chance.randrange(4) for _ in range(chance.randrange(1, 20))]
        whole += piece
        index.extend(piece)
        expected = search_linearly(whole, whole, lengths, memory, 5)
        found = index.matches(whole, 5, 64)
        assert [match.place for match in found] == [match.place for match in expected]
        held = [min(match.length, index_reach(index, whole, match.place)) for match in expected]
        assert [match.length for match in found] == held
        for match in found:
            assert index.after(match.place, 7) == whole[match.place : match.place + 7]


def index_reach(index: NgramIndex, whole: Sequence[int], place: int) -> int:
    """Count the tokens before a place that the index still holds."""
    return place - (len(whole) - len(index))


def test_texts_that_end_are_not_copied_beyond_their_end() -> None:
    index = NgramIndex((1, 2), 100)
    index.extend([1, 2, 3, BREAK, 1, 2, 9, 9, BREAK])
    assert [index.after(place, 5) for _, place in index.matches([1, 2], 3)] == [[9, 9], [3]]
    assert index.matches([7, 3], 3) == [NgramMatch(1, 3)]
    assert index.after(3, 5) == []


class CountedDict(dict[int, int]):
    """A dict that counts accesses."""

    accesses: Counter[str]

    def get(self, *arguments: Any) -> Any:
        self.accesses["get"] += 1
        return super().get(*arguments)

    def __setitem__(self, key: int, value: int) -> None:
        self.accesses["set"] += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("text", ["random", "periodic", "one token"])
def test_memory_and_work_are_bounded_over_a_long_text(text: str) -> None:
    chance, index, accesses = random.Random(1), NgramIndex((2, 4, 8, 16), 4096), Counter()
    for chains in index._chains:
        chains.heads = CountedDict()
        chains.heads.accesses = accesses
    make = {"random": lambda n: chance.randrange(50), "periodic": lambda n: n % 977, "one token": lambda n: 7}[text]
    most, work = 0, []
    last: list[int] = []
    for start in range(0, 30_000, 1000):  # seven times the memory
        before = accesses.total()
        tokens = [make(place) for place in range(start, start + 1000)]
        index.extend(tokens)
        last = (last + tokens)[-64:]
        index.matches(last, 16, 64)
        work.append(accesses.total() - before)
        most = max(most, len(index))
        assert index.entries <= 4 * 4096
        assert all(len(chains.before) == len(index) for chains in index._chains)
    assert most <= 4096 + 16 + 1024
    assert max(work) <= 1000 * 4 * 3 + 4  # per length: a lookup, an insertion and a removal


class Fixed(LookupDrafter[LookupState]):
    """A lookup drafter that attaches given branches."""

    capabilities = lookup("fixed")

    def __init__(self, *branches: tuple[Sequence[int], int, Certainty]) -> None:
        super().__init__()
        self.branches = branches

    def propose(self, state: LookupState, tree: TokenTree) -> None:
        for branch in self.branches:
            self.attach_branch(state, tree, *branch)


def run_round(drafter: Fixed, state: LookupState, written: Sequence[int]) -> TokenTree:
    """Run one round in which the target emits `written`: all tokens but the last are accepted drafts."""
    tree = TokenTree(state.tokens[-1])
    drafter.grow([state], [tree])
    path = [0]
    for token in written[:-1]:
        child = tree.child(path[-1], token)
        assert child is not None
        path.append(child)
    drafter.observe(state, Observation([tree.ids[node] for node in path], written, TokenTree(written[-1])))
    return tree


def test_scores_follow_the_acceptance_of_copies_of_the_same_length() -> None:
    """Short copies are accepted and long ones are not: scores follow at once here, and later in other requests."""
    drafter = Fixed(([5, 6], 2, Certainty.SURE), ([8], 20, Certainty.OTHER))
    state = drafter.open(request(1))
    first = run_round(drafter, state, [5, 9])
    for _ in range(30):
        last = run_round(drafter, state, [5, 9])
    assert math.exp(last.scores[1]) > 0.8 > math.exp(first.scores[1])
    assert math.exp(last.scores[2]) < 0.25 * math.exp(last.scores[1]), "the second token was never accepted"
    assert math.exp(last.scores[3]) < 0.1
    other = drafter.open(request(1))
    assert rate_of(drafter, other, kind_of(2)) > 0.8, "the next request starts with the learned rate"
    assert rate_of(drafter, other, kind_of(3)) < 0.25
    for _ in range(6):
        run_round(drafter, other, [4])
    assert rate_of(drafter, other, kind_of(2)) < rate_of(drafter, state, kind_of(2)), (
        "it soon follows its own observations"
    )


def test_rates_are_learned_from_tokens_of_another_drafter() -> None:
    drafter = Fixed(([5], 3, Certainty.SURE))
    state, tree = drafter.open(request(1)), TokenTree(1)
    tree.add(0, 5, -0.1)
    before = rate_of(drafter, state, kind_of(3))
    assert grown(drafter, state, tree) == 0
    drafter.observe(state, Observation([0, 1], [5, 9], TokenTree(9, 10, 11)))
    assert rate_of(drafter, state, kind_of(3)) > before
    assert state.proposed == {}


def test_branches_with_a_common_start_are_uncertain_only_at_the_fork() -> None:
    drafter = Fixed(([5, 6, 7], 3, Certainty.SURE), ([5, 8, 9], 3, Certainty.OTHER))
    state, tree = drafter.open(request(1)), TokenTree(1)
    drafter.grow([state], [tree])
    kinds = {token: kind for below in state.proposed.values() for token, kind in below.items()}
    assert kinds[5] == kind_of(3)
    assert (kinds[6], kinds[7]) == (kind_of(4), kind_of(5))
    assert (kinds[8], kinds[9]) == (kind_of(4, Certainty.OTHER), kind_of(5))


def test_rates_are_remembered_by_kind() -> None:
    drafter, again = Fixed(([5], 3, Certainty.SURE)), Fixed()
    state = drafter.open(request(1))
    for _ in range(40):
        run_round(drafter, state, [4])
    again.load_state_dict(drafter.state_dict())
    assert rate_of(again, again.open(request(1)), kind_of(3)) == pytest.approx(
        drafter._rates[kind_of(3)].value, abs=0.01
    )


def test_the_longest_and_latest_match_comes_first() -> None:
    drafter = ngram.NgramDrafter(ngram.Options(longest=3, copies=2, branches=3))
    state, tree = drafter.open(request(1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3)), TokenTree(3)
    assert grown(drafter, state, tree) == 4
    assert tree.tokens[1:] == [4, 9, 5, 6]
    assert [tree.parents[node] for node in (1, 2, 3, 4)] == [0, 1, 0, 3]
    assert grown(drafter, state, tree) == 0


def test_the_longest_matches_of_the_searched_places_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last three tokens occur at three earlier places; the match at the oldest is two tokens longer."""
    text = (7, 8, 1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3)
    for places, expected in ((3, [4, 6]), (2, [6, 5]), (1, [6, 5])):
        monkeypatch.setattr(ngram, "_PLACES", places)
        drafter = ngram.NgramDrafter(ngram.Options(copies=1, branches=2))
        tree = TokenTree(3)
        assert grown(drafter, drafter.open(request(*text)), tree) == 2
        assert tree.tokens[1:] == expected


def test_the_window_bounds_the_indexed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_WINDOW", 16)
    drafter = ngram.NgramDrafter(ngram.Options())
    state = drafter.open(request(1, 2, 3, *range(10, 26), 1, 2))
    tree = TokenTree(2)
    assert grown(drafter, state, tree) == 0, "tokens beyond the window are forgotten"


def test_a_branch_cannot_extend_drawn_siblings() -> None:
    tree = TokenTree(1)
    tree.add(0, 5, -1.0, siblings=Siblings.DRAWN)
    with pytest.raises(ValueError, match="children of node 0 are drawn, not picked"):
        tree.chain(0, [6, 7], [-1.0, -2.0])
