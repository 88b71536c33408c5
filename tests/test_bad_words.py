"""`bad_words`: no answer contains one, however it is cut into tokens, by every method, in library and command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import turns
from files import write_gguf
from test_library_options import METHODS, Bench
from test_library_options import tiny as tiny

from outpace.api.llm import LLM
from outpace.cli.main import main

SEEDS = range(2)
LONG = ("speculative, model", "speculative, ngram", "card, inline")  # a tree and the thread propose by the same


@pytest.mark.parametrize("name", [turns.case(name, name not in LONG) for name in METHODS])
def test_no_answer_has_a_bad_word(tiny: Bench, name: str) -> None:
    with closing(LLM(tiny.target, tiny.draft, **METHODS[name])) as llm:
        asked = {**tiny.base, "max_tokens": 40, "temperature": 1.5}
        free = "".join(llm.stream("hello", **asked, seed=seed).finish().text for seed in SEEDS)
        cuts = [free[start : start + length] for start, length in ((5, 2), (11, 3), (20, 4), (31, 2), (40, 6))]
        words = [word for word in ("hello", "é", "l", *cuts) if word in free and "\ufffd" not in word]
        streams = [llm.stream("hello", **asked, seed=seed, bad_words=words) for seed in SEEDS]
        texts = ["".join(piece.text for piece in stream) for stream in streams]
        plain = [llm.stream("hello", **asked, seed=seed, bad_words=words, plain=True).finish() for seed in SEEDS]
        assert texts == [result.text for result in plain]
    assert len(words) > 3
    for text in texts:
        assert not any(word in text for word in words), text


@pytest.mark.parametrize(
    ("words", "count", "max_tokens"),
    [(("el", "hello"), 1, 30), pytest.param(("el", "hello", "lo h"), 4, 60, marks=pytest.mark.long)],
)
def test_other_tokens_do_not_spell_a_bad_word(tiny: Bench, words: Sequence[str], count: int, max_tokens: int) -> None:
    pieces = ("h", "e", "l", "o", " ", "hello", "hell", "ello")
    bias = {token: 50.0 for piece in pieces for token in tiny.target.tokenizer.continuation(piece)}
    asked = {"max_tokens": max_tokens, "temperature": 2.0, "ignore_eos": True, "logit_bias": bias}
    for word in words:
        seeds = range(count) if word == "el" else range(1)
        with closing(LLM(tiny.target, tiny.draft, method="speculative", drafter="model+ngram")) as llm:
            free = [llm.stream("hello", seed=seed, **asked).finish().text for seed in seeds]
            held = [llm.stream("hello", seed=seed, bad_words=[word], **asked).finish() for seed in seeds]
            plain = [llm.stream("hello", seed=s, bad_words=[word], plain=True, **asked).finish() for s in seeds]
        assert word != "el" or any(word in text for text in free)
        assert not any(word in result.text for result in held)
        assert [result.tokens for result in held] == [result.tokens for result in plain]


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "card", "auto"])
def test_the_command_writes_no_bad_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    target = str(write_gguf(tmp_path / "tiny.gguf"))

    def text(*flags: str) -> str:
        asked = ["generate", "hello", "--target", target, "--method", method, "--max-tokens", "40", "--ignore-eos"]
        with pytest.raises(SystemExit) as end:
            main([*asked, "--temperature", "1.5", "--json", *flags])
        shown = capsys.readouterr()
        assert not end.value.code, shown.err
        found: str = json.loads(shown.out.splitlines()[-1])["text"]
        return found

    free = text()
    words = [word for word in (free[3:5], free[11:14], free[20]) if "\ufffd" not in word]
    assert words
    held = text(*(flag for word in words for flag in ("--bad-words", word)))
    assert held
    assert not any(word in held for word in words)
