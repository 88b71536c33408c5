"""Lossy rules and method bild in the library and the command line: options by name, answers marked as lossy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from judges import random_judge

from outpace.api.llm import LLM
from outpace.cli import display
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.models.load import Loaded

ASKED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.1, "seed": 3, "min_tokens": 24}
LOSSY = [name for name in registry.names("rules") if not registry.describe("rules", name).lossless]


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_says_so_in_its_help_and_in_each_answer(
    name: str, tiny_pair: tuple[Loaded, Loaded], tmp_path: Path
) -> None:
    assert registry.describe("rules", name).help.startswith("Lossy: ")
    temperature = 0.0 if name in ("top_beta", "judge") else 1.1
    own = {"judge": str(random_judge(tmp_path, tiny_pair[0]))} if name == "judge" else {}
    method = "speculative" if name == "cascade" else "auto"
    with LLM(*tiny_pair, rule=name, method=method, **own) as llm:
        assert llm.method == "speculative"
        result = llm.stream("hello hello", **{**ASKED, "temperature": temperature}).finish()
    assert not result.lossless
    assert "speculative (lossy): " in display.summary(result)


def test_a_plain_answer_of_a_cascade_is_the_targets_own(tiny_pair: tuple[Loaded, Loaded]) -> None:
    cascade: dict[str, Any] = {"method": "speculative", "rule": "cascade", "defer": "chow", "alpha": "1.0"}
    with LLM(*tiny_pair, **cascade) as llm, LLM(*tiny_pair, method="autoregressive") as alone:
        plain, own = llm.stream("hello", plain=True, **ASKED).finish(), alone.stream("hello", **ASKED).finish()
        assert plain.tokens == own.tokens
        assert plain.lossless
        assert llm.stream("hello", **ASKED).finish().tokens != own.tokens, "with a = 1 the draft alone writes"


def test_bild_has_its_own_rule_by_default(tiny_pair: tuple[Loaded, Loaded]) -> None:
    greedy = {"max_tokens": 24, "min_tokens": 24}
    with LLM(tiny_pair[0], method="autoregressive") as llm:
        plain = llm.stream("hello", **greedy).finish().tokens
    texts = {}
    for rollback in (0.0, 1e9):
        with LLM(*tiny_pair, method="bild", rollback=rollback, fallback=0.0) as llm:
            assert llm.rule == "rollback"
            assert llm.engine.options.nodes == 11
            result = llm.stream("hello", **greedy).finish()
            assert not result.lossless
            texts[rollback] = result.tokens
    assert texts[0.0] == plain != texts[1e9]
    with LLM(*tiny_pair, method="bild", rule="greedy", nodes=6) as llm:
        result = llm.stream("hello", **greedy).finish()
        assert (result.tokens, result.lossless, llm.engine.options.nodes) == (plain, True, 6)


def test_options_of_rules_are_flags_and_json_says_lossless(tiny_pair: tuple[Loaded, Loaded], run: Run) -> None:
    model = ["generate", "hello", "--target", tiny_pair[0].name, "--draft", "layers:0", "--json", "--max-tokens", "6"]
    for more, lossless in (
        (["--rule", "typical", "--epsilon", "0.2", "--delta", "0.5", "--temperature", "1"], False),
        (["--rule", "multi_round", "--draws", "3,1", "--temperature", "1"], True),
        (["--method", "bild", "--rollback", "3", "--fallback", "0.1"], False),
        (["--method", "speculative", "--lengths", "heuristic"], True),
    ):
        said = json.loads(run(*model, *more)[1])
        assert said.get("lossless", True) is lossless
        assert ("relaxed_tokens" in said) is not lossless


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"rule": "typical", "beta": 2},
            r"'beta' \(--beta\) of method speculative, rule typical, drafter model; it "
            "belongs to rule top_beta$",
        ),
        ({"rule": "lenience", "lenience": 2}, "lenience is 2"),
        (
            {"method": "speculative", "rule": "cascade", "drafter": "ngram"},
            "rule cascade mixes .* ngram has none; the rules",
        ),
        ({"rule": "cascade"}, "^rule cascade does not go with method auto, use it with method bild or speculative$"),
        ({"rule": "cascade", "method": "autoregressive"}, "this method drafts nothing; the rules that fit are"),
        ({"rule": "cascade", "method": "card"}, "rule cascade needs sequential drafting"),
        ({"rule": "multi_round", "draws": "0"}, "draws is 0"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    options: dict[str, Any], says: str, tiny_pair: tuple[Loaded, Loaded]
) -> None:
    with pytest.raises(UserError, match=says):
        LLM(*tiny_pair, **options)
