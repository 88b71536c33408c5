"""Writes questions with right answers that SmolLM2-135M can answer, for `outpace judge` and `outpace bench`.

Task `sums` adds two numbers below 10 in a story, task `places` finds a city in a text. Each makes NAME-mine.jsonl and
NAME-test.jsonl, which share no question.

    python bench/judge_questions.py --out questions --mine 300 --test 100
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import parse, run

NAMES = ("Tom", "Anna", "Peter", "Maria", "Omar", "Lucy", "Ivan", "Sara", "Ben", "Nina", "Paul", "Emma")
THINGS = ("apples", "books", "coins", "pencils", "cards", "shells", "stamps", "marbles", "plates", "flowers")
GETS = ("gets", "buys", "finds", "wins")
CITIES = ("Paris", "London", "Rome", "Madrid", "Berlin", "Oslo", "Vienna", "Lisbon", "Dublin", "Prague")
JOBS = ("nurse", "teacher", "pilot", "baker", "doctor", "farmer", "painter", "lawyer")


def sums(chance: random.Random) -> dict[str, Any]:
    """Return a question about the sum of two numbers."""
    name, thing, gets = chance.choice(NAMES), chance.choice(THINGS), chance.choice(GETS)
    a, b = chance.randrange(2, 10), chance.randrange(2, 10)
    text = (
        f"{name} has {a} {thing} and {gets} {b} more. How many {thing} does {name} have now? Answer with one short"
        " sentence."
    )
    return {"turns": [text], "reference": a + b}


def places(chance: random.Random) -> dict[str, Any]:
    """Return a question about one of two cities in a text."""
    name, job = chance.choice(NAMES), chance.choice(JOBS)
    born, lives = chance.sample(CITIES, 2)
    text = (
        f"{name} is a {job} who was born in {born} and now lives in {lives}. Where does {name} live now? Explain your"
        " answer in two sentences."
    )
    return {"turns": [text], "reference": lives, "choices": list(CITIES)}


TASKS: dict[str, Callable[[random.Random], dict[str, Any]]] = {"sums": sums, "places": places}


def write(folder: Path, task: str, counts: dict[str, int], seed: int) -> None:
    """Write the files of a task, without a question twice."""
    chance, seen = random.Random(f"{task} {seed}"), set[str]()
    for part, count in counts.items():
        lines: list[str] = []
        while len(lines) < count:
            entry = TASKS[task](chance)
            if entry["turns"][0] not in seen:
                seen.add(entry["turns"][0])
                lines.append(json.dumps({"task": task, "id": f"{part} {len(lines)}", **entry}) + "\n")
        (folder / f"{task}-{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Run the command."""
    args = parse(__doc__, out=..., mine=300, test=100, seed=0)
    args.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        write(args.out, task, {"mine": args.mine, "test": args.test}, args.seed)


if __name__ == "__main__":
    run(main)
