"""Drafters with lookup tables: the tables equal slow searches and stay within their bounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from light import grown

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import build_drafter, cacheback, retrieval, suffix
from outpace.drafters._phrases import PhraseTable
from outpace.rules.greedy import Greedy


def request(prompt: Sequence[int]) -> Request:
    return Request(tuple(prompt), Greedy(), 50)


def some_texts(chance: random.Random, count: int = 4) -> list[list[int]]:
    return [[chance.randrange(4) for _ in range(chance.randrange(60))] for _ in range(count)] + [[1, 2, 3, 0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_the_datastore_finds_the_longest_matches(seed: int) -> None:
    chance = random.Random(seed)
    texts = some_texts(chance)
    store = retrieval.Datastore(retrieval.make(texts, 16, retrieval.Options()))
    flat = [token for text in texts for token in (*text, -1)]
    text = [chance.randrange(4) for _ in range(20)]
    lengths = []
    for place in range(1, len(flat)):
        length = 0
        while length < min(place, 16) and flat[place - length - 1] == text[-length - 1]:
            length += 1
        if length and flat[place] != -1:
            lengths.append(length)
    found = list(store.matches(text, 9, 1, 16))
    assert [length for length, _ in found] == sorted(lengths, reverse=True)[:9]
    for length, place in found:
        assert flat[place - length : place] == text[len(text) - length :]
        behind = flat[place : place + 5]
        assert store.after(place, 5) == (behind[: behind.index(-1)] if -1 in behind else behind)


@pytest.mark.parametrize("seed", range(10))
def test_a_table_holds_the_latest_phrases_of_the_latest_leaders(seed: int) -> None:
    """The table equals a list of the five latest leaders, each with its three latest phrases."""
    chance, table = random.Random(seed), PhraseTable(5, 3)
    known: list[tuple[int, list[Any]]] = []  # leaders with their phrases, both latest first
    for _ in range(300):
        leader, phrase = chance.randrange(8), (chance.randrange(3), chance.randrange(3), 0)
        table.learn(leader, phrase)
        before = dict(known).get(leader, [])
        phrases = [phrase, *(one for one in before if one != phrase)][:3]
        known = [(leader, phrases), *(entry for entry in known if entry[0] != leader)][:5]
        assert [table.followers(number) for number in range(8)] == [dict(known).get(number, []) for number in range(8)]
        assert len(table) <= 15


def test_a_table_is_bounded_over_many_tokens() -> None:
    drafter = cacheback.CachebackDrafter(cacheback.Options(leaders=64, followers=4), None)
    chance, state = random.Random(0), drafter.open(request([1]))
    for turn in range(1000):
        written = [chance.randrange(500) for _ in range(100)]
        root = TokenTree(written[-1], turn + 1, turn + 2)
        drafter.observe(state, Observation([turn], written, root))
        assert len(state.table) <= 64 * 4
        assert len(state.last) <= 3


def test_followers_of_followers_are_offered_to_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cacheback, "_MIN_CHANCE", 0.0)
    drafter = cacheback.CachebackDrafter(cacheback.Options(), None)
    drafter.close(drafter.open(request([1, 2, 3, 4, 5, 6, 7, 1])))
    tree = TokenTree(1)
    drafter.grow([drafter.open(request([9, 1]))], [tree])
    assert tree.tokens[1:7] == [2, 3, 4, 5, 6, 7]
    assert tree.parents[1:7] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(6))
def test_the_frozen_table_equals_counting(seed: int) -> None:
    texts = some_texts(random.Random(seed), 12)
    arrays = cacheback.make(texts, 16, cacheback.Options(leaders=3, followers=5))
    counts = Counter(tuple(text[place : place + 4]) for text in texts for place in range(len(text) - 3))
    leaders: Counter[int] = Counter()
    for window, count in counts.items():
        leaders[window[0]] += count
    frozen = cacheback.Frozen(arrays)
    kept = [token for token in range(16) if frozen.followers(token)]
    assert len(kept) == min(3, len(leaders))
    assert sum(leaders[token] for token in kept) == sum(count for _, count in leaders.most_common(3))
    for token in kept:
        mine = sorted((count for window, count in counts.items() if window[0] == token), reverse=True)[:5]
        assert [counts[(token, *phrase)] for phrase in frozen.followers(token)] == mine


@pytest.mark.parametrize("module", [cacheback, retrieval])
@pytest.mark.parametrize("texts", [[], [[]], [[1]], [[1], [2], []]])
def test_a_corpus_of_short_texts_is_refused(module: Any, texts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="the corpus has no text of more than"):
        module.make(texts, 16, module.Options())


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (cacheback, {"leaders": 0}, "leaders is 0"),
        (retrieval, {"branches": 65}, "branches is 65"),
    ],
)
def test_options_out_of_bounds_are_refused(module: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        module.Options(**options)


OFFERED: dict[str, Any] = {"cacheback": cacheback, "retrieval": retrieval, "suffix": suffix}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("offered", [1, 2, 5, 16])
def test_a_round_proposes_at_most_the_offered_number(name: str, offered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds however often the decoder asks in a round."""
    chance, vocab = random.Random(3), 16
    texts = [[chance.randrange(4) for _ in range(300)] for _ in range(3)]
    module = OFFERED[name]
    monkeypatch.setattr(module, "_OFFERED", offered)
    monkeypatch.setattr(module, "_MIN_CHANCE", 0.0)
    options = module.Options(branches=4)
    if name == "retrieval":
        drafter = retrieval.RetrievalDrafter(options, retrieval.Datastore(retrieval.make(texts, vocab, options)))
    else:
        drafter = build_drafter(name, BuildContext(), vars(options))
    state, tree = drafter.open(request(texts[0])), TokenTree(texts[0][-1])
    added = [grown(drafter, state, tree) for _ in range(3)]
    assert sum(added) == len(tree) - 1 == offered
