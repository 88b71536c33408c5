"""Later turns of a conversation in `outpace bench`: behind what plain decoding answered before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from files import write_gguf

from outpace.api.llm import load
from outpace.api.params import SamplingParams
from outpace.bench import run as bench_run
from outpace.bench import tasks
from outpace.bench.contenders import PLAIN, parse_methods
from outpace.bench.method_runner import MethodRunner
from outpace.bench.run import Bench, BenchOptions
from outpace.bench.store import RecordKey, Store
from outpace.bench.tasks import Conversations, check_turns
from outpace.cli.main import main
from outpace.core.errors import UserError

TURNS = ("hello world", "12 hello", "world or")
ANSWER = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversation of three turns, and one of a single turn."""
    monkeypatch.setattr(bench_run, "REST", 0.0)
    monkeypatch.setattr("outpace.core.machine.BUFFER", 8192)
    lines: list[dict[str, Any]] = [
        {"id": "a", "task": "t", "turns": list(TURNS)},
        {"id": "b", "task": "t", "turns": ["12"]},
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_later_turns_are_tasks_of_their_own(talk: Path) -> None:
    found = tasks.collect([str(talk)], 1, 3)
    assert [(one.task, one.text, one.before) for one in found] == [
        ("t", TURNS[0], ()),
        ("t 2", TURNS[1], TURNS[:1]),
        ("t 3", TURNS[2], TURNS[:2]),
    ]
    assert [found[2].task_of(turn) for turn in range(3)] == ["t", "t 2", "t 3"]
    assert [one.name for one in tasks.collect([str(talk)], 2)] == ["a", "b"], "one turn, unless more are asked for"


def test_between_the_turns_stands_what_plain_decoding_answers(tiny: Path, talk: Path, tmp_path: Path) -> None:
    """The prompts are made of the library's own answers; a bench that goes on takes them from its folder."""
    asked: list[Sequence[int]] = []
    with load(tiny, runtime="llama", dtype="float32") as llm:
        methods = tuple(parse_methods("speculative:drafter=ngram", {}))
        options = BenchOptions((str(talk),), methods, turns=3, sampling_params=SamplingParams(max_tokens=ANSWER))
        said: list[dict[str, str]] = []
        for text in TURNS[:2]:
            said.append({"role": "user", "content": text})
            said.append({"role": "assistant", "content": llm.chat(said, SamplingParams(max_tokens=ANSWER)).text})
        for number in range(2):
            store = Store(tmp_path / "out", options.settings(llm))
            with Bench(llm, options, store, print) as bench:
                if number:
                    _spy(bench, asked)
                bench.measure(lambda *_: None)
                rows = {(row.task, row.label): row for row in bench.rows()}
                third = next(bench.encode(one) for one in bench.prompts if one.task == "t 3")
                last = {"role": "user", "content": TURNS[2]}
                assert third == tuple(llm.tokenizer.chat([*said, last]))
                assert {task for task, _ in rows} == {"t", "t 2", "t 3", "all"}
                assert all(row.equal_text for (_, label), row in rows.items() if label != PLAIN)
                assert store.records[RecordKey(PLAIN, "t 3", "a", 0, 1)].failed is None
    assert asked == [], "all was in the folder"


def _spy(bench: Bench, asked: list[Sequence[int]], label: str = PLAIN, most: int = 1000) -> None:
    """Record the prompts of a method; raise KeyboardInterrupt instead of the answer after the first `most`."""
    method = bench._engines[label]
    assert isinstance(method, MethodRunner)
    answer = method.answer

    def spied(prompt: Sequence[int], length: int) -> Any:
        if length == ANSWER:  # no warming up
            if len(asked) == most:
                raise KeyboardInterrupt
            asked.append(tuple(prompt))
        return answer(prompt, length)

    method.answer = spied  # type: ignore[method-assign]


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("stops", [[], [1], [2, 1], [1, 1, 1]])
def test_each_turn_is_written_once_a_way_and_round(
    tiny: Path, talk: Path, tmp_path: Path, rounds: int, stops: list[int]
) -> None:
    """Four prompts, with the three turns of a conversation: measured answers become the history, also if the bench is
    stopped after some of plain decoding's answers and continues in its folder."""
    asked: dict[str, list[Sequence[int]]] = {}
    with load(tiny, runtime="llama", dtype="float32") as llm:
        methods = tuple(parse_methods("speculative:drafter=ngram", {}))
        params = SamplingParams(max_tokens=ANSWER)
        options = BenchOptions((str(talk),), methods, turns=3, rounds=rounds, sampling_params=params)
        for most in [*stops, 1000]:
            store = Store(tmp_path / "out", options.settings(llm))
            with Bench(llm, options, store, print) as bench:
                parts: dict[str, list[Sequence[int]]] = {label: [] for label in (PLAIN, methods[1].label)}
                for label, part in parts.items():
                    _spy(bench, part, label, most if label == PLAIN else 1000)
                with pytest.raises(KeyboardInterrupt) if most < 1000 else nullcontext():
                    bench.measure(lambda *_: None)
                for label, part in parts.items():
                    asked.setdefault(label, []).extend(part)
        prompts = sorted(bench.encode(one) for one in bench.prompts)
    assert len(set(prompts)) == 4
    assert {label: sorted(found) for label, found in asked.items()} == {
        label: sorted(prompts * rounds) for label in (PLAIN, methods[1].label)
    }
    assert all(row.equal_text for row in bench.rows() if row.label != PLAIN)


def test_a_later_turn_stands_behind_the_one_before_it(talk: Path) -> None:
    """Only conversations whose first turn is measured have later turns; conversations differ in length."""
    lines = [{"id": name, "turns": list(TURNS[:count])} for name, count in (("a", 1), ("b", 3), ("c", 2), ("d", 3))]
    talk.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tasks.collect([str(talk)], 3, 3)
    assert [(one.name, len(one.before)) for one in found] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("b", 2),
        ("c", 0),
        ("c", 1),
    ]
    assert found[3].at(1) == found[2]
    assert found[3].at(0)._replace(reference=None) == found[1]._replace(reference=None)


def test_where_nothing_is_measured_a_turn_is_written_once(tiny: Path, talk: Path) -> None:
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        asked: list[Sequence[int]] = []

        def answer(prompt: Sequence[int]) -> Sequence[int]:
            asked.append(prompt)
            return llm.generate(list(prompt), max_tokens=ANSWER)[0].tokens

        talks = Conversations(llm.tokenizer, answer)
        prompts = [talks.prompt(one) for one in reversed(tasks.collect([str(talk)], 2, 3))]
    assert len(prompts) == 4
    assert asked == [prompts[3], prompts[2]], "of three turns the first two, not the single turn"


def test_a_conversation_that_is_too_long_fails_by_itself(
    tiny: Path, talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its second turn ends beyond the context; the first turns are measured all the same."""
    long = {"id": "c", "task": "t", "turns": ["hello " * 5000, "12"]}
    talk.write_text(talk.read_text() + json.dumps(long) + "\n")
    arguments = ["--target", tiny, "--runtime", "llama", "--dtype", "float32", "--tasks", talk, "--max-tokens", ANSWER]
    with pytest.raises(SystemExit) as end:
        main(["bench", *map(str, arguments), "--methods", "speculative:drafter=ngram", "--turns", "2"])
    assert not end.value.code
    rows = {(row["task"], row["method"]): row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert (rows["t", PLAIN]["prompts"], rows["t", PLAIN]["failed"]) == (2, 1)
    assert (rows["t 2", PLAIN]["prompts"], rows["t 2", PLAIN]["failed"]) == (1, 1)
    assert "context" in rows["t 2", PLAIN]["reason"]


def test_turns_need_a_template(talk: Path) -> None:
    class Bare:
        has_template = False

    check_turns(tasks.collect([str(talk)], 5), Bare())
    with pytest.raises(UserError, match="--turns needs a model with a chat template"):
        check_turns(tasks.collect([str(talk)], 5, 2), Bare())


@pytest.mark.parametrize("turns", [0, -1, 1001])
def test_a_wrong_number_of_turns_is_refused(turns: int) -> None:
    with pytest.raises(UserError, match=f"turns is {turns}"):
        BenchOptions(turns=turns)
