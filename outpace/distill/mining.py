"""Mines training data for a judge: which mismatches of draft and target change the target's final answer.

AutoJudge, Garipov et al., arXiv:2504.20039, algorithm 1. The target answers greedily. At the first position where the
draft's most likely token differs from the answer's, the draft's token is put in and the target completes the text. If
the final answer stays that of the target's own text, the mismatch is unimportant, and the search goes on in the changed
text; otherwise it is important, and the target's token stays.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.api.prompt_file import read_prompt_file
from outpace.api.scoring import PROGRAM, Reference, check_sandbox, final_answer, read
from outpace.core.drafting import Needs
from outpace.core.errors import UserError
from outpace.core.logits import host_array
from outpace.core.options import CheckedOptions, whole
from outpace.core.types import Request, Row
from outpace.decoders.autoregressive import Autoregressive
from outpace.distill.prompts import prompt_hash
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Capability, read_text
from outpace.models.files.cache import write_error
from outpace.models.files.reading import read_optional_json, write_json
from outpace.models.runtimes import Loaded
from outpace.rules.greedy import Greedy

if TYPE_CHECKING:
    from torch import Tensor

JOURNAL, SETTINGS = "mined.jsonl", "mining.json"


class Question(NamedTuple):
    """A question with a checkable answer. `number` is the hash of its text."""

    task: str
    text: str
    reference: Reference
    number: int


class Mismatch(NamedTuple):
    """A place where the draft's token differs from the text, and the target's hidden state at the draft's token."""

    position: int  # in the answer
    drafted: int
    is_important: bool
    hidden: np.ndarray  # float32 [width]


@dataclass
class MinedQuestion:
    """What was mined from one question. `own`: the target's answer; `answer`: the same, as changed by mining."""

    question: Question
    own: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    is_done: bool = False
    written: int = 0  # tokens that the target has written
    expected: float = 0.0  # estimate of `written` at the end; 0: unknown


@dataclass(frozen=True)
class MiningOptions(CheckedOptions):
    """`max_tokens`: of an answer; `batch`: number of questions mined at once; `run_tests`: allow questions whose
    answers are programs, and run their tests."""

    max_tokens: int = whole(256, 1)
    batch: int = whole(16, 1, 1024)
    run_tests: bool = False


def read_questions(files: Sequence[Path], run_tests: bool) -> list[Question]:
    """Read the distinct questions of task files. UserError for a line without a reference, or with a test unless
    `run_tests`."""
    found: dict[int, Question] = {}
    for file in files:
        for place, entry in enumerate(read_prompt_file(file), 1):
            where, text = f"{file}, line {place}", entry["turns"][0]
            reference = read(entry, text, where)
            if reference is None:
                raise UserError(f"{where} has no right answer: give it a reference, or a test with entry_point")
            if reference.kind == PROGRAM and not run_tests:
                raise UserError(f"{where} has a test: allow tests to run with --run-tests")
            task, number = entry.get("task"), prompt_hash(text)
            if number in found and found[number].reference != reference:
                raise UserError(f"{where} has another right answer to {text[:40]!r} than an earlier line: keep one")
            found[number] = Question(task if isinstance(task, str) and task else file.stem, text, reference, number)
    if run_tests:
        check_sandbox()
    return list(found.values())


class Journal:
    """Stores what is mined in a folder, one line per mismatch, so that a stopped run can continue."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], questions: Sequence[Question]) -> None:
        """Open a folder and read what it holds; UserError for other settings or a damaged line."""
        self.found = {question.number: MinedQuestion(question) for question in questions}
        self._file, self._width = folder / JOURNAL, 0
        known = read_optional_json(folder / SETTINGS)
        for name, value in settings.items():
            if known and known.get(name) != value:
                raise UserError(
                    f"{folder} was mined with {name} {known.get(name)!r}, now it is {value!r}; name another --out"
                )
        if not known:
            write_json(folder / SETTINGS, settings)
        if self._file.exists():
            data = self._file.read_bytes()
            whole_lines = data[: data.rfind(b"\n") + 1]
            if len(whole_lines) < len(data):  # the last line was torn
                os.truncate(self._file, len(whole_lines))
            for place, line in enumerate(whole_lines.splitlines(), 1):
                try:
                    entry = json.loads(line)
                    if (mined := self.found.get(entry["question"])) is not None:
                        self._apply(mined, entry)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise UserError(
                        f"{self._file}, line {place} is damaged ({error}): remove it, or name another --out"
                    ) from error

    @property
    def mismatches(self) -> list[tuple[Question, Mismatch]]:
        """All mismatches with their questions."""
        return [(one.question, mismatch) for one in self.found.values() for mismatch in one.mismatches]

    def add(self, mined: MinedQuestion, entry: Mapping[str, Any]) -> None:
        """Append an entry to the file, then apply it; UserError if it cannot be written."""
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"question": mined.question.number, **entry}, separators=(",", ":")) + "\n")
        except OSError as error:
            raise write_error(self._file, error) from error
        self._apply(mined, entry)

    def _apply(self, mined: MinedQuestion, entry: Mapping[str, Any]) -> None:
        if "hidden" in entry:
            hidden = np.frombuffer(base64.b64decode(entry["hidden"]), "<f4")
            self._width = self._width or len(hidden)
            if len(hidden) != self._width:
                raise ValueError(f"hidden states of {len(hidden)} values after some of {self._width}")
            mined.mismatches.append(Mismatch(entry["position"], entry["drafted"], entry["important"], hidden))
        if "answer" in entry:
            mined.answer = [*mined.answer[: entry.get("position", 0)], *entry["answer"]]
            mined.own = mined.own or mined.answer
        mined.written += entry.get("written", 0)
        mined.is_done = mined.is_done or "done" in entry


class Completion(NamedTuple):
    """A text for the target to continue by at most `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int


class Written(NamedTuple):
    """The continuation, and the hidden state at the prompt's last token: float32 [width]"""

    tokens: list[int]
    hidden: np.ndarray


class _Recording(Greedy):
    """Greedy decoding that stores the hidden state at each prompt's last token, by the id of the request."""

    def __init__(self, tap: int) -> None:
        super().__init__()
        self.traits = replace(Greedy.traits, pick=None, hidden_layers=(tap,))
        self.hidden: dict[int, np.ndarray] = {}

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[int]:
        for row in rows:
            if not row.path and len(row.committed) == len(row.request.prompt) and row.hidden is not None:
                self.hidden[id(row.request)] = host_array(row.hidden)[0].astype(np.float32)
        return super().reduce(logits, rows)


class Miner:
    """Mines questions with a loaded target and draft model."""

    def __init__(self, target: Loaded, draft: Loaded, options: MiningOptions) -> None:
        """Raise UserError for a target without hidden states."""
        target.model.check_capability(Capability.HIDDEN)
        self._target, self._draft, self._options = target, draft, options
        self.tap = target.model.max_hidden_layer
        self._rule, self._stop_ids = _Recording(self.tap), frozenset(target.tokenizer.stop_ids)

    def settings(self) -> dict[str, Any]:
        """Return the values that must be equal for a stopped run to continue."""
        identity = {f"target's {name}": value for name, value in self._target.identity.items()}
        draft = {f"draft's {name}": value for name, value in self._draft.identity.items() if name != "template"}
        return identity | draft | {"max_tokens": self._options.max_tokens, "tap": self.tap}

    def mine(self, journal: Journal, progress: Callable[[dict[str, float]], None]) -> None:
        """Mine all questions of the journal that are not done. Each mismatch is stored at once."""
        undone = (mined for mined in journal.found.values() if not mined.is_done)
        waiting = deque((mined, self._prompt(mined.question)) for mined in undone)
        running: dict[int, tuple[MinedQuestion, Generator[Completion, Written, None]]] = {}
        settings = EngineOptions(nodes=1, batch=self._options.batch)
        started, before = time.monotonic(), sum(mined.written for mined in journal.found.values())
        with Engine(self._target.model, options=settings, needs=Needs(layers=(self.tap,))) as engine:

            def submit(mined: MinedQuestion, steps: Generator[Completion, Written, None], sent: Any) -> None:
                try:
                    completion = steps.send(sent)
                except StopIteration:
                    return
                request = Request(*completion[:1], self._rule, completion.max_tokens, stop_ids=self._stop_ids)
                running[engine.submit(request, Autoregressive, Autoregressive.Options()).key] = mined, steps

            while waiting or running:
                while waiting and len(running) < self._options.batch:
                    mined, prompt = waiting.popleft()
                    submit(mined, self._steps(mined, prompt, journal), None)
                for run in engine.step():
                    if run.finish_reason is None:
                        continue
                    mined, steps = running.pop(run.key)
                    if run.error is not None:
                        raise run.error
                    submit(mined, steps, Written(run.tokens, self._rule.hidden.pop(id(run.request))))
                    progress(_figures(journal, before, time.monotonic() - started))

    def _steps(self, mined: MinedQuestion, start: Completion, journal: Journal) -> Generator[Completion, Written, None]:
        """Mine one question; yield each text that the target must continue, `start` first."""
        prompt, max_tokens = start
        if not mined.own:
            tokens = (yield start).tokens
            journal.add(mined, {"answer": tokens, "written": len(tokens)})
        own, place = self._final_answer(mined, mined.own), 0
        if mined.mismatches:
            place = mined.mismatches[-1].position + 1
        drafted = self._drafted(prompt, mined.answer, place)
        count = sum(token != other for token, other in zip(drafted, mined.answer[place:], strict=True))
        mined.expected = mined.written + 0.5 * count * len(mined.answer)
        while drafted:
            token = drafted.pop(0)
            if token == mined.answer[place]:
                place += 1
                continue
            left = max_tokens - place - 1
            is_end = token in self._stop_ids or left < 1
            changed = [*mined.answer[:place], token]
            written = yield Completion((*prompt, *changed), 1 if is_end else left)
            rest = [] if is_end else written.tokens
            is_important = self._final_answer(mined, [*changed, *rest]) != own
            hidden = base64.b64encode(written.hidden.astype("<f4").tobytes()).decode()
            entry: dict[str, Any] = {"position": place, "drafted": token, "important": is_important, "hidden": hidden}
            entry["written"] = len(written.tokens)
            if not is_important:
                entry["answer"] = [token, *rest]
            journal.add(mined, entry)
            place += 1
            if not is_important:
                drafted = self._drafted(prompt, mined.answer, place)
        journal.add(mined, {"done": True})

    def _prompt(self, question: Question) -> Completion:
        """Return the prompt, and the most tokens of an answer that both contexts hold; UserError if they hold none."""
        tokens = tuple(self._target.tokenizer.encode_prompt(question.text))
        target, draft = self._target.model.max_positions, self._draft.model.max_positions
        if (tokens_left := min(target - 1, draft) - len(tokens)) < 1:  # the target writes a token after the drafted one
            raise UserError(
                f"the question {question.text[:40]!r} has {len(tokens)} tokens, which with an answer do not fit the"
                f" contexts of target ({target}) and draft ({draft}): take it out"
            )
        return Completion(tokens, min(tokens_left, self._options.max_tokens))

    def _final_answer(self, mined: MinedQuestion, tokens: Sequence[int]) -> Any:
        text = self._target.tokenizer.decode([token for token in tokens if token not in self._stop_ids])
        return final_answer(mined.question.reference, text)

    def _drafted(self, prompt: Sequence[int], answer: Sequence[int], place: int) -> list[int]:
        """Return the draft's most likely token at each position of the answer from `place` on, given the text before
        it."""
        model, first = self._draft.model, len(prompt) + place
        text = [*prompt, *answer]
        start = max(first - model.draft_window, 0) if model.draft_window else 0
        known = [min(token, model.vocab_size - 1) for token in text[start:-1]]
        found = list[int]()
        for _, held in read_text(model, known, first - 1 - start):
            best = host_array(held.values).argmax(-1)
            found += (best if held.ids is None else held.ids[best]).tolist()
        return found


def _figures(journal: Journal, before: int, seconds: float) -> dict[str, float]:
    """Return counts of what is done, and the time left, estimated from finished questions, or from first answers."""
    mined = journal.found.values()
    known: list[float] = [one.written for one in mined if one.is_done] or [
        one.expected for one in mined if one.expected
    ]
    mean = sum(known) / max(len(known), 1)
    left = sum(max(mean - one.written, 0.0) for one in mined if not one.is_done)
    rate = (sum(one.written for one in mined) - before) / seconds if seconds else 0.0
    mismatches = journal.mismatches
    return {
        "questions": sum(one.is_done for one in mined),
        "mismatches": len(mismatches),
        "important": sum(mismatch.is_important for _, mismatch in mismatches),
        "tokens_per_second": rate,
        **({"seconds_left": left / rate} if rate else {}),
    }
