"""How many tokens a round accepts: each rule in the engine against its slow twin, and the rules against each other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import lru_cache, partial

import pytest
from enumerating import PROMPT, TARGETS, Enumerating, Shape, draft_of, go_every_way, p_after, rule_of
from rule_twins import (
    Path,
    Row,
    Rows,
    averaged,
    by_blocks,
    by_k_seq,
    by_rounds,
    by_traversal,
    mean_length,
    norm,
)
from turns import one_of

TWINS = {
    "rejection": (partial(by_rounds, distinct=False), False),
    "block": (by_blocks, False),
    "multi_round": (partial(by_rounds, distinct=False), False),
    "without_replacement": (partial(by_rounds, distinct=True), True),
    "spectr": (by_k_seq, False),
    "traversal": (by_traversal, True),
}
CASES = [
    *((name, (1, 1), asked) for name in TWINS for asked in ("top-k", "min-p")),
    *((name, (3,), "bare") for name in TWINS if rule_of(name).traits.several_draws),
    *((name, (2, 1), "top-k") for name in TWINS if rule_of(name).traits.several_draws),
    *((name, (1, 2), "top-k") for name in TWINS if rule_of(name).traits.several_draws),
]


def length_of(name: str, p: Rows, q: Rows, counts: Sequence[int]) -> float:
    twin, distinct = TWINS[name]
    return mean_length(averaged(twin, p, q, counts, distinct))


@pytest.mark.parametrize(("name", "counts", "asked"), CASES)
def test_a_round_accepts_as_much_as_the_twin_says(name: str, counts: tuple[int, ...], asked: str) -> None:
    def p(path: Path) -> Row:
        return p_after(TARGETS[3], [*PROMPT, *path], asked)

    def q(path: Path) -> Row:
        return p_after(draft_of("partial", TARGETS[3]), [*PROMPT, *path], asked)

    shape = Shape(",".join(map(str, counts)), len(counts), once=True)
    rule = rule_of(name, Enumerating())
    found = go_every_way(rule, "partial", shape, asked, len(counts) + 1)
    assert found.accepted == pytest.approx(length_of(name, p, q, counts), abs=1e-12)


def models(seed: int, vocab: int = 3) -> tuple[Rows, Rows]:
    """Return a random pair: distributions after each path, close to each other or not."""
    chance = random.Random(seed)
    sharpness, nearness = chance.uniform(0.3, 3.0), chance.random()

    @lru_cache(None)
    def both(path: Path) -> tuple[Row, Row]:
        own = [chance.gammavariate(1.0 / sharpness, 1.0) + 1e-6 for _ in range(vocab)]
        other = [chance.gammavariate(1.0 / sharpness, 1.0) + 1e-6 for _ in range(vocab)]
        p, far = norm(own), norm(other)
        return p, [nearness * a + (1 - nearness) * b for a, b in zip(p, far, strict=True)]

    return lambda path: both(path)[0], lambda path: both(path)[1]


PAIRS = range(200)


@pytest.mark.parametrize("seed", one_of(5, PAIRS))
def test_walks_from_the_leaves_accept_no_less(seed: int) -> None:
    p, q = models(seed)
    chains = {name: length_of(name, p, q, (1, 1, 1)) for name in TWINS}
    assert chains["block"] >= chains["rejection"] - 1e-12
    assert chains["traversal"] == pytest.approx(chains["block"], abs=1e-12)
    for name in ("multi_round", "without_replacement", "spectr"):
        assert chains[name] == pytest.approx(chains["rejection"], abs=1e-12)
    for counts in ((2, 1), (1, 2), (3,)):
        traversal, top_down = (length_of(name, p, q, counts) for name in ("traversal", "without_replacement"))
        assert traversal >= top_down - 1e-12


@pytest.mark.parametrize("count", [40, pytest.param(len(PAIRS), marks=pytest.mark.long)])
def test_more_children_accept_more_and_distinct_ones_most(count: int) -> None:
    """One child, several independent ones by SpecInfer's rounds, the same by SpecTr's K-SEQ, as many distinct ones:
    the papers' order. On each pair but for the last two, which are in this order on average."""
    sums = dict.fromkeys(("rejection", "multi_round", "spectr", "without_replacement"), 0.0)
    for seed in PAIRS[:count]:
        p, q = models(seed, vocab=4)
        found = {name: length_of(name, p, q, (1 if name == "rejection" else 3,)) for name in sums}
        assert found["rejection"] - 1e-12 <= found["multi_round"]
        assert found["multi_round"] - 1e-12 <= min(found["spectr"], found["without_replacement"])
        sums = {name: sums[name] + found[name] for name in sums}
    assert all(more > less for less, more in itertools.pairwise(sums.values()))
