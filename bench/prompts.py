"""Prompts, the shipped pair of models and the last line of output, shared by the benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from outpace.core.errors import UserError
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Loaded, load_draft, load_model

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost, and how much change is there from 50 dollars?",
)


def read_prompts(folder: Path, tasks: Sequence[str], per_task: int, spread: bool = True) -> list[dict[str, str]]:
    """Return for each task the first user messages of `per_task` prompts by id, spread over its file or the first."""
    found = []
    for task in tasks:
        file = folder / f"{task}.jsonl"
        if not file.is_file():
            raise UserError(f"no prompt file {file}, --data must name a folder with {', '.join(tasks)} (.jsonl)")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        chosen = rows[:: max(1, len(rows) // per_task) if spread else 1][:per_task]
        found.append({str(row["id"]): row["turns"][0] for row in chosen})
    return found


def shipped_pair() -> tuple[Loaded, Loaded]:
    """Load the shipped model and its draft model."""
    target = load_model(None)
    return target, load_draft(shipped_draft(target.name), target)


def chat_tokens(target: Loaded, text: str) -> Any:
    """Encode a user's first message by the chat template."""
    return target.tokenizer.chat([{"role": "user", "content": text}])


def finish(row: dict[str, Any], differing: int) -> NoReturn:
    """Print the JSON line and exit, with status 1 if texts differ."""
    print(json.dumps(row))
    sys.exit(1 if differing else 0)
