"""The bench's parts: tasks, contenders, rules, figures on known numbers, kept answers, two results side by side."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from outpace.bench import contenders, figures, report, tasks
from outpace.bench.contenders import Contender
from outpace.bench.store import ANSWERS, SETTINGS, Record, RecordKey, Store, read_records
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY, Sampling

WARM = Sampling(0.8)
FACTS: dict[str, Any] = {"target": "t", "draft": None, "processor": "p", "commit": "c"}
SETTINGS_MADE = {"target": "t", "max_tokens": 8}


def record(label: str, prompt: str = "a", task: str = "one", rate: float = 10.0, **changes: Any) -> Record:
    """An answer of five tokens whose four decoded ones came at `rate` tokens a second."""
    arrivals = tuple(0.2 + place / rate for place in range(5))
    known = {"precision": "int8", "tokens": (1, 2, 3, 4, 5), "counts": (1,) * 5, "arrivals": arrivals}
    known |= {"seconds": arrivals[-1], "first_token": 0.2}
    return Record(label=label, task=task, prompt=prompt, round=0, **known | changes)  # type: ignore[arg-type]


def write_lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def prompt(name: str, task: str) -> dict[str, Any]:
    return {"id": name, "task": task, "turns": [f"say {name}", "and then?"]}


def test_tasks_alternate_and_each_has_the_first_prompts(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", *(prompt(name, "x") for name in "abc"), prompt("a", "y"))
    two = write_lines(tmp_path / "two.jsonl", {"turns": ["hello"]})
    found = tasks.collect([str(one), str(two)], 2)
    assert [(one.task, one.name) for one in found] == [("x", "a"), ("y", "a"), ("two", "1"), ("x", "b")]
    assert found[0].text == "say a", "the first turn"


def test_later_turns_follow_the_first_as_tasks_of_their_own(tmp_path: Path) -> None:
    """Only conversations whose first turn is measured have later turns; conversations differ in length."""
    turns = ["one", "two", "three"]
    lines = [{"id": name, "turns": turns[:count]} for name, count in (("a", 1), ("b", 3), ("c", 2), ("d", 3))]
    file = str(write_lines(tmp_path / "t.jsonl", *lines))
    found = tasks.collect([file], 3, 3)
    expected = [("t", "a", 0), ("t", "b", 0), ("t 2", "b", 1), ("t 3", "b", 2), ("t", "c", 0), ("t 2", "c", 1)]
    assert [(one.task, one.name, len(one.before)) for one in found] == expected
    assert [(one.text, one.before) for one in found[2:4]] == [("two", ("one",)), ("three", ("one", "two"))]
    assert (found[3].earlier_turn(0), found[3].earlier_turn(1)) == (found[1], found[2])
    assert [one.name for one in tasks.collect([file], 2)] == ["a", "b"], "one turn unless more are requested"


def test_turns_need_a_template(tmp_path: Path) -> None:
    file, bare = str(write_lines(tmp_path / "t.jsonl", prompt("a", "t"))), SimpleNamespace(has_template=False)
    tasks.check_turns(tasks.collect([file], 5), bare)
    with pytest.raises(UserError, match="--turns needs a model with a chat template"):
        tasks.check_turns(tasks.collect([file], 5, 2), bare)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("repetition", {"edit": 10, "refactor": 10, "document": 10}),
        ("summaries", {"summary": 10}),
        ("answers", {"sentences": 10, "capitals": 10, "numbers": 10}),
        (tasks.BUILT_IN, None),
    ],
)
def test_the_shipped_prompts_need_no_file(name: str, counts: dict[str, int] | None) -> None:
    found = tasks.collect([name], 10)
    assert counts is None or Counter(one.task for one in found) == counts
    assert len({one.text for one in found}) == len(found)
    assert len(tasks.collect([name], 2)) == 2 * len({one.task for one in found})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ["b"', "line 2 is not JSON .* the file seems torn"),
        ('{"turns": ["a"]}\n\n{"turns": ["b"]}\n', "line 2 is empty"),
        ('{"turns": []}\n', "line 1 must be a JSON object with"),
        ('{"turns": [" "]}\n', "line 1 must be"),
        ("[1]\n", "line 1 must be"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ("\xff\n", "line 1 is not JSON"),
        ("", "is empty"),
        (2 * '{"turns": ["a"], "id": "a", "task": "x"}\n', "'a' of the task x is there twice"),
    ],
)
def test_a_bad_task_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        tasks.collect([str(file)], 5)


@pytest.mark.parametrize(
    ("source", "message"),
    [("gsm9k", "did you mean 'gsm8k'"), ("/nowhere/p.jsonl", "cannot be read"), ("hub:x/y", "x/y")],
)
def test_an_unknown_task(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks.collect([source], 5)


@pytest.mark.parametrize(
    ("label", "lossy"),
    [
        ("autoregressive", False),
        ("speculative:draft_length=2", False),
        ("speculative:width=1,rule=lenience,lenience=0.4", True),
        ("bild", True),
        ("bild:rule=greedy", False),
        ("auto:rule=top_beta", True),
        ("speculative:rule=typical,temperature=0.5", True),
        ("autoregressive:temperature=1", False),
    ],
)
def test_lossy_methods_are_known_by_their_rules(label: str, lossy: bool) -> None:
    assert contenders.is_lossy(contenders.parse_methods(label, {})[-1]) is lossy
    row = figures.table_rows([record("autoregressive"), record(label)])[-1]
    said = any(f"{label} is lossy" in line for line in report._remarks([row], {"cores": 2}))
    assert said is lossy


def test_methods_have_options_of_their_own() -> None:
    found = contenders.parse_methods(
        "card:drafter=model+ngram,branches=2,speculative,nodes=4, speculative:draft-length=2,autoregressive",
        {"worker": "inline", "nodes": 6},
    )
    card = {"worker": "inline", "nodes": 6, "drafter": "model+ngram", "branches": "2"}
    assert found == [
        Contender("autoregressive", "autoregressive", {}),
        Contender("card:drafter=model+ngram,branches=2", "card", card),
        Contender("speculative:nodes=4", "speculative", {"nodes": 4}),
        Contender("speculative:draft-length=2", "speculative", {"nodes": 6, "draft_length": "2"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("card,card", "card twice"),
        ("nodes=4", "write NAME or NAME:OPTION=VALUE"),
        ("card,,speculative", "write NAME"),
        ("card:nodes=", "write NAME"),
        ("card:nodes=4,nodes=5", "gives nodes twice"),
        ("auto:profile=maybe", "profile is 'maybe', it must be true or false"),
        ("card:nodes=many", "nodes is 'many', it must be a whole number"),
        ("speculative,auto", "none of them has a worker: leave out worker 'process'"),
    ],
)
def test_bad_methods_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        contenders.parse_methods(text, {"worker": "process"} if "worker" in message else {})


def test_no_key_of_an_address_is_in_a_label() -> None:
    _, one, other = contenders.parse_methods("card:worker=grpc://KEY@h:1,nodes=4,pearl:worker=grpc://b@h:2", {})
    assert (one.label, one.options["worker"]) == ("card:worker=grpc://h:1,nodes=4", "grpc://KEY@h:1")
    assert (other.label, other.options["worker"]) == ("pearl:worker=grpc://h:2", "grpc://b@h:2")


def test_peers_are_found_by_their_files() -> None:
    assert "transformers" in contenders.peer_names()
    assert not [name for name in contenders.peer_names() if name.startswith("_")]
    assert [peer.label for peer in contenders.parse_peers("transformers, ")] == ["transformers"]
    with pytest.raises(UserError, match=r"unknown peer 'transformer', .* did you mean 'transformers'"):
        contenders.parse_peers("transformer")
    with pytest.raises(UserError, match="transformers twice"):
        contenders.parse_peers("transformers,transformers")


def test_speeds_are_pooled_and_have_quartiles() -> None:
    plain = [record("autoregressive", name, rate=10) for name in "ab"]
    ours = [record("card", "a", rate=40), record("card", "b", rate=10)]
    base, row = figures.table_rows([*ours, *plain], ["card"])
    assert (base.label, row.label) == ("autoregressive", "card"), "plain decoding comes first"
    assert base.tokens_per_second == pytest.approx(10.0)
    assert base.speedup == pytest.approx(1.0)
    assert row.tokens_per_second == pytest.approx(8 / (0.1 + 0.4)), "all tokens over all time, not a mean of rates"
    assert row.speedup == pytest.approx(1.6)
    assert row.quartiles == pytest.approx((17.5, 25.0, 32.5))
    assert row.speedup_quartiles == pytest.approx((1.75, 2.5, 3.25))
    assert row.worst_speedup == pytest.approx(1.0)
    assert (row.prompts, row.tokens) == (2, 10)
    assert row.time_to_first_token == pytest.approx(0.2)
    gaps = [0.025] * 4 + [0.1] * 4
    assert row.inter_token_p50 == pytest.approx(np.percentile(gaps, 50))
    assert row.inter_token_p99 == pytest.approx(np.percentile(gaps, 99))


def test_a_speedup_covers_the_prompts_that_both_finished() -> None:
    plain = [record("autoregressive", "a", rate=10), record("autoregressive", "b", rate=50)]
    ours = [record("card", "a", rate=20), replace(record("card", "b"), failed="RuntimeError: gone", tokens=())]
    row = figures.table_rows([*plain, *ours])[1]
    assert row.speedup == pytest.approx(2.0)
    assert (row.prompts, row.failed, row.reason) == (1, 1, "RuntimeError: gone")


def test_a_prompt_counts_once_whatever_its_number_of_repetitions() -> None:
    many = [replace(record("autoregressive", rate=rate), round=n) for n, rate in enumerate([10.0, 20.0, 90.0])]
    (row,) = figures.table_rows(many)
    assert row.quartiles == pytest.approx((20.0, 20.0, 20.0))
    assert row.prompts == 1


def test_accepted_tokens_are_summed_over_answers() -> None:
    one = record("card", "a", counts=(1, 3, 2), arrivals=(0.1, 0.2, 0.3), drafted=4, accepted=3)
    one = replace(one, positions=((2, 2), (2, 1)), hits=3, misses=1, tokens=(1,) * 6)
    two = record("card", "b", counts=(1, 1), arrivals=(0.1, 0.2), drafted=4, accepted=0, positions=((2, 0),), misses=4)
    row = figures.table_rows([one, two])[0]
    assert row.mean_accepted_length == pytest.approx(8 / 5)
    assert row.draft_acceptance == pytest.approx(3 / 8)
    assert row.hit_rate == pytest.approx(3 / 8)
    assert row.acceptance_by_position == pytest.approx((0.5, 0.5))
    assert row.reached_by_position == (4, 2)


def test_experts_per_pass_are_a_mean_over_passes() -> None:
    one = record("card", "a", counts=(1, 3, 2), arrivals=(0.1, 0.2, 0.3), experts=8.0)
    two = record("card", "b", counts=(5,), arrivals=(0.1,), experts=12.0)
    rows = figures.table_rows([one, two])
    assert rows[0].experts_per_pass == pytest.approx(9.0)
    assert figures.table_rows([record("card")])[0].experts_per_pass is None
    console = Console(width=200)
    with console.capture() as shown:
        console.print(report.table(report.COST_COLUMNS, rows))
    assert re.search(r"experts.*\n.*per pass(.*\n)+.* 9\.0 ", shown.get())


@pytest.mark.parametrize(
    ("text", "expected"),
    [((1, 2), None), ((1, 9), (1, 2, 9)), ((1,), (1, 2, None)), ((1, 2, 3), (2, None, 3)), ((), (0, 1, None))],
)
def test_the_first_divergence(text: tuple[int, ...], expected: tuple[Any, ...] | None) -> None:
    found = figures.first_divergence("t", "p", (1, 2), text)
    assert (found and (found.position, found.plain_token, found.token)) == expected


def test_texts_are_compared_with_plain_decoding_of_the_same_precision() -> None:
    same, other = record("card"), record("peer", is_peer=True, tokens=(1, 2, 7, 4, 5))
    coarse = replace(other, label="coarse", precision="Q4_0")
    found = {row.label: row for row in figures.table_rows([record("autoregressive"), same, other, coarse])}
    assert [found[name].equal_text for name in ("card", "peer", "coarse")] == [True, False, None]
    assert found["peer"].divergence == figures.Divergence("one", "a", 2, 3, 7)
    assert (found["peer"].different, found["peer"].compared) == (1, 1)


def test_a_batch_counts_all_its_tokens_over_all_its_time() -> None:
    alone = [record("autoregressive", name, tokens=tokens) for name, tokens in (("a", (1, 2)), ("b", (3,)))]
    known: dict[str, Any] = {"batch": 2, "prompts": (("one", "a"), ("one", "b")), "tokens": (), "task": "all"}
    plain = record("autoregressive", "group 0", seconds=1.0, texts=((1, 2), (3,)), **known)
    ours = record("card", "group 0", seconds=0.5, texts=((1, 2), (4,)), **known)
    base, row = [row for row in figures.table_rows([*alone, plain, ours]) if row.batch == 2]
    assert (base.tokens_per_second, row.tokens_per_second) == (3.0, 6.0)
    assert row.speedup == pytest.approx(2.0)
    assert (base.equal_text, row.equal_text) == (True, False)
    assert row.divergence == figures.Divergence("one", "b", 0, 3, 4)


def test_answers_are_kept_and_read_again(tmp_path: Path) -> None:
    """A failed answer is measured again; a torn last line is dropped."""
    kept = [record("card", positions=((2, 1),)), replace(record("card", "b"), failed="gone")]
    store = Store(tmp_path / "out", SETTINGS_MADE)
    for one in kept:
        store.add(one)
    with (tmp_path / "out" / ANSWERS).open("a") as file:
        file.write('{"label": "card", "ta')
    assert list(read_records(tmp_path / "out")) == kept
    again = Store(tmp_path / "out", SETTINGS_MADE)
    assert again.records == {RecordKey("card", "one", "a", 0, 1): kept[0]}
    again.add(record("card", "c"))
    assert [one.prompt for one in read_records(tmp_path / "out")] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"label": "c", "task": "t", "prompt": "p", "round": "x"}'])
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    Store(tmp_path, SETTINGS_MADE).add(record("card"))
    with (tmp_path / ANSWERS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="line 2 is no finished answer"):
        Store(tmp_path, SETTINGS_MADE)


def test_a_folder_of_another_bench_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS_MADE)
    with pytest.raises(UserError, match="was made with max_tokens 8, now it is 9; name another folder"):
        Store(tmp_path, SETTINGS_MADE | {"max_tokens": 9})
    (tmp_path / SETTINGS).write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        Store(tmp_path, SETTINGS_MADE)


def labels(methods: str, rules: str, sampling: Sampling = WARM) -> list[str]:
    found = contenders.with_rules(contenders.parse_methods(methods, {}), rules, sampling)
    return [contender.label for contender in found]


def test_each_method_is_measured_with_each_rule() -> None:
    methods = contenders.parse_methods("speculative:draft_length=2,bild,speculative:rule=block", {})
    found = contenders.with_rules(methods, "gumbel,lenience:lenience=0.4", WARM)
    length, lenient = {"draft_length": "2"}, {"rule": "lenience", "lenience": "0.4"}
    assert [(one.label, dict(one.options)) for one in found] == [
        ("autoregressive", {}),
        ("speculative:draft_length=2,rule=gumbel", length | {"rule": "gumbel"}),
        ("speculative:draft_length=2,rule=lenience,lenience=0.4", length | lenient),
        ("bild:rule=gumbel", {"rule": "gumbel"}),
        ("bild:rule=lenience,lenience=0.4", lenient),
        ("speculative:rule=block", {"rule": "block"}),
    ]
    assert [contenders.is_lossy(contenders.parse_methods(one.label, {})[-1]) for one in found[1:3]] == [False, True]


def test_all_rules_are_those_that_fit() -> None:
    assert labels("card", "all", GREEDY) == ["autoregressive", "card:rule=greedy"]
    found = {label.partition("rule=")[2] for label in labels("speculative", "all", GREEDY)[1:]}
    assert found == {"greedy", "top_beta", "cascade", "rollback"}, "a judge needs a file"
    sampled = {label.partition("rule=")[2] for label in labels("speculative", "all")}
    assert set(registry.names("rules")) - sampled == {"greedy", "judge", "top_beta"}


@pytest.mark.parametrize(
    ("sampling", "rules", "expected"),
    [
        (GREEDY, "top_beta", ["greedy", "top_beta"]),
        (GREEDY, "greedy,top_beta", ["greedy", "top_beta"]),
        (GREEDY, "top_beta,lenience", ["greedy", "top_beta", "gumbel,temperature=1", "lenience,temperature=1"]),
        (
            GREEDY,
            "block,lenience:temperature=0.5",
            ["block,temperature=1", "gumbel,temperature=0.5", "lenience,temperature=0.5"],
        ),
        (WARM, "top_beta,lenience", ["greedy,temperature=0", "top_beta,temperature=0", "gumbel", "lenience"]),
    ],
)
def test_lossy_rules_are_measured_with_a_lossless_one_at_a_temperature_that_fits(
    sampling: Sampling, rules: str, expected: list[str]
) -> None:
    found = contenders.with_rules(contenders.parse_methods("speculative", {}), rules, sampling)
    plain = [one.label for one in found if one.name == contenders.PLAIN]
    assert plain[0] == contenders.PLAIN
    assert {contenders.baseline(one.label) for one in found} | {plain[0]} == {*plain}
    assert [one.label for one in found[len(plain) :]] == [f"speculative:rule={rule}" for rule in expected]
    for one in found:
        assert (
            f"temperature={one.temperature:g}" in one.label if one.temperature is not None else "temp" not in one.label
        )


@pytest.mark.parametrize(
    ("methods", "rules", "message"),
    [
        ("speculative", "blok", "unknown rule 'blok', .* did you mean 'block'"),
        ("card", "block", "rule block needs sequential drafting, use it with method speculative"),
        ("speculative:drafter=ngram", "cascade", "drafter ngram has none; the rules that fit are"),
        ("speculative", "greedy:temperature=0.8", "rule greedy does not work with temperature 0.8"),
        ("speculative", "typical:temperature=warm", "temperature is 'warm', it must be a number"),
        ("speculative:nodes=2.5", "block", "nodes is '2.5', it must be a whole number"),
        ("speculative", "lenience:", "rules is 'lenience:': write NAME"),
        ("speculative,speculative:rule=block", "block", "have speculative:rule=block twice"),
    ],
)
def test_rules_that_do_not_fit_are_refused(methods: str, rules: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        labels(methods, rules)


def test_the_quality_of_texts_is_summed_over_answers() -> None:
    judged = [
        record("speculative:rule=lenience", prompt="a", relaxed=2, surprise=5 * math.log(3), correct=True),
        record("speculative:rule=lenience", prompt="b", relaxed=0, surprise=5 * math.log(3), correct=False),
        record("speculative:rule=lenience", prompt="c"),
    ]
    row = figures.table_rows(judged)[0]
    assert (row.relaxed, row.perplexity) == (pytest.approx(0.2), pytest.approx(3.0))
    assert (row.accuracy, row.scored) == (0.5, 2)
    bare = figures.table_rows([record("speculative")])[0]
    assert (bare.relaxed, bare.perplexity, bare.accuracy, bare.scored) == (None, None, None, 0)
