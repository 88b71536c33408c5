"""The drafter's process is killed or stopped at random moments: every text must be plain decoding's, nothing may stay.

Run: python bench/killed_worker.py [--moments 50] [--tokens 64] [--draft layers:0,1,28,29] [--seed 1]. Half of the
moments are a SIGKILL, half a SIGSTOP with a SIGCONT after `--stopped` seconds; the process may be drafting or still
loading its model then. Several answers run at once all the while. Exit 1 where a text differs or does not end, where an
engine warns twice, or where a process or shared memory is left. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM, Stream
from outpace.card.process import ProcessWorker
from outpace.core.errors import UserError
from outpace.models.load import Loaded, load_draft, load_model

PROMPTS = (
    "Write the numbers from one to forty in words.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "List the months of the year, each with its number of days.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and a test.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give a recipe for pancakes as a numbered list.",
    "Translate into French: Good morning, how are you? I would like a cup of coffee.",
    "Copy this JSON and add a field: {'name': 'Ada', 'born': 1815, 'field': 'mathematics'}",
    "What are the three laws of thermodynamics?",
)
KILLS = 4  # of one engine; the fourth is one more than its drafter is started again
DEV_SHM = Path("/dev/shm")


@dataclass
class Moment:
    """One fault, `after` seconds of drafting, or of loading; `running`: answers under way."""

    kind: str
    after: float
    state: str = ""
    running: int = 0
    drafted: int = 0  # candidates judged from its end to the next fault, with a process that was ready


@dataclass
class Answer:
    """One answer and the moments that it lived through."""

    number: int
    stream: Stream
    moments: set[int] = field(default_factory=set)


class Session:
    """Engines one after another; `together` answers run at any time."""

    def __init__(self, target: Loaded, draft: Loaded | None, args: argparse.Namespace) -> None:
        self.target, self.draft, self.args = target, draft, args
        self.chance = random.Random(args.seed)
        self.done: list[Answer] = []
        self.running: list[Answer] = []
        self.moments: list[Moment] = []
        self.warned: list[int] = []  # by engine
        self._asked = 0
        with LLM(target, method="autoregressive") as llm:
            results = llm.generate([self._chat(number) for number in range(len(PROMPTS))], max_tokens=args.tokens)
        self.plain = [result.tokens for result in results]

    def go(self) -> None:
        """All moments, in random order."""
        kinds = ["SIGKILL", "SIGSTOP"] * (self.args.moments // 2) + ["SIGKILL"] * (self.args.moments % 2)
        self.chance.shuffle(kinds)
        while kinds:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._engine(kinds)
            self.warned.append(len(caught))

    def _engine(self, kinds: list[str]) -> None:
        """One engine's life: until its drafter is given up, or no moments are left."""
        drafter = "model+ngram" if self.draft else "ngram"
        with LLM(self.target, self.draft, method="card", drafter=drafter, worker="process") as llm:
            worker = llm.engine.worker
            assert isinstance(worker, ProcessWorker)
            kills = 0
            while kinds and kills < KILLS:
                moment = Moment(kinds.pop(), self.chance.uniform(0.0, self.args.apart))
                may_load = self.chance.random() < self.args.loading
                while worker.pid is None or not (may_load or worker.is_ready):
                    self._drive(llm, 0.01)
                self._drive(llm, moment.after)
                while worker.pid is None:  # between two processes
                    self._drive(llm, 0.01)
                self._fault(llm, worker, moment)
                kills += moment.kind == "SIGKILL"
            self._drive(llm, self.args.apart)
            while self.running:
                self._round(llm)

    def _fault(self, llm: LLM, worker: ProcessWorker, moment: Moment) -> None:
        pid = worker.pid
        assert pid is not None
        moment.state, moment.running = "drafting" if worker.is_ready else "loading", len(self.running)
        for answer in self.running:
            answer.moments.add(len(self.moments))
        self.moments.append(moment)
        os.kill(pid, signal.Signals[moment.kind])
        if moment.kind == "SIGSTOP":
            self._drive(llm, self.args.stopped)
            moment.drafted = 0
            if worker.pid == pid:
                os.kill(pid, signal.SIGCONT)

    def _drive(self, llm: LLM, seconds: float) -> None:
        """Answers for some time, with new ones for those that end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self.running) < self.args.together:
                number = self._asked % len(PROMPTS)
                self._asked += 1
                stream = llm.stream(self._chat(number), max_tokens=self.args.tokens)
                self.running.append(Answer(number, stream))
            self._round(llm)

    def _round(self, llm: LLM) -> None:
        runs = llm.engine.step()
        worker = llm.engine.worker
        if self.moments and isinstance(worker, ProcessWorker) and worker.is_ready:
            self.moments[-1].drafted += sum(run.history.steps[-1].drafted for run in runs if run.history.steps)
        over = [answer for answer in self.running if answer.stream._run.finish_reason is not None]
        self.done += over
        self.running = [answer for answer in self.running if answer not in over]

    def _chat(self, number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": PROMPTS[number]}]

    def differing(self, answers: list[Answer]) -> int:
        """Answers whose tokens are not those of plain decoding."""
        return sum(answer.stream.finish().tokens != self.plain[answer.number] for answer in answers)

    def report(self) -> dict[str, Any]:
        """A table of the moments by kind and state, and the figures."""
        table = Table(title=f"{self.target.name}, draft {self.draft.name if self.draft else 'ngram'}")
        for column in ("moment", "the process was", "moments", "answers under way", "differ", "drafted after it"):
            table.add_column(column, justify="left" if column in ("moment", "the process was") else "right")
        for (kind, state), count in sorted(Counter((m.kind, m.state) for m in self.moments).items()):
            numbers = {n for n, m in enumerate(self.moments) if (m.kind, m.state) == (kind, state)}
            lived = [answer for answer in self.done if answer.moments & numbers]
            again = sum(self.moments[number].drafted > 0 for number in numbers)
            table.add_row(kind, state, *map(str, (count, len(lived), self.differing(lived), again)))
        Console(width=120).print(table)
        lived = [answer for answer in self.done if answer.moments]
        return {
            "moments": len(self.moments),
            "engines": len(self.warned),
            "most_warnings": max(self.warned),
            "answers": len(self.done),
            "answers_that_lived_through_one": len(lived),
            "moments_with_answers": sum(moment.running > 0 for moment in self.moments),
            "differing": self.differing(self.done),
            "unfinished": len(self.running),
        }


def children() -> set[str]:
    """Processes that this one started."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    return {pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--together", type=int, default=6, help="answers that run at once")
    parser.add_argument("--apart", type=float, default=6.0, help="seconds between two moments at most, besides loading")
    parser.add_argument("--loading", type=float, default=0.2, help="share of moments that do not await a drafter")
    parser.add_argument("--stopped", type=float, default=10.0, help="seconds from SIGSTOP to SIGCONT")
    parser.add_argument("--draft", default="layers:0,1,28,29", help="a draft, or ngram for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the target")
    args = parser.parse_args()
    if not Path("/proc").is_dir():
        raise UserError("this check reads /proc, it needs Linux")
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    target = load_model(None)
    session = Session(target, None if args.draft == "ngram" else load_draft(args.draft, target), args)
    before = children(), set(os.listdir(DEV_SHM))  # a tokenizer may keep a process of its own
    session.go()
    verdict = session.report() | {"seconds": round(time.monotonic() - began)}
    verdict["processes_left"] = len(children() - before[0])
    verdict["shared_memory_left"] = len(set(os.listdir(DEV_SHM)) - before[1])
    print(json.dumps(verdict))
    bad = ("differing", "unfinished", "processes_left", "shared_memory_left")
    sys.exit(1 if any(verdict[name] for name in bad) or verdict["most_warnings"] > 1 else 0)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
