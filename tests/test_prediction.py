"""Predicted outputs: the position of a text in its prediction, the drafts made from it, and exact counts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from doubles import Outcome, QuickToy, decode, make_request, write
from files import model_folder

import outpace
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.decoders.autoregressive import Autoregressive
from outpace.drafters import grammar, ngram, prediction
from outpace.drafters._composite import SharedTree
from outpace.drafters.prediction import Alignment, PredictedSpan
from outpace.engine.engine import Engine, EngineOptions

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5)
WIDE = EngineOptions(nodes=64, rows=256)


def drafter() -> prediction.PredictionDrafter:
    return prediction.PredictionDrafter(prediction.Options())


def run(guess: Sequence[int], method: str = "speculative", count: int = 60, worker: str | None = None) -> Outcome:
    request = make_request(PROMPT, max_tokens=count, prediction=tuple(guess))
    outcome = decode([request], method, drafter(), worker=worker, target=TARGET, engine=WIDE)
    assert outcome.texts == [write(TARGET, request)]
    return outcome


def answer(count: int) -> list[int]:
    return write(TARGET, make_request(PROMPT, max_tokens=count))


def found_slowly(text: Sequence[int], guess: Sequence[int], home: int) -> PredictedSpan | None:
    """Search the longest of the last 8, 4, 2 or 1 tokens in the guess; None if nothing follows it there.

    Of several places the nearest from `home` on is taken, else the last one before it.
    """
    for length in (8, 4, 2, 1):
        last = list(text[-length:])
        places = [p for p in range(length, len(guess)) if len(last) == length and list(guess[p - length : p]) == last]
        if places:
            place = min((p for p in places if p >= home), default=places[-1])
            while length < min(place, len(text), 64) and guess[place - length - 1] == text[-length - 1]:
                length += 1
            return PredictedSpan(place, length)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_the_alignment_equals_a_slow_one(seed: int) -> None:
    chance = random.Random(seed)
    guess = [chance.randrange(6) for _ in range(60)]
    text = edited(guess, chance)
    alignment, home = Alignment(guess), 0
    offers = [PredictedSpan(0, 0)]
    for count, token in enumerate(text, 1):
        alignment.follow([token])
        kept = next((offer for offer in offers if guess[offer.place : offer.place + 1] == [token]), None)
        if kept:
            home = kept.place + 1 if kept.length + 1 >= 3 else home
            offers = [PredictedSpan(kept.place + 1, min(kept.length + 1, 64))]
        else:
            behind = offers[0].place + 1 if offers else len(guess)
            found = found_slowly(text[max(count - 65, 0) : count], guess, home)
            offers = [found] if found else []
            if behind < len(guess) and (found is None or found.place != behind):
                offers.append(PredictedSpan(behind, 0))
        assert list(alignment.offers) == offers


def edited(guess: Sequence[int], chance: random.Random) -> list[int]:
    """Return the guess with tokens replaced, inserted and left out."""
    text: list[int] = []
    for token in guess:
        edit = chance.random()
        if edit < 0.1:
            text += [chance.randrange(6), token]
        elif edit < 0.2:
            text.append(chance.randrange(6))
        elif edit < 0.9:
            text.append(token)
    return text


def test_a_perfect_prediction_is_written_in_few_passes() -> None:
    outcome = run(answer(60))
    assert len(outcome.steps[0]) <= 1 + 60 // 33
    assert outcome.figures.predicted == outcome.figures.predicted_accepted == outcome.figures.accepted
    assert outcome.figures.predicted_rejected == 0


@pytest.mark.parametrize(("method", "worker"), [("speculative", None), ("auto", None), ("card", "inline")])
def test_every_verified_token_of_the_prediction_is_counted(method: str, worker: str | None) -> None:
    text = answer(60)
    for wrong in (7, 20, 41):
        text[wrong] = (text[wrong] + 1) % 16
    figures = run(text, method, worker=worker).figures
    assert 0 < figures.predicted_accepted <= figures.accepted
    assert figures.predicted == figures.predicted_accepted + figures.predicted_rejected <= figures.drafted
    assert figures.predicted_rejected > 0 or method == "auto"  # it asks lookups only where that pays for their time


def test_a_wrong_prediction_is_given_up() -> None:
    figures = run([15, 15, 15, 14], count=60).figures
    assert figures.predicted_rejected == figures.predicted - figures.predicted_accepted
    assert figures.predicted < 40


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        ((1,) * 65, "the prediction has 65 tokens, the target's context holds 64"),
        ((1, 16), "the prediction has token 16, allowed are 0 to 15"),
    ],
)
def test_an_invalid_prediction_is_refused(guess: tuple[int, ...], said: str) -> None:
    target = QuickToy(16, 3, 0)
    target.max_positions = 64
    request = make_request(PROMPT, max_tokens=8, prediction=guess)
    with Engine(target) as engine, pytest.raises(UserError, match=said):
        engine.submit(request, Autoregressive, Autoregressive.Options())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), "target", 0)


def test_the_library_takes_a_prediction_as_text_or_as_tokens(tiny: Path) -> None:
    with outpace.load(tiny, nodes=32) as llm:
        plain = llm.generate("hello", max_tokens=40, ignore_eos=True, plain=True)[0]
        guessed = llm.generate("hello", max_tokens=40, ignore_eos=True, prediction=plain.tokens)[0]
        as_text = llm.generate("hello", max_tokens=40, ignore_eos=True, prediction=plain.text)[0]
        without = llm.generate("hello", max_tokens=40, ignore_eos=True, prediction=plain.text, plain=True)[0]
    assert guessed.tokens == as_text.tokens == without.tokens == plain.tokens
    assert guessed.figures.predicted_accepted > 0
    assert without.figures.predicted == 0


def test_a_prediction_that_would_not_be_used_is_refused(tiny: Path) -> None:
    with outpace.load(tiny, method="speculative", drafter="ngram") as llm, pytest.raises(UserError) as error:
        llm.generate("hello", prediction="hello")
    assert "name ngram+prediction" in str(error.value)
    with outpace.load(tiny, method="speculative", drafter="ngram+prediction") as llm:
        llm.generate("hello", max_tokens=4, prediction="hello")
        with pytest.raises(UserError, match="prediction is 7"):
            llm.generate("hello", prediction=7)
    with pytest.raises(UserError, match="branches is 0"):
        prediction.Options(branches=0)


def test_the_command_line_reads_a_prediction_and_prints_its_counts(tiny: Path, tmp_path: Path) -> None:
    length = ("--max-tokens", 40, "--ignore-eos", "--json", "--nodes", 32)
    # method auto asks for copies only if measured times say that they pay
    words = ("generate", "hello", "--target", tiny, *length, "--method", "speculative", "--drafter", "prediction")
    code, out, _ = run_command(*words)
    plain = json.loads(out)
    assert code == 0
    assert "accepted_prediction_tokens" not in plain
    file = tmp_path / "guess.txt"
    file.write_text(plain["text"], encoding="utf-8")
    found = json.loads(run_command(*words, "--prediction", file)[1])
    assert found["tokens"] == plain["tokens"]
    assert found["accepted_prediction_tokens"] > 0
    assert found["rejected_prediction_tokens"] >= 0


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff", "not UTF-8")])
def test_a_file_without_a_prediction_is_refused(content: bytes | None, said: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "guess.txt"
    if content is not None:
        file.write_bytes(content)
    code, _, err = run_command("generate", "hello", "--target", tiny, "--prediction", file)
    assert (code, said in err) == (2, True)


@pytest.mark.parametrize("guess", [(), (9, 2, 6)])
def test_the_planner_asks_for_copies_of_a_prediction_if_there_is_one(guess: Sequence[int]) -> None:
    asked: list[str] = []

    class Noting(SharedTree):
        def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
            asked.append(states[0].source.name)
            super().grow(states, trees)

    parts = Noting([drafter(), grammar.GrammarDrafter(grammar.Options()), ngram.NgramDrafter(ngram.Options())])
    request = make_request(PROMPT, max_tokens=40, prediction=tuple(guess))
    assert decode([request], "auto", parts, target=TARGET).texts == [write(TARGET, request)]
    assert set(asked) == {"ngram", *(["prediction"] if guess else [])}, "and none has a grammar"
