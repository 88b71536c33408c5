"""CARD beside the target on the cores of one CPU: with cores divided between the two, and with both teams on all cores.

Run: python bench/beside_on_cores.py --tasks A.jsonl,B.jsonl [--prompts 10] [--first 0] [--tokens 96] [--out FILE.jsonl]
     [--ways plain,divided,"divided without waits","on all cores",planned,auto] [--nodes 8] [--drafter model]
Each prompt is answered by every way in turn, so that a shared machine's speed changes meet all of them. Decoding
without prefill. --first and --prompts take a part of each task: --out gathers parts, and alone shows the whole. Exit 1
where a text differs from plain decoding's. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from outpace.api.llm import LLM, load
from outpace.bench.tasks import collect

PLAIN = "plain"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": "autoregressive"},
    "divided": {"method": "card"},
    "on all cores": {"method": "card"},
    "divided without waits": {"method": "card", "just_in_time": 0},
    "planned": {"method": "planned"},
    "planned on all cores": {"method": "planned"},
    "pearl": {"method": "pearl"},
    "ssd": {"method": "ssd"},
    "auto": {"method": "auto"},
}


def open_way(parts: ExitStack, llm: LLM, name: str, args: argparse.Namespace) -> LLM:
    """An LLM of the same two models."""
    options = dict(WAYS[name])
    if options["method"] != "autoregressive":
        options["drafter"] = args.drafter
    if options["method"] in ("card", "planned", "pearl", "ssd"):
        options["nodes"] = args.nodes
    draft = None if options["method"] == "autoregressive" else llm.draft
    way = parts.enter_context(closing(LLM(llm.target, draft, reuse=False, profile=False, **options)))
    if name.endswith("on all cores"):
        assert way.engine.worker is not None
        way.engine.worker.cores = 0  # as if the drafter took none
    return way


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each prompt and way."""
    asked = collect(args.tasks.split(","), args.first + args.prompts)
    by_task: dict[str, list[Any]] = defaultdict(list)
    for one in asked:
        by_task[one.task].append(one)
    chosen = [one for some in by_task.values() for one in some[args.first :]]
    with load(args.target, draft=args.draft, method="autoregressive") as llm, ExitStack() as parts:
        ways = {name: open_way(parts, llm, name, args) for name in args.ways.split(",")}
        for number, one in enumerate(track(chosen, console=Console(stderr=True))):
            prompt, texts = llm.tokenizer.encode_prompt(one.text), {}
            for name, way in ways.items():
                if not number:
                    way.generate(prompt, max_tokens=16)
                answer = way.generate(prompt, max_tokens=args.tokens)[0]
                texts[name] = list(answer.tokens)
                figures, worker = answer.figures, way.engine.worker
                yield {
                    "task": one.task,
                    "prompt": args.first + number,
                    "way": name,
                    "rate": answer.tokens_per_second,
                    "tokens": len(answer.tokens),
                    "length": figures.mean_accepted_length,
                    "passes": figures.passes,
                    "target_seconds": figures.target_seconds,
                    "hit_rate": figures.hit_rate,
                    "turn_seconds": worker.step_seconds if worker is not None else None,
                    "equal": texts[name] == texts[PLAIN],
                }


def pooled(records: Sequence[dict[str, Any]], name: str, task: str) -> dict[str, float]:
    """A way's speed over plain decoding's, all tokens over all seconds; the median and the least of single prompts."""
    mine = {(r["task"], r["prompt"]): r for r in records if r["way"] == name and task in ("all", r["task"])}
    plain = {(r["task"], r["prompt"]): r for r in records if r["way"] == PLAIN}
    seconds = [sum(side[key]["tokens"] / side[key]["rate"] for key in mine) for side in (plain, mine)]
    single = [one["rate"] / plain[key]["rate"] for key, one in mine.items()]
    length = sum(one["tokens"] for one in mine.values()) / sum(one["tokens"] / one["length"] for one in mine.values())
    return {"pooled": seconds[0] / seconds[1], "median": median(single), "least": min(single), "length": length}


def show(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table, and its rows."""
    tasks = [*dict.fromkeys(record["task"] for record in records), "all"]
    rows = []
    table = Table(title="over plain decoding, pooled (median, least of single prompts; tokens a pass)")
    for column in ("way", *tasks):
        table.add_column(column)
    for name in dict.fromkeys(record["way"] for record in records):
        found = {task: pooled(records, name, task) for task in tasks}
        cells = [f"{f['pooled']:.3f} ({f['median']:.2f}, {f['least']:.2f}; {f['length']:.2f})" for f in found.values()]
        table.add_row(name, *cells)
        rows.append({"way": name, **{task: {k: round(v, 4) for k, v in f.items()} for task, f in found.items()}})
    Console(width=160).print(table)
    return rows


def made_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a way's speed is made of: milliseconds of a round, of the target's pass in it and of a turn of its drafter,
    and how often the next root was drafted: the table, and its rows."""
    found = []
    table = Table(title="milliseconds, and the share of rounds that begin below a drafted root")
    for column in ("way", "round", "pass", "drafter's turn", "hits", "tokens a pass"):
        table.add_column(column)
    for name in dict.fromkeys(record["way"] for record in records):
        mine = [record for record in records if record["way"] == name]
        passes = sum(record["passes"] for record in mine)
        turns = [record["turn_seconds"] for record in mine if record["turn_seconds"] is not None]
        hits = [(record["hit_rate"], record["passes"]) for record in mine if record["hit_rate"] is not None]
        row = {
            "round": 1e3 * sum(record["tokens"] / record["rate"] for record in mine) / passes,
            "pass": 1e3 * sum(record["target_seconds"] for record in mine) / passes,
            "drafter's turn": 1e3 * median(turns) if turns else None,
            "hits": sum(rate * count for rate, count in hits) / sum(count for _, count in hits) if hits else None,
            "tokens a pass": sum(record["tokens"] for record in mine) / passes,
        }
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in row.values()))
        found.append({"way": name} | {key: value and round(value, 4) for key, value in row.items()})
    Console(width=160).print(table)
    return found


def main() -> None:
    """Measures a part, and shows all parts that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tasks")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--drafter", default="model")
    parser.add_argument("--ways", default="plain,divided,on all cores,auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    records = [] if not args.tasks else list(measure(args))
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        records = [json.loads(line) for line in args.out.read_text().splitlines()]
    rows, different = show(records), sum(not record["equal"] for record in records)
    parts = made_of(records)
    about = {"nodes": args.nodes, "drafter": args.drafter, "different": different}
    print(json.dumps(about | {"rows": rows, "made_of": parts}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
