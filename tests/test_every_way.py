"""Every way that chance may go, in the real engine: the ratio rule keeps the target's distribution to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from constraints import Table
from doubles import make_request
from enumerating import Enumerating, texts_by_chance
from test_rejection import Planted, copied, draft_of, siblings
from ways import ASKED, PROMPT, TARGETS, Ways, by_chance

from outpace.core.distribution import DecisionKey, RandomSource
from outpace.core.noise import DRAW
from outpace.core.types import Drafter, Request
from outpace.decoders import Autoregressive, Speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions

TARGET = TARGETS[3]
LENGTH = 3


def drafter_of(name: str) -> Drafter:
    """A chain that is drawn, one that is copied, or picked siblings."""
    planted = {"copied": copied, "siblings": siblings}
    return Planted(planted[name]) if name in planted else ModelDrafter(draft_of(name, TARGET), Options(1, floor=0.0))


def write(request: Request, name: str, gamma: int, nodes: int, others: int = 0) -> list[int]:
    """Return the text of a request in an engine of its own, with `others` that decode plainly in the same batch."""
    drafter = None if name == "plain" else drafter_of(name)
    decoder = Autoregressive if name == "plain" else Speculative
    options: Any = Autoregressive.Options() if name == "plain" else Speculative.Options(draft_length=gamma)
    with Engine(TARGET, drafter, options=EngineOptions(nodes=nodes, chunk=3)) as engine:
        run = engine.submit(request, decoder, options)
        for number in range(others):
            engine.submit(make_request(PROMPT[number:], max_tokens=2), Autoregressive, Autoregressive.Options())
        while run.finish_reason is None:
            engine.step()
    assert run.error is None, run.error
    return run.tokens


@pytest.mark.parametrize(
    ("name", "asked", "gamma", "nodes", "others"),
    [
        ("plain", "bare", 1, 8, 0),
        ("perfect", "bare", 2, 8, 0),
        ("garbage", "bare", 1, 8, 0),
        pytest.param("garbage", "bare", 2, 8, 0, marks=pytest.mark.long),
        ("partial", "penalties", 1, 8, 0),
        pytest.param("partial", "top-k", 3, 8, 0, marks=pytest.mark.long),
        ("partial", "top-k", 2, 2, 0),  # the budget cuts the chain
        pytest.param("partial", "top-k", 3, 3, 0, marks=pytest.mark.long),
        ("partial", "top-p", 1, 8, 2),  # in a batch
        ("copied", "bare", 3, 8, 0),
        ("siblings", "min-p", 2, 8, 0),
        pytest.param("siblings", "bare", 2, 8, 0, marks=pytest.mark.long),
    ],
)
def test_the_products_of_all_ways_add_up_to_the_targets_own(
    name: str, asked: str, gamma: int, nodes: int, others: int
) -> None:
    chance = Enumerating()
    request = make_request(PROMPT, by_chance(chance), LENGTH, **ASKED[asked])
    found = texts_by_chance(chance, lambda: write(request, name, gamma, nodes, others))
    exact = Ways(TARGET, None, ASKED[asked], gamma, LENGTH).chances()
    assert set(found) == set(exact)
    assert all(abs(found[text] - exact[text]) < 1e-12 for text in exact)


@pytest.mark.parametrize("name", ["plain", "perfect", "garbage", "copied", "siblings"])
def test_within_a_constraint_the_products_are_the_targets_own_of_what_it_allows(name: str) -> None:
    follows = [frozenset({0, 1}), frozenset({2}), frozenset({0, 1, 2})]
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, chance_of_text in exact.items():
            allowed = sorted(follows[[*PROMPT, *text][-1]])
            p = torch.softmax(TARGET._row([*PROMPT, *text])[allowed], 0).tolist()
            longer |= {(*text, token): chance_of_text * own for token, own in zip(allowed, p, strict=True)}
        exact = longer
    chance = Enumerating()
    constraint = Table(len(PROMPT), follows)
    request = make_request(PROMPT, by_chance(chance), LENGTH, temperature=1.0, constraint=constraint)
    found = texts_by_chance(chance, lambda: write(request, name, 2, 8))
    assert set(found) == set(exact)
    assert all(abs(found[text] - exact[text]) < 1e-12 for text in exact)


@pytest.mark.parametrize("purpose", [None, DRAW])
def test_a_key_that_decides_twice_is_caught(purpose: int | None) -> None:
    """As if draws, or all that is decided, were keyed by the place among a round's nodes."""

    class Returning(Enumerating):
        def _decide(self, key: DecisionKey, outcomes: Any) -> object:
            returns = purpose is None or key.purpose == purpose
            return super()._decide(key._replace(node_id=key.node_id % 2) if returns else key, outcomes)

    chance = Returning()
    request = make_request(PROMPT, by_chance(chance), 6, temperature=1.0)
    with pytest.raises(AssertionError, match="decides twice"):
        texts_by_chance(chance, lambda: write(request, "garbage", 1, 8))


def test_a_biased_draft_is_caught() -> None:
    """A drafter that replaces what it drew, as pruning by what was drawn does: the sums are no longer the target's."""

    class Pruning(Enumerating):
        def draw(self, key: DecisionKey, p: Any) -> int:
            token = super().draw(key, p)
            return 0 if key.purpose == DRAW and token == 1 else token

    chance = Pruning()
    request = make_request(PROMPT, by_chance(chance), 2, temperature=1.0)
    found = texts_by_chance(chance, lambda: write(request, "garbage", 1, 8))
    exact = Ways(TARGET, None, ASKED["bare"], 1, 2).chances()
    assert max(abs(found.get(text, 0.0) - exact[text]) for text in exact) > 1e-3


def test_numbers_decide_as_they_did() -> None:
    key = DecisionKey(1, 0, 7, DRAW)
    assert RandomSource().number(key) == RandomSource().number(key) != RandomSource().number(key._replace(choice=1))
    assert RandomSource().accepts(key, 1.0)
    assert not RandomSource().accepts(key, 0.0)
