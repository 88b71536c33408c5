"""Rules side by side in the bench: what theory predicts, what texts are worth, right answers, and the plot of both."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from files import write_gguf
from test_bench import record
from test_bench_run import Run, benching, by_label, last

from outpace.api.llm import load
from outpace.bench import contenders, figures, report
from outpace.bench.judging import surprise
from outpace.core import registry, theory
from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY, Sampling

WARM = Sampling(0.8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "prompts.jsonl"
    file.write_text(
        '{"id": "a", "task": "one", "turns": ["hello world"], "reference": "no such text"}\n'
        '{"id": "b", "task": "two", "turns": ["12 12 12"], "choices": ["x", "y"], "reference": "x"}\n'
    )
    return file


@pytest.fixture
def run(tiny: Path, asked: Path, tmp_path: Path) -> Iterator[Run]:
    with benching(tiny, asked, tmp_path) as call:
        yield call


def labels(methods: str, rules: str, sampling: Sampling = WARM) -> list[str]:
    found = contenders.with_rules(contenders.parse_methods(methods, {}), rules, sampling)
    return [contender.label for contender in found]


def test_each_method_is_measured_with_each_rule() -> None:
    found = contenders.with_rules(
        contenders.parse_methods("speculative:draft_length=2,bild,speculative:rule=block", {}),
        "gumbel,lenience:lenience=0.4",
        WARM,
    )
    assert [(one.label, dict(one.options)) for one in found] == [
        ("autoregressive", {}),
        ("speculative:draft_length=2,rule=gumbel", {"draft_length": "2", "rule": "gumbel"}),
        (
            "speculative:draft_length=2,rule=lenience,lenience=0.4",
            {"draft_length": "2", "rule": "lenience", "lenience": "0.4"},
        ),
        ("bild:rule=gumbel", {"rule": "gumbel"}),
        ("bild:rule=lenience,lenience=0.4", {"rule": "lenience", "lenience": "0.4"}),
        ("speculative:rule=block", {"rule": "block"}),
    ]
    assert [contenders.is_lossy(contenders.parse_methods(one.label, {})[-1]) for one in found[1:3]] == [False, True]


def test_all_rules_are_those_that_fit() -> None:
    assert labels("card", "all", GREEDY) == ["autoregressive", "card:rule=greedy"]
    assert "speculative:rule=top_beta" in labels("speculative", "all", GREEDY)
    sampled = labels("speculative", "all")
    assert {f"speculative:rule={name}" for name in registry.names("rules")} - set(sampled) == {
        "speculative:rule=greedy",
        "speculative:rule=top_beta",
    }


@pytest.mark.parametrize(
    ("methods", "rules", "message"),
    [
        ("speculative", "blok", "unknown rule 'blok', .* did you mean 'block'"),
        ("card", "block", "rule block needs sequential drafting, use it with method speculative"),
        ("speculative:drafter=ngram", "cascade", "drafter ngram has none; the rules that fit are"),
        ("speculative", "greedy", "rule greedy does not work with temperature 0.8"),
        ("speculative", "lenience:", "rules is 'lenience:': write NAME"),
        ("speculative", "block,block", "have speculative:rule=block twice"),
        ("speculative,speculative:rule=block", "block", "have speculative:rule=block twice"),
    ],
)
def test_rules_that_cannot_be_are_refused(methods: str, rules: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        labels(methods, rules)


def drafting(label: str, **changes: Any) -> Any:
    """Four rounds after the first: two verified one token, two verified two."""
    known = {"positions": ((5, 4), (2, 1)), "lengths": (0, 2, 2), "draft_seconds": 0.2, "target_seconds": 0.8}
    return record(label, **known | changes)


def test_theory_predicts_from_the_measured_acceptance() -> None:
    plain = record("autoregressive", target_seconds=0.4, lengths=(4,))
    row = figures.table_rows([plain, drafting("speculative")])[1]
    assert row.predicted_length == pytest.approx((1.8 + (1 + 0.8 + 0.8 * 0.5)) / 2)
    alpha = 5 / 7
    assert row.constant_length == pytest.approx(sum(theory.expected_tokens(alpha, n) for n in (1, 2)) / 2)
    assert row.predicted_speedup == pytest.approx(row.predicted_length / (0.05 / 0.1 + 0.2 / 0.1))
    base = figures.table_rows([plain])[0]
    assert (base.predicted_length, base.predicted_speedup) == (None, None)


def test_one_length_gives_what_was_measured() -> None:
    """Where each round offers as much and none is left out, the products telescope: theory is the record itself."""
    one = drafting("speculative", positions=((4, 3), (3, 1)), lengths=(0, 0, 4), counts=(1, 3, 2, 2, 1))
    found = figures._predictions([one], [])
    assert found["predicted_length"] == pytest.approx(1 + 3 / 4 + 1 / 4) == sum((3, 2, 2, 1)) / 4
    assert found["predicted_speedup"] is None


def test_what_texts_are_worth_is_summed_over_answers() -> None:
    told = [
        drafting("speculative:rule=lenience", prompt="a", relaxed=2, surprise=5 * math.log(3), correct=True),
        drafting("speculative:rule=lenience", prompt="b", relaxed=0, surprise=5 * math.log(3), correct=False),
        drafting("speculative:rule=lenience", prompt="c"),
    ]
    row = figures.table_rows(told)[0]
    assert (row.relaxed, row.perplexity) == (pytest.approx(0.2), pytest.approx(3.0))
    assert (row.accuracy, row.scored) == (0.5, 2)
    bare = figures.table_rows([record("speculative")])[0]
    assert (bare.relaxed, bare.perplexity, bare.accuracy, bare.scored) == (None, None, None, 0)
    assert report.quality_table([bare]) is None, "nothing to show"
    shown = report.quality_table([row])
    assert shown is not None
    assert [str(column.header).replace("\n", " ") for column in shown.columns][-3:] == [
        "relaxed",
        "perplexity",
        "right",
    ]


def test_the_surprise_of_a_text_is_that_of_its_tokens(tiny: Path) -> None:
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        prompt = [5, 6, 7]
        result = llm.generate([prompt], max_tokens=6, logprobs=0, temperature=1.5, ignore_eos=True)[0]
        expected = -sum(found.logprob for found in result.logprobs)
        assert expected > 1
        assert surprise(llm.target.model, prompt, result.tokens) == pytest.approx(expected, abs=1e-4)
        assert surprise(llm.target.model, prompt, []) == 0.0
        long = [3 + number % 40 for number in range(100)]
        with pytest.MonkeyPatch.context() as patch:
            whole = surprise(llm.target.model, prompt, long)
            patch.setattr("outpace.bench.judging.CHUNK", 7)
            assert surprise(llm.target.model, prompt, long) == pytest.approx(whole, abs=1e-3)


def test_a_bench_of_rules_judges_its_texts_and_goes_on(run: Run, tiny: Path, tmp_path: Path) -> None:
    kept = ("--out", tmp_path / "out", "--plot", tmp_path / "plot.svg")
    what = (
        "--draft",
        tiny,
        "--methods",
        "speculative",
        "--rules",
        "gumbel,typical:epsilon=0.001",
        "--temperature",
        0.8,
    )
    code, out, _ = run(*what, *kept)
    assert code == 0
    lossy = "speculative:rule=typical,epsilon=0.001"
    found = by_label(out)
    assert list(found) == ["autoregressive", "speculative:rule=gumbel", lossy]
    assert found["autoregressive"]["perplexity"] == found["speculative:rule=gumbel"]["perplexity"] > 1
    assert found[lossy]["perplexity"] > 1
    assert found[lossy]["relaxed"] > 0
    assert found["speculative:rule=gumbel"]["relaxed"] is None
    assert {row["scored"] for row in found.values()} == {2}
    assert {row["accuracy"] for row in found.values()} == {0.0}
    assert found["speculative:rule=gumbel"]["predicted_length"] > 1
    assert f"{lossy} is lossy" in out
    drawn = (tmp_path / "plot.svg").read_text()
    ElementTree.fromstring(drawn)
    written = (tmp_path / "out" / "answers.jsonl").read_text()
    code, again, _ = run(*what, *kept)
    assert code == 0
    for before, after in zip(last(out)["rows"], last(again)["rows"], strict=True):
        assert before | {"commit": None} == after | {"commit": None}
    assert (tmp_path / "out" / "answers.jsonl").read_text() == written, "nothing is measured or judged twice"


def test_programs_are_not_run_where_they_cannot_be_confined(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.sandbox.is_available", lambda: False)
    code, _, err = run("--methods", "speculative", "--run-tests")
    assert code == 2
    assert "error: --run-tests confines programs by Linux's seccomp, which does not work here" in err


def test_a_lossless_bench_costs_no_pass_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise AssertionError

    monkeypatch.setattr("outpace.bench.judging.surprise", fail)
    code, out, _ = run("--methods", "speculative")
    assert code == 0
    assert by_label(out)["speculative"]["perplexity"] is None
    assert torch.get_num_threads() > 0
