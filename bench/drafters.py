"""Compare drafters with sequential drafting in the real engine, with stated instead of measured times.

Run: python bench/drafters.py --kept FILE.jsonl [--target T] [--draft D] [--tasks repetition,builtin] [--prompts 2]
     [--tokens 128] [--ways ngram:16,suffix:16,lookahead:57] [--only] [--pass-times 1:5.29,4:5.48,8:6.41,16:10.03]
     [--step 0.75] [--host 0.3] [--json FILE]
--ways lists drafters with the node budget of a pass. Answers are appended to --kept, and a later run adds the missing
ones; --only reports what the file has. A pass takes the time that --pass-times gives for its rows (ms, linear between
and beyond), a draft step --step, and a round --host plus the host time of the drafter. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outpace.api.llm import load
from outpace.bench.tasks import collect
from outpace.core.stats import positions, rates
from outpace.simulate.costs import Cost, parse_curve

LENGTH = 4  # draft steps per round
ROWS = 64  # rows of a pass; they are shared by the requests of a batch
MODELS = ("model", "ouroboros", "translated")  # drafters with a draft model
HOST = {
    "ngram": 0.1,
    "suffix": 0.15,
    "cacheback": 0.2,
    "recycle": 0.2,
    "lookahead": 0.3,
    "retrieval": 0.15,
}  # host milliseconds per round
ALL, PLAIN = "all", "autoregressive"
WAYS = "ngram:16,suffix:16,cacheback:16,suffix+cacheback:16,recycle:32,lookahead:57,model:16,ouroboros:16"


def write(arguments: argparse.Namespace, ways: Mapping[str, int]) -> None:
    """Write the missing answers."""
    asked = collect(arguments.tasks.split(","), arguments.prompts)
    kept = read(arguments.kept)
    has = {(one["drafter"], one["task"], one["prompt"]) for one in kept}
    for drafter, nodes in ways.items():
        left = [one for one in asked if (drafter, one.task, one.name) not in has]
        if not left:
            continue
        batch = max(1, ROWS // nodes)
        runs_model = any(part in MODELS for part in drafter.split("+"))
        draft = arguments.draft if runs_model else "none"
        options: dict[str, Any] = {"nodes": nodes, "draft_length": LENGTH, "batch": batch, "reuse": False}
        with load(arguments.target, draft, method="speculative", drafter=drafter, **options) as llm:
            for start in range(0, len(left), batch):
                some = left[start : start + batch]
                prompts = [llm.tokenizer.encode_prompt(one.text) for one in some]
                streams = [llm.stream(prompt, max_tokens=arguments.tokens) for prompt in prompts]
                runs = list(llm.engine.waiting)
                for stream in streams:
                    stream.finish()
                with arguments.kept.open("a") as file:
                    for one, run in zip(some, runs, strict=True):
                        file.write(json.dumps(_record(drafter, one.task, one.name, run.history.steps)) + "\n")


def _record(drafter: str, task: str, prompt: str, steps: Sequence[Any]) -> dict[str, Any]:
    fields = {"rows": "verified_rows", "emitted": "emitted", "depth": "depth_offered", "accepted": "accepted"}
    found = {name: [getattr(step, field) for step in steps] for name, field in fields.items()}
    return {"drafter": drafter, "task": task, "prompt": prompt, **found}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the records of the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def figures(records: Sequence[Mapping[str, Any]], seconds: Cost, step: float, host: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each drafter and task, and one for all tasks, over the prompts that all drafters answered."""
    answered = [{(r["task"], r["prompt"]) for r in records if r["drafter"] == d} for d in _names(records)]
    both = set.intersection(*answered)
    tasks = [*dict.fromkeys(task for task, _ in sorted(both)), ALL]
    yield from ({"method": PLAIN, "task": t, "speedup": 1.0, "mean_accepted_length": 1.0} for t in tasks)
    for drafter in _names(records):
        parts = drafter.split("+")
        own = sum(HOST.get(part, 0.2) for part in parts) + LENGTH * step * any(part in MODELS for part in parts)
        mine = [r for r in records if r["drafter"] == drafter and (r["task"], r["prompt"]) in both]
        for task in tasks:
            some = [record for record in mine if task in (ALL, record["task"])]
            rows = [count for record in some for count in record["rows"]]
            tokens = sum(sum(record["emitted"]) for record in some)
            taken = sum(seconds(count) + host + own for count in rows)
            offered = [pair for record in some for pair in zip(record["depth"], record["accepted"], strict=True)]
            yield {
                "method": drafter,
                "task": task,
                "speedup": tokens * (seconds(1) + host) / taken,
                "mean_accepted_length": tokens / len(rows),
                "rows": sum(rows) / len(rows),
                "acceptance_by_position": rates(positions(offered))[:8],
            }


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["drafter"] for record in records))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--tasks", default="repetition,builtin")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--only", action="store_true")
    parser.add_argument("--pass-times", default="1:5.29,2:5.26,4:5.48,8:6.41,16:10.03")
    parser.add_argument("--step", type=float, default=0.75)
    parser.add_argument("--host", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.only:
        write(arguments, {name: int(nodes) for name, nodes in (way.split(":") for way in arguments.ways.split(","))})
    times = parse_curve("pass-times", arguments.pass_times)
    found = list(figures(read(arguments.kept), times, arguments.step, arguments.host))
    table = Table(box=None, title="speedup over plain decoding (tokens/pass)", title_justify="left")
    tasks = list(dict.fromkeys(row["task"] for row in found))
    for column in ("", *tasks):
        table.add_column(column, justify="right" if column else "left")
    for name in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == name]
        table.add_row(name, *(f"{row['speedup']:.2f} ({row['mean_accepted_length']:.2f})" for row in mine))
    Console(width=240).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": found}))
    print(json.dumps({"rows": [row for row in found if row["task"] == ALL]}))


if __name__ == "__main__":
    main()
