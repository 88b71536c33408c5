"""A thread that waits for a whole answer steps the engine to its end, lets others step, and decodes the text last."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import within

from outpace.api.shared_engine import SharedEngine
from outpace.api.text import StopStrings, TextAssembler
from outpace.models.text.text_stream import TextStream

SECONDS = 60.0  # a longer wait counts as a hang


class Letters(TextStream):
    """Decodes token 0 as "a", token 1 as "b", and so on, and records the tokens."""

    def __init__(self) -> None:
        self.pushed: list[int] = []

    def push(self, ids: Any) -> str:
        self.pushed += ids
        return "".join(chr(ord("a") + token) for token in ids)

    def finish(self) -> str:
        return ""


def assembler(stops: tuple[str, ...] = ()) -> tuple[TextAssembler, Letters]:
    letters = Letters()
    return TextAssembler(letters, StopStrings(stops, False), ()), letters


class Steps:
    """An engine that writes one token of one request per step."""

    def __init__(self, text: TextAssembler) -> None:
        self.text, self.count = text, 0

    def step(self) -> None:
        self.count += 1
        self.text.watch([self.count % 26], 0)
        time.sleep(0.0005)


def test_a_thread_that_waits_for_a_whole_answer_releases_the_lock_between_rounds() -> None:
    text, letters = assembler()
    steps, run = Steps(text), SimpleNamespace(finish_reason=None)
    shared: Any = SharedEngine(steps)  # type: ignore[arg-type]
    thread = threading.Thread(target=shared.drive, args=(run, None), daemon=True)
    thread.start()
    for _ in range(20):
        before = steps.count
        with shared.lock.hold():
            here = steps.count
            time.sleep(0.005)
            assert steps.count == here, "the engine was stepped while another thread held the lock"
        deadline = time.monotonic() + SECONDS
        while steps.count <= before and time.monotonic() < deadline:
            time.sleep(0.0005)
        assert steps.count > before
    run.finish_reason = "length"
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not letters.pushed, "the text was decoded before it was read"
    assert len(text.pieces) == steps.count == len(letters.pushed)


def test_drive_returns_for_each_piece_of_a_stream() -> None:
    text, _ = assembler()
    steps, run = Steps(text), SimpleNamespace(finish_reason=None)
    shared: Any = SharedEngine(steps)  # type: ignore[arg-type]
    for count in range(1, 5):
        within(SECONDS, lambda: shared.drive(run, text))
        assert steps.count == count
        assert text.pieces.popleft().text == chr(ord("a") + count)
    run.finish_reason = "stop"
    shared.drive(run, text)
    assert steps.count == 4


def test_no_round_is_lost_while_text_is_decoded() -> None:
    text, letters = assembler()
    count, found = 20_000, []

    def write() -> None:
        for number in range(count):
            text.watch([number % 26], 0)

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive() or text.has_news:
        while text.has_news:
            found.append(text.pieces.popleft().tokens[0])
    assert found == [number % 26 for number in range(count)] == letters.pushed


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_text_decoded_later_equals_text_decoded_at_once(stops: tuple[str, ...]) -> None:
    rounds = [([0, 1, 2], 2), ([3], 0), ([4, 5], 2), ([6], 1)]
    late, letters = assembler(stops)
    at_once, _ = assembler(stops)
    pieces: deque[Any] = deque()
    for tokens, drafted in rounds:
        assert late.watch(tokens, drafted) is None
        assert at_once.watch(tokens, drafted) is None
        assert late.has_news
        pieces += at_once.pieces
        at_once.pieces.clear()
    assert bool(letters.pushed) == bool(stops)
    assert late.pieces == pieces
    assert [(piece.text, piece.is_draft) for piece in pieces] == [
        ("ab", True),
        ("c", False),
        ("d", False),
        ("ef", True),
        ("g", True),
    ]
