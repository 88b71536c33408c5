"""All drafters on all kinds of tasks, timed in turn: over plain decoding, by position, by source, by prompts seen.

Run: python bench/all_drafters.py --data FOLDER --out FOLDER [--prompts 10] [--tokens 128,64] [--ways W,W] [--parts P,P]
     [--while FILE] [--draw bench.png]
--data has mt_bench.jsonl, gsm8k.jsonl, humaneval.jsonl, spec_bench.jsonl, mgsm.jsonl, and gsm8k_train.jsonl and
instructions.jsonl, of which the datastore of `retrieval` is made. The part `repetition` has the tasks whose answers
repeat their prompts, `others` all others and both turns of mt_bench; --tokens: the longest answers of either.
Answers are kept in --out as they come, and a run goes on behind them. But what tables learn from prompt to prompt
lives in the process: with --while it measures only while that file is there, and waits meanwhile. --prompts 0 measures
nothing and shows what is kept. --draw draws it (bench/plot_drafters.py). One JSON line last, and rows.json in --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plot_drafters
from plot_drafters import SEEN, called
from rich.console import Console
from rich.table import Table

from outpace.api.llm import load
from outpace.api.params import SamplingParams
from outpace.bench import report, table_files
from outpace.bench.contenders import PLAIN, Contender, parse_methods
from outpace.bench.figures import ALL, TableRow, table_rows
from outpace.bench.run import Bench, BenchOptions
from outpace.bench.store import Record, Store, read_records

WAYS = (
    "auto",
    "auto:drafter=model+prediction+suffix",
    *(f"speculative:drafter={name},nodes=8" for name in ("suffix", "ngram", "cacheback", "recycle")),
    "speculative:drafter=retrieval,nodes=8,datastore={datastore}",
    "speculative:drafter=prediction,nodes=16,guess=10",
    "speculative:drafter=lookahead,nodes=17,window=4,ngram=3,guesses=4",
    "speculative:drafter=ouroboros,nodes=8,draft_length=3",
    *(f"speculative:drafter={name},nodes=4,width=1,draft_length=3" for name in ("model", "translated")),
)
LANGUAGES = ("de", "es", "fr", "zh")
CORPUS = ("gsm8k_train.jsonl", "instructions.jsonl")
DATASTORE = "retrieval.datastore"
PARTS = ("repetition", "others")
POSITIONS = (1, 2, 3, 4, 6, 8, 12)
Say = Callable[[str], None]


def tasks(part: str, data: Path, out: Path) -> list[str]:
    """The tasks of a part; mgsm is one of each language."""
    if part == PARTS[0]:
        return ["repetition"]
    with (data / "mgsm.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    files = [str(data / f"{name}.jsonl") for name in ("mt_bench", "gsm8k", "humaneval", "spec_bench")]
    for language in LANGUAGES:
        path = out / f"mgsm_{language}.jsonl"
        mine = [line | {"task": path.stem} for line in lines if line["language"] == language]
        path.write_text("".join(json.dumps(line) + "\n" for line in mine))
        files.append(str(path))
    return [*files, "summaries"]


def measure(args: argparse.Namespace, ways: Sequence[Contender], say: Say) -> None:
    """Whatever is not there yet."""
    with load(args.target, args.draft, method="auto", profile=False) as llm:
        for part, tokens in zip(PARTS, args.tokens.split(","), strict=True):
            if part not in args.parts.split(","):
                continue
            options = BenchOptions(
                tasks=tuple(tasks(part, args.data, args.out)),
                methods=tuple(ways),
                prompts=args.prompts,
                turns=2,
                target=args.target,
                sampling_params=SamplingParams(max_tokens=int(tokens)),
            )
            show = waiting(args.gate, say)
            show(f"{part}, warming up", 0, 1)  # a planner times its first rounds too
            store = Store(args.out / part, options.settings(llm))
            with Bench(llm, options, store, say) as bench:
                bench.measure(show)


def waiting(gate: Path | None, say: Say) -> Callable[[str, int, int], None]:
    """Before each answer: waits while the file is not there, and now and then says how far it is."""
    said = 0

    def show(what: str, done: int, total: int) -> None:
        nonlocal said
        if done >= said + 100 or done == total:
            said = done
            say(f"{done} of {total}, {what}")
        while gate is not None and not gate.exists():
            time.sleep(0.2)

    return show


def seen(records: Sequence[Record]) -> dict[str, list[float]]:
    """Tokens a pass of each way, by how many prompts of each task came before."""
    places: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        known = places[record.label, record.task]
        place = known.setdefault(record.prompt, len(known))
        group = next((number for number, (first, last) in enumerate(SEEN) if first <= place < last), None)
        if group is not None and record.counts:
            sums[record.label, group][0] += sum(record.counts)
            sums[record.label, group][1] += len(record.counts)
    found: dict[str, list[float]] = defaultdict(list)
    for (label, _), (tokens, passes) in sorted(sums.items(), key=lambda item: item[0][1]):
        found[label].append(tokens / passes)
    return found


def read(out: Path) -> list[Record]:
    """All finished answers of all parts; of one that was written again the last."""
    found = [record for part in PARTS if (out / part).exists() for record in read_records(out / part)]
    return list({record.key: record for record in found if record.failed is None}.values())


def complete(records: Sequence[Record], ways: Sequence[str]) -> list[Record]:
    """Those of prompts that all ways have answered: a run that is stopped has some of others."""
    answered = [{(r.task, r.prompt) for r in records if r.label == label} for label in ways]
    both = set.intersection(*answered)
    return [r for r in records if (r.task, r.prompt) in both and r.label in ways]


def table(title: str, heads: Sequence[str], lines: Mapping[str, Sequence[str]]) -> Table:
    """Names on the left, figures on the right."""
    made = Table("", box=None, title=title, title_justify="left")
    for head in heads:
        made.add_column(head, justify="right")
    for name, cells in lines.items():
        made.add_row(name, *cells)
    return made


def show(found: Sequence[TableRow], by_seen: Mapping[str, Sequence[float]], console: Console) -> None:
    """All tables."""
    names = list(dict.fromkeys(row.task for row in found))
    labels = [label for label in dict.fromkeys(row.label for row in found) if label != PLAIN]
    cells = {(row.task, row.label): row for row in found}
    counts = ", ".join(f"{name} {cells[name, PLAIN].prompts}" for name in names)
    console.print(f"prompts: {counts}")
    for title, field in (("times plain decoding's speed", "speedup"), ("tokens a pass", "mean_accepted_length")):
        lines = {called(label): [number(getattr(cells[name, label], field)) for name in names] for label in labels}
        console.print(table(title, names, lines))
    whole = [cells[ALL, label] for label in labels]
    lines = {called(row.label): positions(row.acceptance_by_position) for row in whole}
    console.print(table("accepted, once those before were, by position", [str(at) for at in POSITIONS], lines))
    lines = {called(row.label): [sources(row)] for row in whole}
    console.print(table("by source: judged, written, of all tokens", ["source"], lines))
    lines = {called(label): [number(value) for value in by_seen[label]] for label in labels}
    console.print(table("tokens a pass by the prompt's place in its task", plot_drafters.PLACES, lines))
    different = sum(row.different for row in whole)
    compared = sum(row.compared for row in whole)
    console.print(f"{different} of {compared} texts differ from plain decoding's")


def positions(rates: Sequence[float]) -> list[str]:
    """Those that are shown."""
    return [number(rates[at - 1]) if at <= len(rates) else "" for at in POSITIONS]


def sources(row: TableRow) -> str:
    """Each source's share of all that was written, and how much of what it proposed came true."""
    parts = [(name, judged, written) for name, judged, written in row.sources if judged]
    return ", ".join(f"{name} {judged} {written} {written / row.tokens:.2f}" for name, judged, written in parts)


def number(value: float | None) -> str:
    """Two digits."""
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", default="128,64")
    parser.add_argument("--ways", default=";".join(WAYS), help="joined by ;")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--while", dest="gate", type=Path)
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    console = Console(width=240)
    datastore = args.out / DATASTORE
    args.out.mkdir(parents=True, exist_ok=True)
    if not datastore.exists():
        table_files.make_table(
            "retrieval", [args.data / name for name in CORPUS], args.target, datastore, lambda *_: None
        )
    ways = parse_methods(args.ways.replace(";", ",").replace("{datastore}", str(datastore)), {})
    if args.prompts:
        measure(args, ways, lambda text: console.print(text))
    records = complete(read(args.out), [way.label for way in ways])
    found = table_rows(records, [way.label for way in ways])
    by_seen = seen(records)
    show(found, by_seen, console)
    kept: dict[str, Any] = {"rows": [asdict(row) for row in found], "seen": by_seen}
    report.write_json(args.out / "rows.json", kept)
    if args.draw:
        plot_drafters.plot(kept["rows"], by_seen, args.draw)
    print(json.dumps({"rows": [row for row in kept["rows"] if row["task"] == ALL]}))


if __name__ == "__main__":
    main()
