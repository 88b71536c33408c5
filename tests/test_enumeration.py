"""The distribution: `match` exactly, by enumeration; `gumbel` and the noise by statistics over fixed seeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from doubles import QuickToy, chi_square, decode, make_drafter, make_request, probabilities
from enumerating import TARGETS

from outpace.core.noise import exponential, gumbel, row_key, uniform
from outpace.core.sampling import Sampling, log_probs
from outpace.core.types import Request, Row
from outpace.engine.engine import EngineOptions
from outpace.rules.match import Match

PROMPT = (2, 0, 1)
LENGTH = 3
GROUP = 100  # requests in one engine: what it does for all of them grows faster than their number
WIDE = EngineOptions(nodes=8, rows=1 << 12, chunk=1 << 10, batch=128)
SAMPLINGS = (Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.4, top_p=0.8), Sampling(0.9, top_k=3, top_p=0.9))
METHODS = {"chain": ("speculative", None, 1), "tree": ("speculative", None, 3), "card": ("card", "inline", 3)}
CORNERS = (1e-9, 0.5, 1 - 1e-9)  # of a token's interval: its lower end, its midpoint, its upper end


class Prescribed(Match):
    """Every uniform number is written in a table: request number, then place in the answer."""

    def __init__(self, table: Sequence[Sequence[float]]) -> None:
        self.table = table

    def draw(self, row: Row) -> float:
        return self.table[row.request.seed][min(row.position - len(PROMPT), LENGTH - 1)]


def intervals(target: QuickToy, text: Sequence[int], sampling: Sampling) -> list[tuple[float, float]]:
    """Where p's distribution function, given the prefix, gives each token of the text; by the slow twin of p."""
    result = []
    for place, token in enumerate(text):
        p = probabilities(target._row([*PROMPT, *text[:place]]), sampling)
        below = math.fsum(p[:token])
        result.append((below, below + p[token]))
    return result


def plain_probability(target: QuickToy, text: Sequence[int], sampling: Sampling) -> float:
    """The product of the library's own p along the text."""
    log_p = 0.0
    for place, token in enumerate(text):
        log_p += log_probs(target._row([*PROMPT, *text[:place]])[None], [sampling])[0, token].item()
    return math.exp(log_p)


def enumerated() -> Iterator[Any]:
    """Yield every drafter with every method and one of the samplings, which alternate.

    The long tests have all samplings, and a larger vocabulary.
    """
    drafters = ("perfect", "garbage", "empty", "ngram", "model", "both")
    pairs = itertools.product(drafters, METHODS)
    for (number, pair), (place, sampling), vocab in itertools.product(enumerate(pairs), enumerate(SAMPLINGS), (3, 4)):
        is_long = vocab > 3 or (number + place) % len(SAMPLINGS)
        name = "-".join((*pair, str(sampling), str(vocab)))
        yield pytest.param(vocab, *pair, sampling, id=name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("vocab", "drafter", "method", "sampling"), list(enumerated()))
def test_match_by_enumeration(vocab: int, drafter: str, method: str, sampling: Sampling) -> None:
    target = TARGETS[vocab]
    boxes = {text: intervals(target, text, sampling) for text in itertools.product(range(vocab), repeat=LENGTH)}
    boxes = {text: box for text, box in boxes.items() if all(high > low for low, high in box)}
    measures = {text: math.prod(high - low for low, high in box) for text, box in boxes.items()}
    assert math.isclose(math.fsum(measures.values()), 1.0, abs_tol=1e-12)
    table = [[low + at * (high - low) for low, high in box] for box in boxes.values() for at in CORNERS]
    rule = Prescribed(table)
    requests = [make_request(PROMPT, rule, LENGTH, sampling=sampling, seed=number) for number in range(len(table))]
    decoder, worker, width = METHODS[method]
    proposer = make_drafter(drafter, target, width=min(width, vocab))
    run = decode(requests, decoder, proposer, worker=worker, target=target, engine=WIDE)
    expected = [list(text) for text in boxes for _ in CORNERS]
    assert run.texts == expected
    for text, measure in measures.items():
        assert abs(measure - plain_probability(target, text, sampling)) < 1e-12
    assert run.figures.accepted > 0 or drafter not in ("perfect", "model", "both")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_processed_p_equals_its_slow_twin(sampling: Sampling) -> None:
    logits = 3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for other in (sampling, Sampling(0.7, min_p=0.1), Sampling(2.0, top_k=20, top_p=0.7, min_p=0.02)):
        fast = torch.exp(log_probs(logits, [other] * len(logits)))
        slow = torch.tensor([probabilities(row, other) for row in logits], dtype=torch.float64)
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-14)


def two_tokens(requests: Sequence[Request], target: QuickToy, method: str) -> Counter[tuple[int, ...]]:
    decoder, worker, width = METHODS[method]
    drafter = make_drafter("model", target, width=width)
    short = {"draft_length": 1} if decoder == "speculative" else {}
    seen, accepted = Counter[tuple[int, ...]](), 0
    for start in range(0, len(requests), GROUP):
        some = requests[start : start + GROUP]
        run = decode(some, decoder, drafter, worker=worker, target=target, engine=WIDE, **short)
        seen.update(map(tuple, run.texts))
        accepted += run.figures.accepted
    assert accepted > len(requests) / 4
    return seen


@pytest.mark.parametrize("method", ["tree", "card"])
@pytest.mark.parametrize(
    ("rule", "count"),
    [
        *(("gumbel", 160), ("match", 160)),
        *(pytest.param(*long, marks=pytest.mark.long) for long in (("gumbel", 3000), ("match", 1500))),
    ],
)
def test_sampled_texts_by_chi_square(rule: str, count: int, method: str) -> None:
    target, sampling = TARGETS[4], Sampling(1.1)
    pairs = list(itertools.product(range(4), repeat=2))
    expected = {pair: plain_probability(target, pair, sampling) for pair in pairs}
    by_seed = [make_request(PROMPT, rule, 2, sampling=sampling, seed=seed) for seed in range(count)]
    by_choice = [make_request(PROMPT, rule, 2, sampling=sampling, seed=9, choice=choice) for choice in range(count)]
    for requests in (by_seed, by_choice):
        assert abs(chi_square(two_tokens(requests, target, method), expected)) < 4.0


def slow_exponential(key: int, tokens: np.ndarray) -> np.ndarray:
    """The same hash and logarithm in NumPy, the latter in float64."""
    bits = tokens.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    for number, factor in enumerate((0x7FEB352D, 0x846CA68B, 0x9E485565)):
        bits = (bits ^ np.uint32(key >> 32) if number == 1 else bits) * np.uint32(factor)
        bits ^= bits >> np.uint32(15)
    v = ((bits & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31 * (1 - 2.0**-23))
    exact: np.ndarray = -np.log1p(-v.astype(np.float64))
    return exact


def test_noise_equals_its_slow_twin() -> None:
    keys = [row_key(seed, choice, position) for seed in (0, 1 << 62) for choice in (0, 3) for position in (1, 999)]
    fast = exponential(keys, 64)
    slow = torch.from_numpy(np.stack([slow_exponential(key, np.arange(64)) for key in keys])).float()
    torch.testing.assert_close(fast, slow, rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(gumbel(keys, 64), -torch.log(slow), rtol=1e-5, atol=1e-5)
    assert torch.equal(exponential(keys, 64)[:, :7], exponential(keys, 7)), "noise depends on the vocabulary's size"


def kolmogorov(sample: torch.Tensor) -> float:
    """sqrt(n) times the greatest distance between a sample of [0, 1) and the uniform distribution."""
    ordered = torch.sort(sample.double().flatten()).values
    n = len(ordered)
    steps = torch.arange(n, dtype=torch.float64) / n
    return math.sqrt(n) * max((ordered - steps).max().item(), (steps + 1 / n - ordered).max().item())


@pytest.mark.parametrize("part", ["seed", "choice", "position"])
def test_noise_is_uniform_and_independent(part: str) -> None:
    base = {"seed": 17, "choice": 0, "position": 5}
    keys = [row_key(**{**base, part: number}) for number in range(4000)]
    assert len(set(keys)) == len(keys)
    u = 1 - torch.exp(-exponential(keys, 64).double())  # [rows, vocab]
    assert kolmogorov(u) < 1.95  # 1 in 1,000
    assert u.min() > 0
    draws = torch.tensor([uniform(**{**base, part: number}) for number in range(4000)], dtype=torch.float64)
    assert kolmogorov(draws) < 1.95
    limit = 4.5 / math.sqrt(4000)
    centred = (u - 0.5) * math.sqrt(12)
    neighbours = (centred[1:] * centred[:-1]).mean(0)
    assert neighbours.abs().max() < limit, f"rows that differ by one in {part} are correlated"
    tokens = centred.T @ centred / len(keys) - torch.eye(64, dtype=torch.float64)
    tokens.fill_diagonal_(0.0)
    assert tokens.abs().max() < 4.9 / math.sqrt(4000), "tokens of one row are correlated"
    assert ((draws[1:] - 0.5) * (draws[:-1] - 0.5)).mean().abs() * 12 < limit
