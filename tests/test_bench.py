"""The bench's parts: tasks, contenders, figures on known numbers, kept answers, two results side by side."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.bench import compare, contenders, figures, report, tasks
from outpace.bench.contenders import Contender
from outpace.bench.store import ANSWERS, SETTINGS, Record, RecordKey, Store, read_records
from outpace.core.errors import UserError

FACTS: dict[str, Any] = {"target": "t", "draft": None, "inflate": 1, "processor": "p", "commit": "c"}
SETTINGS_MADE = {"target": "t", "max_tokens": 8}


def record(label: str, prompt: str = "a", task: str = "one", rate: float = 10.0, **changes: Any) -> Record:
    """An answer of five tokens whose four decoded ones came at `rate` tokens a second."""
    arrivals = tuple(0.2 + place / rate for place in range(5))
    known = {"precision": "int8", "tokens": (1, 2, 3, 4, 5), "counts": (1,) * 5, "arrivals": arrivals}
    known |= {"seconds": arrivals[-1], "first_token": 0.2}
    return Record(label, task, prompt, 0, **known | changes)  # type: ignore[arg-type]


def write_lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def prompt(name: str, task: str) -> dict[str, Any]:
    return {"id": name, "task": task, "turns": [f"say {name}", "and then?"]}


def test_tasks_come_in_turn_and_each_has_so_many_prompts(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", *(prompt(name, "x") for name in "abc"), prompt("a", "y"))
    two = write_lines(tmp_path / "two.jsonl", {"turns": ["hello"]})
    found = tasks.collect([str(one), str(two)], 2)
    assert [(asked.task, asked.name) for asked in found] == [("x", "a"), ("y", "a"), ("two", "1"), ("x", "b")]
    assert found[0].text == "say a", "the first turn is asked"


def test_our_own_prompts_need_no_file() -> None:
    found = tasks.collect([tasks.BUILT_IN], 2)
    assert len(found) == 2 * len({asked.task for asked in found}) > 2
    assert len({asked.text for asked in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ["b"', "line 2 is not JSON .* the file seems torn"),
        ('{"turns": ["a"]}\n\n{"turns": ["b"]}\n', "line 2 is empty"),
        ('{"turns": []}\n', "line 1 must be a JSON object with"),
        ('{"turns": [" "]}\n', "line 1 must be"),
        ('{"turns": "a"}\n', "line 1 must be"),
        ("[1]\n", "line 1 must be"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ("\xff\n", "line 1 is not JSON"),
        ("", "is empty"),
    ],
)
def test_a_bad_task_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        tasks.collect([str(file)], 5)


def test_a_prompt_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", prompt("a", "x"), prompt("a", "x"))
    with pytest.raises(UserError, match="'a' of the task x is there twice"):
        tasks.collect([str(file)], 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [("gsm9k", "did you mean 'gsm8k'"), ("/nowhere/p.jsonl", "cannot be read"), ("hub:x/y", "x/y")],
)
def test_a_task_that_is_not_there(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks.collect([source], 5)


@pytest.mark.parametrize(
    ("label", "lossy"),
    [
        ("autoregressive", False),
        ("auto", False),
        ("speculative:draft_length=2", False),
        ("speculative:rule=block", False),
        ("speculative:width=1,rule=lenience,lenience=0.4", True),
        ("bild", True),
        ("bild:rule=greedy", False),
    ],
)
def test_lossy_methods_are_known_by_their_rules(label: str, lossy: bool) -> None:
    assert contenders.is_lossy(contenders.parse_methods(label, {})[-1]) is lossy
    row = figures.table_rows([record("autoregressive"), record(label)])[-1]
    said = any(f"{label} is lossy" in line for line in report._remarks([row]))
    assert said is lossy


def test_methods_carry_their_own_options() -> None:
    found = contenders.parse_methods(
        "card:drafter=model+ngram,branches=2,speculative,nodes=4, speculative:draft-length=2,autoregressive",
        {"worker": "inline", "nodes": 6},
    )
    assert found == [
        Contender("autoregressive", "autoregressive", {}),
        Contender(
            "card:drafter=model+ngram,branches=2",
            "card",
            {"worker": "inline", "nodes": 6, "drafter": "model+ngram", "branches": "2"},
        ),
        Contender("speculative:nodes=4", "speculative", {"nodes": 4}),
        Contender("speculative:draft-length=2", "speculative", {"nodes": 6, "draft_length": "2"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crad", "did you mean 'card'"),
        ("card,card", "card twice"),
        ("nodes=4", "write NAME or NAME:OPTION=VALUE"),
        ("card,,speculative", "write NAME"),
        ("card:", "write NAME"),
        ("card:nodes", "write NAME"),
        ("card:nodes=", "write NAME"),
        ("card:nodes=4,nodes=5", "gives nodes twice"),
        ("auto:profile=maybe", "profile is 'maybe', it must be true or false"),
        ("card:nodes=many", "nodes is 'many', it must be a whole number"),
    ],
)
def test_bad_methods_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        contenders.parse_methods(text, {})


def test_a_worker_that_no_method_has_is_refused() -> None:
    with pytest.raises(UserError, match="none of them has a worker: leave out worker 'process'"):
        contenders.parse_methods("speculative,auto", {"worker": "process"})


def test_peers_are_found_by_their_files() -> None:
    assert "transformers" in contenders.peer_names()
    assert not [name for name in contenders.peer_names() if name.startswith("_")]
    assert [peer.label for peer in contenders.parse_peers("transformers, ")] == ["transformers"]
    with pytest.raises(UserError, match=r"unknown peer 'transformer', .* did you mean 'transformers'"):
        contenders.parse_peers("transformer")
    with pytest.raises(UserError, match="transformers twice"):
        contenders.parse_peers("transformers,transformers")


def test_quartiles_lie_between_the_nearest_values() -> None:
    values = np.random.default_rng(0).normal(size=39).tolist()
    low, high = sorted(values)[9:11], sorted(values)[28:30]
    assert figures.quartiles(values) == pytest.approx((sum(low) / 2, sorted(values)[19], sum(high) / 2))
    assert figures.quartiles([4.0, 1.0]) == (1.75, 2.5, 3.25)
    assert figures.quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert figures.quartiles([]) is None


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


def test_a_speedup_is_of_the_prompts_that_both_finished() -> None:
    plain = [record("autoregressive", "a", rate=10), record("autoregressive", "b", rate=50)]
    ours = [record("card", "a", rate=20), replace(record("card", "b"), failed="RuntimeError: gone", tokens=())]
    row = figures.table_rows([*plain, *ours])[1]
    assert row.speedup == pytest.approx(2.0)
    assert (row.prompts, row.failed, row.reason) == (1, 1, "RuntimeError: gone")


def test_a_prompt_counts_once_however_many_rounds_it_had() -> None:
    rates = [10.0, 20.0, 90.0]
    many = [replace(record("autoregressive", "a", rate=rate), round=n) for n, rate in enumerate(rates)]
    (row,) = figures.table_rows(many)
    assert row.quartiles == pytest.approx((20.0, 20.0, 20.0))
    assert row.prompts == 1


def test_tasks_have_a_row_each_and_one_for_all() -> None:
    found = figures.table_rows(
        [record(label, "a", task) for task in ("x", "y") for label in ("autoregressive", "card")]
    )
    assert [(row.task, row.label) for row in found] == [
        (task, label) for task in ("x", "y", "all") for label in ("autoregressive", "card")
    ]
    assert [row.prompts for row in found] == [1, 1, 1, 1, 2, 2]


def test_what_was_accepted_is_summed_over_answers() -> None:
    one = record("card", "a", counts=(1, 3, 2), arrivals=(0.1, 0.2, 0.3), drafted=4, accepted=3)
    one = replace(one, positions=((2, 2), (2, 1)), hits=3, misses=1, tokens=(1,) * 6)
    two = record("card", "b", counts=(1, 1), arrivals=(0.1, 0.2), drafted=4, accepted=0, positions=((2, 0),), misses=4)
    row = figures.table_rows([one, two])[0]
    assert row.mean_accepted_length == pytest.approx(8 / 5)
    assert row.draft_acceptance == pytest.approx(3 / 8)
    assert row.hit_rate == pytest.approx(3 / 8)
    assert row.acceptance_by_position == pytest.approx((0.5, 0.5))
    assert row.reached_by_position == (4, 2)


def test_a_peer_tells_rates_and_no_counts() -> None:
    peers = [record("p", "a", is_peer=True, by_position=(0.5, 0.2), hit_rate=0.5), record("p", "b", by_position=(1.0,))]
    row = figures.table_rows(peers)[0]
    assert (row.peer, row.method) == ("p", None)
    assert row.acceptance_by_position == pytest.approx((0.75, 0.2))
    assert (row.hit_rate, row.draft_acceptance) == (0.5, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [((1, 2), None), ((1, 9), (1, 2, 9)), ((1,), (1, 2, None)), ((1, 2, 3), (2, None, 3)), ((), (0, 1, None))],
)
def test_the_first_divergence(text: tuple[int, ...], expected: tuple[Any, ...] | None) -> None:
    found = figures.first_divergence("t", "p", (1, 2), text)
    assert (found and (found.position, found.plain_token, found.token)) == expected


def test_texts_are_held_against_plain_decoding_of_the_same_precision() -> None:
    same, other = record("card"), record("peer", is_peer=True, tokens=(1, 2, 7, 4, 5))
    coarse = replace(other, label="coarse", precision="Q4_0")
    found = {row.label: row for row in figures.table_rows([record("autoregressive"), same, other, coarse])}
    assert [found[name].equal_text for name in ("card", "peer", "coarse")] == [True, False, None]
    assert found["peer"].divergence == figures.Divergence("one", "a", 2, 3, 7)
    assert (found["peer"].different, found["peer"].compared) == (1, 1)


def test_a_batch_counts_all_its_tokens_over_all_its_time() -> None:
    alone = [record("autoregressive", name, tokens=tokens) for name, tokens in (("a", (1, 2)), ("b", (3,)))]
    known: dict[str, Any] = {"batch": 2, "precision": "int8", "prompts": (("one", "a"), ("one", "b"))}
    plain = Record("autoregressive", "all", "group 0", 0, seconds=1.0, texts=((1, 2), (3,)), **known)
    ours = Record("card", "all", "group 0", 0, seconds=0.5, texts=((1, 2), (4,)), **known)
    base, row = [row for row in figures.table_rows([*alone, plain, ours]) if row.batch == 2]
    assert (base.tokens_per_second, row.tokens_per_second) == (3.0, 6.0)
    assert row.speedup == pytest.approx(2.0)
    assert (base.equal_text, row.equal_text) == (True, False)
    assert row.divergence == figures.Divergence("one", "b", 0, 3, 4)


def test_answers_are_kept_and_read_again(tmp_path: Path) -> None:
    kept = [record("card", positions=((2, 1),)), replace(record("card", "b"), failed="gone")]
    store = Store(tmp_path / "out", SETTINGS_MADE)
    for one in kept:
        store.add(one)
    again = Store(tmp_path / "out", SETTINGS_MADE)
    assert list(again.records.values()) == kept[:1], "what failed is tried again"
    assert list(read_records(tmp_path / "out")) == kept
    assert again.has(RecordKey("card", "one", "a", 0, 1))


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS_MADE).add(record("card", "a"))
    with (tmp_path / ANSWERS).open("a") as file:
        file.write('{"label": "card", "ta')
    again = Store(tmp_path, SETTINGS_MADE)
    again.add(record("card", "b"))
    assert [one.prompt for one in read_records(tmp_path)] == ["a", "b"]


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
    with pytest.raises(UserError, match="is no JSON object"):
        Store(tmp_path, SETTINGS_MADE)


def made_rows(rate: float, **facts: Any) -> list[dict[str, Any]]:
    found = figures.table_rows([record("autoregressive"), record("card", rate=rate)])
    return report.plain_rows(found, FACTS | facts)


def test_two_results_stand_side_by_side(tmp_path: Path) -> None:
    one, other = made_rows(20.0), made_rows(30.0, commit="d")
    found = compare.side_by_side(one[1:], [other[1] | {"task": "more"}, *other])
    assert [row["task"] for row in found] == ["one", "one", "more"], "a task's rows stand together"
    found = compare.side_by_side(one, [*other, other[1] | {"task": "more"}])
    assert [(row["task"], row["method"]) for row in found] == [
        ("one", "autoregressive"),
        ("one", "card"),
        ("more", "card"),
    ]
    assert found[1]["tokens_per_second"] == pytest.approx([20.0, 30.0])
    assert found[1]["ratio"] == pytest.approx(1.5)
    assert found[1]["equal_text"] == [True, True]
    assert found[2]["tokens_per_second"] == [None, pytest.approx(30.0)]
    assert found[2]["ratio"] is None
    assert compare.differences(one, other) == ["commit: A c; B d"]
    assert compare.differences(one, [other[0] | {"prompts": 9}, other[1]])[1:] == ["prompts: A 1; B 9"]
    report.write_json(tmp_path / "a.json", one)
    assert compare.read(tmp_path / "a.json") == one


def test_a_bench_that_was_killed_may_be_compared(tmp_path: Path) -> None:
    store = Store(tmp_path / "out", SETTINGS_MADE)
    for one in (record("autoregressive"), record("card", rate=20.0)):
        store.add(one)
    assert [row["speedup"] for row in compare.read(tmp_path / "out")] == [1.0, pytest.approx(2.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "holds no rows"),
        ('[{"task": "x"}]', "holds no rows"),
        ('[{"task": 1, "method": "card", "tokens_per_second": 1}]', "holds no rows"),
        ('[{"task": "x", "method": "card", "tokens_per_second": "1"}]', "holds no rows"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=message):
        compare.read(tmp_path / "a.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no bench"):
        compare.read(tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be read"):
        compare.read(tmp_path / "nowhere.json")


def test_the_tasks_of_repetition_are_there() -> None:
    asked = tasks.collect(["repetition"], 10)
    assert Counter(one.task for one in asked) == {"edit": 10, "refactor": 10, "document": 10}
    assert len({one.text for one in asked}) == 30
    assert len(tasks.collect(["repetition"], 2)) == 6
    assert Counter(one.task for one in tasks.collect(["summaries"], 10)) == {"summary": 10}
