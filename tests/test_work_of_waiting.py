"""The work of a step for waiting requests, without times: tokens compared, tokens hashed, passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from doubles import make_request
from test_work import Counted

from outpace.decoders.autoregressive import Autoregressive
from outpace.engine.engine import Engine, EngineOptions

WORK: Counter[str] = Counter()
LENGTH, WAITING, CHUNK = 4096, 100, 256


class Token(int):
    """A token that counts comparisons and hashes."""

    def __eq__(self, other: object) -> bool:
        WORK["compared"] += 1
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        WORK["compared"] += 1
        return int.__ne__(self, other)

    def __hash__(self) -> int:
        WORK["hashed"] += 1
        return int.__hash__(self)


def prompt(start: int, end: int) -> list[Token]:
    """Return LENGTH tokens: a beginning for each `start`, and an ending for each `end`."""
    stem = [Token((start + 7 * place + place * place // 3) % 16) for place in range(LENGTH - 4)]
    return [*stem, *(Token(end >> shift & 15) for shift in (12, 8, 4, 0))]


@pytest.fixture
def engine() -> Iterator[Engine]:
    WORK.clear()
    with closing(Engine(Counted(), options=EngineOptions(batch=4, chunk=CHUNK, kv_memory=0.01))) as made:
        yield made


def step(engine: Engine) -> Counter[str]:
    """Return the work of one step."""
    assert isinstance(engine.target, Counted)
    WORK.clear()
    engine.target.work.clear()
    engine.step()
    return WORK + Counter(passes=engine.target.work["passes"], rows=engine.target.work["rows"])


def submit(engine: Engine, start: int, count: int) -> None:
    for number in range(count):
        request = make_request(prompt(start, number), max_tokens=4)
        engine.submit(request, Autoregressive, Autoregressive.Options())


def test_a_request_that_waits_for_a_shared_prefix_compares_once(engine: Engine) -> None:
    submit(engine, 0, 1 + WAITING)
    assert WORK == {"hashed": (1 + WAITING) * (LENGTH - LENGTH % 16)}, "each block is hashed when its request comes"
    first = step(engine)
    assert first["compared"] <= WAITING * LENGTH
    assert len(engine.waiting) == WAITING
    for _ in range(LENGTH // CHUNK - 3):
        assert step(engine) == {"passes": 1, "rows": CHUNK}, "nothing is looked up again"
    assert len(engine.waiting) == WAITING


def test_a_request_that_waits_for_a_slot_costs_nothing(engine: Engine) -> None:
    for start in range(4):
        submit(engine, start, 1)
    submit(engine, 9, WAITING)
    step(engine)
    assert len(engine.running) == 4
    for _ in range(10):
        work = step(engine)
        assert set(work) == {"passes", "rows"}, "nothing is compared or hashed"
        assert work["passes"] == 1
        assert 0 < work["rows"] <= CHUNK
