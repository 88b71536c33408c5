"""A draft as transformers' assistant: the text is the same as without it, and it saves passes of the target.

Run: python bench/draft_in_transformers.py [--target T] [--draft auto] [--prompts FILE.jsonl] [--count 6] [--tokens 96].
Both models run in float32 by transformers, greedily, with chains of --length. Exit 1 where a text differs. Two float32
passes over other numbers of rows round differently, so a tie may fall the other way: such a text is named with the
scores' distance there. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outpace.distill.prompts import read_prompts
from outpace.models.files.checkpoint import read_json
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.packed import is_packed, unpack
from outpace.models.files.pairs import find_draft

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give a recipe for pancakes as a numbered list.",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost, and how much change is there from 50 dollars?",
    "Write a short story about a lighthouse keeper.",
    "List the months of the year, each with its number of days.",
)
CLOSE = 1e-3  # scores nearer than this are a tie in float32


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Collects the new rows of every pass of `model`."""
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def load(folder: Path) -> Any:
    """The model of a folder, as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_assistant(folder: Path, length: int) -> Any:
    """A draft that always proposes `length` tokens."""
    draft = load(folder)
    draft.generation_config.num_assistant_tokens = length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def answer(target: Any, ids: torch.Tensor, tokens: int, draft: Any = None) -> tuple[list[int], int, float]:
    """The new tokens, the target's passes, seconds."""
    started = time.perf_counter()
    with counted(target) as rows, torch.no_grad():
        made = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, assistant_model=draft
        )
    return made[0, ids.shape[1] :].tolist(), len(rows), time.perf_counter() - started


@torch.no_grad()
def gap(target: Any, ids: torch.Tensor, common: list[int], one: int, other: int) -> float:
    """By how much the target's scores of two tokens differ after a common beginning."""
    scores = target(torch.cat([ids, torch.tensor([common], dtype=torch.long)], 1)).logits[0, -1]
    return abs(float(scores[one] - scores[other]))


def difference(target: Any, ids: torch.Tensor, plain: list[int], assisted: list[int]) -> float | None:
    """None for equal texts, else the distance of the scores where they part."""
    for place, (one, other) in enumerate(zip(plain, assisted, strict=False)):
        if one != other:
            return gap(target, ids, plain[:place], one, other)
    return None if len(plain) == len(assisted) else float("inf")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", help="folder or .gguf file; else the shipped model")
    parser.add_argument("--draft", default="auto", help="folder of a draft; auto: the one that is known")
    parser.add_argument("--prompts", type=Path, help=".jsonl file of prompts; else a few of our own")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--length", type=int, default=4, help="tokens of a chain")
    found = run(parser.parse_args())
    print(json.dumps(found))
    return 1 if found["different"] else 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Each prompt by generate, alone and assisted: whether the texts are equal, and what was accepted."""
    from transformers import AutoTokenizer

    folder = resolve(options.target)
    name = options.target or shipped_model().stem
    draft = find_draft(name, read_json(folder / "config.json")) if options.draft == "auto" else options.draft
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(draft)
        if is_packed(path):
            unpack(path, folder, Path(temporary) / "draft")
            path = Path(temporary) / "draft"
        assistant = load_assistant(path, options.length)
    target, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    texts = (read_prompts(options.prompts) if options.prompts else list(PROMPTS))[: options.count]
    rows = []
    for text in texts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        rows.append(compare(target, assistant, ids, options.tokens))
        print(f"{rows[-1]}  {text[:60]!r}", file=sys.stderr, flush=True)
    passes = sum(row["passes"] for row in rows)
    emitted = sum(row["tokens"] for row in rows)
    return {
        "target": name,
        "draft": str(draft),
        "prompts": len(rows),
        "tokens": emitted,
        "chain": options.length,
        "mean_accepted_length": round(emitted / passes, 3),
        "speedup": round(statistics.median(row["speedup"] for row in rows), 3),
        "ties": sum(row["gap"] is not None and row["gap"] <= CLOSE for row in rows),
        "different": sum(row["gap"] is not None and row["gap"] > CLOSE for row in rows),
    }


def compare(target: Any, assistant: Any, ids: torch.Tensor, tokens: int) -> dict[str, Any]:
    """One prompt's answers without and with the draft."""
    plain, _, seconds = answer(target, ids, tokens)
    assisted, passes, assisted_seconds = answer(target, ids, tokens, assistant)
    return {
        "tokens": len(assisted),
        "passes": passes,
        "mean_accepted_length": round(len(assisted) / passes, 3),
        "gap": difference(target, ids, plain, assisted),
        "speedup": round(seconds / assisted_seconds, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
