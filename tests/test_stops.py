"""Stop strings: found anywhere in the text; only text that may still become one is held back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

import pytest
from doubles import QuickToy, make_drafter, make_request
from twins import Wish, answer_all, cut_slowly, write_slowly

from outpace.api.llm import LLM
from outpace.api.text import StopStrings, TextAssembler
from outpace.models.load import Loaded
from outpace.models.text.tokenizer import Tokenizer

TARGET = QuickToy(16, 3, 0)


def push_all(
    chunks: Sequence[str], stops: Sequence[str], include: bool = False, least: int = 0
) -> tuple[list[str], str | None]:
    """Return the text released after each chunk and at the end, and the stop string that was found. Only chunks after
    the first `least` may end the text."""
    found = StopStrings(stops, include)
    return [*(found.push(chunk, place >= least) for place, chunk in enumerate(chunks)), found.finish()], found.found


@pytest.mark.parametrize(
    ("chunks", "stops", "shown"),
    [
        ("one word", ["STOP"], ["one word", ""]),
        (["ab", "c", "d"], ["bc"], ["a", "", "", ""]),  # across two chunks
        (["a", "a", "a", "b", "x"], ["aab"], ["", "", "a", "", "", ""]),  # its start occurs inside it
        (["abab", "abac", "z"], ["abac"], ["ab", "ab", "", ""]),
        (["x", "y"], ["xyz"], ["", "", "xy"]),  # held back, and no stop string in the end
        (["xy", "xyz"], ["xyz"], ["", "xy", ""]),
        (["ab", "c"], ["ab", "abc"], ["", "", ""]),  # one is a prefix of the other: the shorter completes first
        (["abc"], ["ab", "abc"], ["", ""]),
        (["abx", "bc"], ["abc", "bx"], ["a", "", ""]),
        (["zbcd"], ["bcd", "c"], ["z", ""]),  # the first one in the text, not in the list
        (["zbcd"], ["c", "bcd"], ["z", ""]),
        (["h", "é", "l"], ["él"], ["h", "", "", ""]),
        (["stop", "more"], ["stop"], ["", "", ""]),  # in the first token
        (["", "a", ""], ["ab"], ["", "", "", "a"]),
        (["a" * 5], ["aaa"], ["", ""]),
        (["text"], [], ["text", ""]),
    ],
)
def test_text_released_per_chunk(chunks: Sequence[str], stops: list[str], shown: list[str]) -> None:
    chunks = [chunks] if isinstance(chunks, str) else chunks
    assert push_all(chunks, stops)[0] == shown


def test_an_included_stop_string_ends_the_text() -> None:
    assert push_all(["xab", "cd"], ["abc"], include=True) == (["x", "abc", ""], "abc")
    assert push_all(["zabcd"], ["ab", "abc"], include=True) == (["zabc", ""], "abc")


@pytest.mark.parametrize("seed", range(8))
def test_random_chunks_against_the_reference(seed: int) -> None:
    """Odd seeds have a minimum number of chunks."""
    chance, ended = random.Random(seed), 0
    for _ in range(1500):
        letters = "ab" if chance.random() < 0.5 else "abcé\ufffd"
        chunks = ["".join(chance.choices(letters, k=chance.randint(0, 4))) for _ in range(chance.randint(0, 9))]
        stops = ["".join(chance.choices(letters, k=chance.randint(1, 5))) for _ in range(chance.randint(0, 3))]
        least, include = chance.randint(0, 5) if seed % 2 else 0, chance.random() < 0.3
        out, found = push_all(chunks, stops, include, least)
        count, expected, is_stopped = cut_slowly(chunks, stops, include, least)
        assert ("".join(out), found is not None) == (expected, is_stopped), (chunks, stops, least)
        ended += is_stopped
        for place in range(1, min(count, len(chunks)) + (not is_stopped)) if not least else ():
            shown, seen = "".join(out[:place]), "".join(chunks[:place])
            held = seen[len(shown) :]
            assert seen.startswith(shown)
            assert not held or any(stop.startswith(held) for stop in stops), "held back for nothing"
            early = [stop for stop in stops for start in range(len(shown)) if stop.startswith(seen[start:])]
            assert not early, "shown too early"
    assert ended > 300


@pytest.mark.parametrize(
    ("chunks", "least", "stops", "shown"),
    [
        (["ab", "cd", "ab"], 1, ["ab"], "abcd"),  # complete too early, then again
        (["ab", "cd"], 1, ["ab"], "abcd"),
        (["xa", "b", "c"], 1, ["ab"], "x"),  # begun before, completed after
        (["xa", "b", "c"], 2, ["ab"], "xabc"),
        (["abcd", "e", "x"], 1, ["abcdef", "cd"], "abcdex"),  # held back for the longer one; the shorter came too early
        (["abcd", "ef"], 1, ["abcdef", "cd"], ""),
        (["aaa", "a"], 1, ["aa"], "aa"),  # the new one overlaps the old ones
        (["ab", ""], 1, ["ab"], "ab"),  # a token without text completes nothing
    ],
)
def test_a_stop_string_that_comes_too_early_is_text(
    chunks: list[str], least: int, stops: list[str], shown: str
) -> None:
    assert "".join(push_all(chunks, stops, least=least)[0]) == shown


def answer_of(tokenizer: Tokenizer, stops: Sequence[str], least: int = 0) -> TextAssembler:
    return TextAssembler(tokenizer.stream(), StopStrings(stops, False), tokenizer.stop_ids, least)


def shown(answer: TextAssembler) -> str:
    return "".join(piece.text for piece in answer.pieces)


def test_a_character_split_over_tokens_is_matched_when_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.continuation("né, naïve 日本")
    whole = "né, naïve 日本"
    for stop, text in (("é", "n"), ("ïv", "né, na"), ("本", "né, naïve 日"), ("日本", "né, naïve "), ("ô", whole)):
        answer = answer_of(tokenizer, [stop])
        ends = [answer.watch([token], 0) for token in ids]
        answer.finish()
        assert shown(answer) == text
        assert (1 in ends) == (text != whole)
    for least, text in ((0, "n"), (1, "n"), (2, "n\ufffd")):  # an incomplete character counts from its last token
        answer = answer_of(tokenizer, ["\ufffd"], least)
        assert answer.watch(ids[:2], 0) is None
        answer.finish()
        assert shown(answer) == text


def test_watch_returns_the_number_of_tokens_before_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.continuation("ab hello cd")
    letters = [tokenizer.decode([token]) for token in ids]
    for stop in ("b h", "hell", "lo c", "d", "ab hello cd"):
        answer = answer_of(tokenizer, [stop])
        count, text, _ = cut_slowly(letters, [stop], include=False)
        assert answer.watch(ids, len(ids) - 1) == count
        assert shown(answer) == text
        drafted = [token for piece in answer.pieces if piece.is_draft for token in piece.tokens]
        assert drafted == ids[: min(count, len(ids) - 1)]
        assert [token for piece in answer.pieces for token in piece.tokens] == ids[:count]
        answer.finish()
        assert shown(answer) == text, "there was text after the end"


def test_a_stop_token_shows_no_text_and_completes_nothing(tokenizer: Tokenizer) -> None:
    end = max(tokenizer.stop_ids)
    answer = answer_of(tokenizer, ["o<|im_end|>", "ox"])
    ids = [*tokenizer.continuation("hello"), end, *tokenizer.continuation("x")]
    assert answer.watch(ids, 0) == len(ids)
    assert shown(answer) == "hell"
    answer = answer_of(tokenizer, ["ox"])
    assert answer.watch([*tokenizer.continuation("hello"), end], 0) is None
    answer.finish()
    assert shown(answer) == "hello", "held back text was lost at the end of the answer"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("method", "worker"), [("speculative", None), ("card", "inline"), ("card", "thread")])
def test_every_substring_as_stop_string_against_the_reference(method: str, worker: str | None, include: bool) -> None:
    prompt = (3, 1, 4, 1, 5, 3, 1, 4)
    text = write_slowly(TARGET, Wish(make_request(prompt, max_tokens=16)))
    whole = text.text
    stops = sorted({whole[start : start + count] for start in range(0, len(whole), 3) for count in (1, 2, 3, 7)})
    pairs = [(stop, other) for stop, other in zip(stops, stops[::-1], strict=True)]
    wishes = [Wish(make_request(prompt, max_tokens=16), pair, include) for pair in [*((s,) for s in stops), *pairs]]
    run = answer_all(wishes, method, make_drafter("perfect", TARGET, width=2), worker, target=TARGET)
    for wish, written in zip(wishes, run, strict=True):
        slow = write_slowly(TARGET, wish)
        assert (written.tokens, written.text, written.reason) == (slow.tokens, slow.text, slow.reason), wish.stops
    inside = sum(step.accepted == step.emitted for written in run for step in written.steps[-1:])
    assert worker == "thread" or inside > 10, "too few texts ended inside an accepted path"


@pytest.fixture(scope="module")
def llm(tiny_pair: tuple[Loaded, Loaded]):
    with closing(LLM(*tiny_pair, method="speculative", drafter="model+ngram")) as made:
        yield made


def letters(llm: LLM) -> dict:
    words = ("a", "b", "d", " ", "hello", " world", "o", "é")
    known = {token for word in words for token in llm.tokenizer.continuation(word)}
    return {"logit_bias": dict.fromkeys(known, 60.0), "temperature": 1.2, "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_stream_never_shows_what_becomes_a_stop_string(llm: LLM, seeds: int) -> None:
    asked, ended = letters(llm), 0
    for seed in range(seeds):
        whole = llm.stream("hello", seed=seed, **asked).finish().text
        for stop in (whole[5:7], whole[8:11], whole[12:18], whole[-3:]):
            for include in (False, True):
                stream = llm.stream(
                    "hello", seed=seed, stop=[stop, "never there"], include_stop_str_in_output=include, **asked
                )
                seen = ""
                for piece in stream:
                    seen += piece.text
                    assert whole.startswith(seen)
                place = whole.find(stop)
                assert seen == stream.finish().text == whole[: place + len(stop) * include]
                assert stream.finish().finish_reason == "stop"
                ended += 1
    assert ended == 8 * seeds


def test_stop_strings_are_not_searched_in_an_echoed_prompt(llm: LLM) -> None:
    asked = letters(llm)
    plain = llm.stream("hello hello", seed=1, **asked).finish()
    echoed = llm.stream("hello hello", seed=1, echo=True, stop=["hello hello"], **asked).finish()
    assert "hello hello" not in plain.text
    assert echoed.text == "hello hello" + plain.text
    assert echoed.finish_reason == "length"
    across = "lo" + plain.text[:2]  # the end of the prompt with the beginning of the answer
    place = plain.text.find(across)
    assert llm.stream("hello hello", seed=1, echo=True, stop=[across], **asked).finish().text == "hello hello" + (
        plain.text if place < 0 else plain.text[:place]
    )
