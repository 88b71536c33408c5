"""`outpace judge`: what is mined, by the definition; resuming; the classifier; what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command

from outpace.api.llm import LLM
from outpace.api.scoring import NUMBER, Reference, final_answer
from outpace.core.errors import UserError
from outpace.distill.judge import train
from outpace.distill.mining import (
    JOURNAL,
    Journal,
    Miner,
    MiningOptions,
    Mismatch,
    Question,
    read_questions,
)
from outpace.models.base import chain
from outpace.models.load import Loaded
from outpace.rules.judge import JudgeFile

LENGTH = 14
OPTIONS = MiningOptions(max_tokens=LENGTH, batch=3)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "digits.jsonl"
    lines = ({"turns": [f"say {number} again"], "reference": number} for number in range(20))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mine(pair: tuple[Loaded, Loaded], path: Path, folder: Path, options: MiningOptions = OPTIONS) -> Journal:
    folder.mkdir(exist_ok=True)
    miner = Miner(*pair, options)
    journal = Journal(folder, miner.settings(), read_questions([path], False)[:5])
    miner.mine(journal, lambda figures: None)
    return journal


def best(model: Any, text: Sequence[int]) -> int:
    session = model.open(len(text) + 1, len(text))
    return int(np.asarray(model.score([chain(session, text, [len(text) - 1])])[0]).argmax())


def by_definition(pair: tuple[Loaded, Loaded], question: Question) -> list[tuple[int, int, bool, np.ndarray]]:
    """Algorithm 1 with one forward a token."""
    target, draft = pair
    tokenizer, prompt = target.tokenizer, target.tokenizer.encode_prompt(question.text)

    def finish(tokens: list[int]) -> list[int]:
        while len(tokens) < LENGTH and (not tokens or tokens[-1] not in tokenizer.stop_ids):
            tokens = [*tokens, best(target.model, [*prompt, *tokens])]
        return tokens

    def said(tokens: Sequence[int]) -> Any:
        return final_answer(question.reference, tokenizer.decode([t for t in tokens if t not in tokenizer.stop_ids]))

    text, found, place = finish([]), list[tuple[int, int, bool, np.ndarray]](), 0
    own = said(text)
    while place < len(text):
        token = best(draft.model, [*prompt, *text[:place]])
        if token != text[place]:
            changed = [*prompt, *text[:place], token]
            session = target.model.open(len(changed) + 1, len(changed))
            part = chain(session, changed)._replace(hidden_rows=[len(changed) - 1])
            hidden = target.model.score_hidden([part], [target.model.max_hidden_layer]).hidden
            finished = finish([*text[:place], token])
            found.append((place, token, said(finished) != own, np.asarray(hidden)[0, 0]))
            text = text if found[-1][2] else finished
        place += 1
    return found


def test_what_is_mined_follows_the_definition(
    tiny_pair: tuple[Loaded, Loaded], questions: Path, tmp_path: Path
) -> None:
    journal = mine(tiny_pair, questions, tmp_path)
    kinds = set()
    for mined in journal.found.values():
        expected = by_definition(tiny_pair, mined.question)
        assert [one[:3] for one in mined.mismatches] == [one[:3] for one in expected]
        for one, (*_, hidden) in zip(mined.mismatches, expected, strict=True):
            assert np.array_equal(one.hidden, hidden.astype(np.float32))
        kinds |= {one.is_important for one in mined.mismatches}
    assert kinds == {True, False}


def contents(journal: Journal) -> list[Any]:
    found = [(one.answer, one.own, one.is_done, one.written, one.mismatches) for one in journal.found.values()]
    return [(*rest, [(m[:3], m.hidden.tolist()) for m in mismatches]) for *rest, mismatches in found]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
def test_a_stopped_run_continues(
    share: float, tiny_pair: tuple[Loaded, Loaded], questions: Path, tmp_path: Path
) -> None:
    whole = mine(tiny_pair, questions, tmp_path / "whole", MiningOptions(max_tokens=LENGTH, batch=1))
    data = (tmp_path / "whole" / JOURNAL).read_bytes()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / JOURNAL).write_bytes(data[: int(share * len(data))])
    assert contents(mine(tiny_pair, questions, tmp_path / "torn")) == contents(whole)
    with pytest.raises(UserError, match="was mined with max_tokens 14, now it is 15; name another --out"):
        mine(tiny_pair, questions, tmp_path / "torn", MiningOptions(max_tokens=15))
    for line in ("{}", 9**5 * "["):
        (tmp_path / "torn" / JOURNAL).write_text(f"{line}\n")
        with pytest.raises(UserError, match="line 1 is damaged"):
            mine(tiny_pair, questions, tmp_path / "torn")


def test_ctrl_c_keeps_what_was_mined(tiny_pair: tuple[Loaded, Loaded], questions: Path, tmp_path: Path) -> None:
    whole, calls = contents(mine(tiny_pair, questions, tmp_path / "whole")), 0

    def interrupt(figures: dict[str, float]) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt

    (tmp_path / "stopped").mkdir()
    miner = Miner(*tiny_pair, OPTIONS)
    journal = Journal(tmp_path / "stopped", miner.settings(), read_questions([questions], False)[:5])
    with pytest.raises(KeyboardInterrupt):
        miner.mine(journal, interrupt)
    kept = Journal(tmp_path / "stopped", miner.settings(), read_questions([questions], False)[:5])
    assert contents(kept) == contents(journal)
    assert len((tmp_path / "stopped" / JOURNAL).read_text().splitlines()) >= 12
    assert contents(mine(tiny_pair, questions, tmp_path / "stopped")) == whole


def test_a_journal_with_hidden_states_of_two_widths_is_refused(
    tiny_pair: tuple[Loaded, Loaded], questions: Path, tmp_path: Path
) -> None:
    mine(tiny_pair, questions, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    last = [line for line in lines if "hidden" in line][-1]
    last["hidden"] = base64.b64encode(base64.b64decode(last["hidden"])[:-4]).decode()
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"is damaged .hidden states of \d+ values after some of \d+"):
        mine(tiny_pair, questions, tmp_path)


def test_a_question_that_fills_the_context_is_mined_and_a_longer_one_refused(
    tiny_pair: tuple[Loaded, Loaded], tmp_path: Path
) -> None:
    context, path = min(one.model.max_positions for one in tiny_pair), tmp_path / "q.jsonl"
    count = len(tiny_pair[0].tokenizer.encode_prompt("a"))
    words = next(n for n in range(1, 2 * context) if tokens_of(tiny_pair, n) > context - 6 - count)
    path.write_text(json.dumps({"turns": ["a " * words], "reference": 1}) + "\n")
    (mined,) = mine(tiny_pair, path, tmp_path / "out").found.values()
    assert mined.is_done
    assert tokens_of(tiny_pair, words) + len(mined.own) <= context - 1
    path.write_text(json.dumps({"turns": ["a " * 2 * words], "reference": 1}) + "\n")
    with pytest.raises(UserError, match=r"the question 'a a .* do not fit the contexts of target"):
        mine(tiny_pair, path, tmp_path / "other")


def tokens_of(pair: tuple[Loaded, Loaded], words: int) -> int:
    return len(pair[0].tokenizer.encode_prompt("a " * words))


def test_a_full_disk_is_said_in_a_sentence(
    tiny_pair: tuple[Loaded, Loaded], questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / JOURNAL).symlink_to("/dev/full")
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(UserError, match=r"mined\.jsonl cannot be written \(No space left on device\)"):
        mine(tiny_pair, questions, tmp_path)


def mismatches(count: int, important: float, seed: int = 0) -> list[tuple[Question, Mismatch]]:
    """Mismatches of 40 questions whose first feature says whether they are important."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        is_important = bool(chance.random() < important)
        hidden = chance.normal(size=6) * [1, 50, 0.01, 1, 1, 1] + [3.0 * is_important, 7, 0, 0, 0, 0]
        question = Question("t", "", Reference(NUMBER, "1"), number % 40)
        found.append((question, Mismatch(number, 0, is_important, hidden.astype(np.float32))))
    return found


def test_the_classifier_with_its_scaler_folded_in_is_scikit_learns() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = mismatches(1000, 0.3)
    file = train(found, 4, {"weights": "w"}, {"t": "d"}, {"draft": "x"})
    hidden = np.array([mismatch.hidden for _, mismatch in found], np.float64)
    important = np.array([mismatch.is_important for _, mismatch in found])
    held = np.array([question.number < 4 for question, _ in found])  # a tenth of the questions
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=file.facts["c"], max_iter=2000))
    pipeline.fit(hidden[~held], important[~held])
    scores = file.importance(hidden)
    assert scores == pytest.approx(pipeline.predict_proba(hidden)[:, 1], abs=1e-9)
    assert file.facts["roc_auc"] > 0.95
    for recall, threshold in file.thresholds.items():
        refused = scores[held & important] >= threshold
        assert recall <= refused.mean() < recall + 1 / len(refused) + 1e-9
    for threshold, share, spared in file.curve:
        assert share == (scores[held & important] >= threshold).mean()
        assert spared == (scores[held & ~important] >= threshold).mean()


@pytest.mark.parametrize(
    ("count", "important", "says"),
    [
        (150, 0.5, "150 mismatches were mined, .* of them important: 200 are needed"),
        (400, 0.0, "400 mismatches were mined, 0 of them important: important and unimportant ones are needed"),
        (400, 1.0, "400 mismatches were mined, 400 of them important: important and unimportant"),
    ],
)
def test_too_few_mismatches_make_no_judge(count: int, important: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        train(mismatches(count, important), 4, {}, {}, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"turns": ["hello"]}, "line 3 has no right answer: give it a reference"),
        ({"turns": ["x"], "test": "def check(c): pass", "entry_point": "f"}, "line 3 has a test: .* --run-tests"),
        ({"turns": ["x"], "reference": 2}, "line 3 has another right answer to 'x' than an earlier line: keep one"),
    ],
)
def test_questions_without_checkable_answers_are_refused(line: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = [{"turns": ["x"], "reference": 1}] * 2 + [line]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, error = run_command("judge", "--tasks", tmp_path / "q.jsonl", "--out", tmp_path / "out")
    assert code == 2
    assert error.startswith("error: ")
    with pytest.raises(UserError, match=says):
        read_questions([tmp_path / "q.jsonl"], False)


def test_the_command_mines_and_the_rule_uses_the_judge(tiny_folder: str, questions: Path, tmp_path: Path) -> None:
    models = ["--target", tiny_folder, "--draft", "layers:0"]
    words = ["judge", *models, "--tasks", questions, "--out", tmp_path / "judge", "--max-tokens", "24", "--json"]
    code, out, error = run_command(*words)
    assert code == 0, error
    said = json.loads(out)
    assert said["mismatches"] >= 200
    assert 0 < said["important"] < said["mismatches"]
    assert JudgeFile.read(tmp_path / "judge").tasks.keys() == {"digits"}
    assert json.loads(run_command(*words)[1]) == said, "nothing is left to mine"
    with LLM(tiny_folder, "layers:0", rule="judge", judge=str(tmp_path / "judge"), threshold=1.0) as llm:
        assert llm.generate("say 7 again", max_tokens=24)[0].figures.relaxed > 0
    bench = ["bench", *models, "--tasks", questions, "--prompts", "2", "--max-tokens", "8"]
    rules = f"judge:judge={tmp_path / 'judge'},threshold=0.5"
    assert "mined on" not in run_command(*bench, "--methods", "speculative", "--rules", rules)[2]
    other = tmp_path / "other.jsonl"
    other.write_text(questions.read_text())
    error = run_command(*bench[:-6], "--tasks", other, *bench[-4:], "--methods", "speculative", "--rules", rules)[2]
    assert "this judge was mined on digits, not on other; speed and right" in error
