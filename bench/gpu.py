"""One GPU: what is checked, what passes and answers cost, and what speculation gives, each beside its floor.

Run: python bench/gpu.py [--minutes 8] [--data prompts.jsonl] [--out gpu.jsonl]. It needs the repository and the shipped
model alone. `--device cpu --quick` runs the same in eager mode on small sizes, which is how it is tested where there is
no GPU. Checks come first; after each part its rows are printed and written to `--out`, so a time limit loses nothing.
A table a part, and one JSON line last. Exit status 1 where a check fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_answers import METHODS, turns
from gpu_checks import CHECKED, captured, kinds, of_exact, of_forwards, of_plain, of_texts, random_weights
from gpu_clock import Bench, Row, bandwidth
from gpu_steps import draft_steps

from outpace.api.llm import LLM
from outpace.core import machine
from outpace.core.errors import UserError
from outpace.core.plan import DEVICES
from outpace.models.base import chain
from outpace.models.devices import check_device
from outpace.models.files.find import resolve
from outpace.models.files.pairs import shipped_draft
from outpace.models.llama.config.footprint import NAMED
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.load import load_draft, load_model

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short Python function that adds two numbers, and say what each line does.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Think step by step.",
    "Summarise the story of Robinson Crusoe in a paragraph.",
)


def passes(bench: Bench, model: GraphLlama, name: str, sizes: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    """Passes over `sizes` (batch, nodes, context), each with its floor; a note where there is no memory for one."""
    rate = bandwidth(bench)
    for batch, nodes, context in sizes:
        row: Row = {"model": name, "attention": model.attention, "batch": batch, "nodes": nodes, "context": context}
        try:
            seconds = seconds_of(bench, model, batch, nodes, context)
        except torch.OutOfMemoryError:
            yield row | {"note": "not enough memory"}
            continue
        floor = (model.weight_bytes + batch * context * model.token_bytes) / rate
        row |= {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "of_floor": floor / seconds}
        yield row | {"captures": model.captures.count} | ({"free_gib": bench.free_gib} if bench.is_cuda else {})


def seconds_of(bench: Bench, model: GraphLlama, batch: int, nodes: int, context: int) -> float:
    """What a pass takes over so many sessions, which are gone afterwards: the next ones' stand in their place."""
    sessions = [model.open(context + 1, nodes) for _ in range(batch)]
    for session in sessions:
        session.reserve(context + nodes)
        session.length = context  # what is stored does not change the time
    words = list(range(1, nodes + 1))

    def work() -> None:
        model.score([chain(session, words, range(len(words))) for session in sessions])
        for session in sessions:
            session.truncate(session.length)

    return bench.seconds(work, bench.args.rounds)


def grid(quick: bool) -> list[tuple[int, int, int]]:
    """(batch, nodes, context)"""
    if quick:
        return [(1, 1, 64), (1, 8, 64), (2, 4, 64)]
    one = [(1, nodes, 512) for nodes in (1, 2, 4, 8, 16, 32, 64)]
    return [*one, (1, 1, 4096), (1, 32, 4096), (8, 1, 512), (8, 8, 512), (32, 1, 512), (32, 8, 512)]


def shapes(bench: Bench) -> Iterator[Row]:
    """Random models of known sizes, as far as they fit."""
    for name in ("1B",) if bench.args.quick else ("1B", "8B", "32B"):
        config = NAMED[name] if bench.is_cuda else CHECKED
        for kind in kinds(bench.device)[-1 if name == "32B" else 0 :]:  # the largest as it is run, for want of time
            tensor = random_weights(config, bench.device, bench.dtype)
            model = captured(kind, config, tensor, device=bench.device, dtype=bench.dtype)
            yield from passes(bench, model, name, grid(bench.args.quick))
            del model, tensor
            gc.collect()


def loaded(bench: Bench, inflate: int = 1, exact: bool = False, graphs: str | None = None) -> tuple[Any, Any]:
    """Target and draft: the shipped ones, or those that were named. The draft is never exact, which nothing needs."""
    dtype, graphs = str(bench.dtype).removeprefix("torch."), graphs or ("cuda" if bench.is_cuda else "eager")
    given: dict[str, Any] = {"device": bench.device, "dtype": dtype, "graphs": graphs}
    target = load_model(bench.args.model, inflate=inflate, exact=exact, **given)
    spec = bench.args.draft or shipped_draft(load_name(target.name))
    return target, load_draft(spec or "layers:0", target, **given) if spec or inflate == 1 else None


def load_name(name: str) -> str:
    """Without what says how its cost was changed."""
    return name.split(" (cost")[0]


def answers(bench: Bench, inflate: int = 1, batches: Sequence[int] = (1,)) -> Iterator[Row]:
    """Tokens a second of each method by turns, with what the planner's formula says of the measured parts."""
    target, draft = loaded(bench, inflate)
    if draft is None:
        raise UserError("there is no draft for it: name one with --draft")
    context = min(256, target.model.max_positions // 2)
    parts = list(passes(bench, target.model, "target", [(1, 1, context), (1, 16, context)]))
    parts += passes(bench, draft.model, "draft", [(1, 1, context)])
    yield from parts
    measured = dict(zip(("plain", "verify", "step"), (row["ms"] for row in parts), strict=True))
    for batch in batches:
        yield from turns(bench, target, draft, measured, inflate, batch)
    if bench.is_cuda:
        yield {"peak_gib": torch.cuda.max_memory_allocated(bench.device) / (1 << 30)}


def checks(bench: Bench, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
    """The fast path against the slow ones, then in exact mode."""
    for check in (of_forwards, of_exact):
        for dtype in dtypes:
            yield from check(bench.device, dtype, not bench.is_cuda)


def precisions(bench: Bench) -> Iterator[Row]:
    """Passes with weights in 8 bits beside those in the usual type; as far as torchao is installed."""
    context = 64 if bench.args.quick else 512
    for dtype in ("auto", "int8", "fp8"):
        given = {"device": bench.device, "runtime": "llama", "graphs": "cuda" if bench.is_cuda else "eager"}
        try:
            model = load_model(bench.args.model, dtype=dtype, **given).model
        except UserError as refusal:
            yield {"model": f"target, {dtype}", "note": str(refusal)}
            continue
        yield from passes(bench, model, f"target, {model.precision}", [(1, 1, context), (1, 16, context)])


def texts(bench: Bench) -> Iterator[Row]:
    """Answers against plain decoding's, without exact mode and with it, and what a pass costs in each: its price."""
    context, asked = 64 if bench.args.quick else 512, (bench.args.prompts, bench.args.tokens)
    for exact in (False, True):
        target, draft = loaded(bench, exact=exact)
        if not exact:
            yield from of_plain(target, loaded(bench, graphs="off")[0], *asked)
        several = {"in turn, 4 steps a graph": METHODS["in turn"] | {"steps": 4}}
        for method, options in (METHODS | several).items():
            if method != "plain":
                with LLM(target, draft, **options) as llm:
                    yield from of_texts(llm, *asked, method)
        if bench.args.checks_only:
            continue
        name = "target, exact" if exact else "target"
        yield from passes(bench, target.model, name, [(1, 1, context), (1, 16, context), (4, 8, context)])


def peers(bench: Bench) -> Iterator[Row]:
    """transformers' generate, alone and assisted by the same draft."""
    from transformers import AutoModelForCausalLM

    target, draft = loaded(bench)
    given: dict[str, Any] = {"dtype": bench.dtype, "device_map": None}
    model = AutoModelForCausalLM.from_pretrained(resolve(str(target.files())), **given).to(bench.device)
    assistant = (
        AutoModelForCausalLM.from_pretrained(resolve(str(draft.files())), **given).to(bench.device)
        if draft.files
        else None
    )
    for name, helper in (("generate", None), ("assisted", assistant)):
        if name == "assisted" and assistant is None:
            continue
        for prompt in bench.args.prompts[:2]:
            ids = torch.tensor([target.tokenizer.encode_prompt(prompt)], device=bench.device)
            more = {} if helper is None else {"assistant_model": helper}
            start = time.perf_counter()
            out = model.generate(ids, max_new_tokens=bench.args.tokens, do_sample=False, pad_token_id=2, **more)
            bench.wait()
            yield {"peer": name, "tokens_per_second": (out.shape[1] - ids.shape[1]) / (time.perf_counter() - start)}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command's; UserError for a device that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="target; the default is the shipped one")
    parser.add_argument("--draft", help="its draft; the default is the shipped one")
    parser.add_argument("--data", type=Path, nargs="+", help="JSON lines with `turns`; the default: built-in prompts")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20, help="passes whose median counts")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each method")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the command")
    parser.add_argument("--checks-only", action="store_true", help="forwards and texts, no clock")
    args = parser.parse_args(given)
    check_device(args.device)
    args.prompts = list(PROMPTS)
    if args.data:
        each = max(1, 8 // len(args.data))
        lines = [line for path in args.data for line in path.read_text(encoding="utf-8").splitlines()[:each]]
        args.prompts = [json.loads(line)["turns"][0] for line in lines]
    return args


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    try:
        args = arguments(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    bench, quick = Bench(args), args.quick
    dtypes = [torch.float32, torch.bfloat16] if quick else [torch.float32, torch.bfloat16, torch.float16]
    about = {**machine.describe(args.device), "bandwidth": bandwidth(bench), "known": list(DEVICES)}
    bench.part("machine", lambda: [about])
    bench.part("checks", lambda: checks(bench, dtypes))
    bench.part("texts", lambda: texts(bench))
    if not args.checks_only:
        measure(bench)
    failed = [row for rows in bench.rows.values() for row in rows if row.get("passed") is False]
    print(json.dumps({"failed": len(failed), **bench.rows}))
    return 1 if failed else 0


def measure(bench: Bench) -> None:
    """Every part after the checks."""
    quick = bench.args.quick
    bench.part("passes", lambda: passes(bench, loaded(bench)[0].model, "target", grid(quick)))
    bench.part("draft steps", lambda: draft_steps(bench, loaded(bench)[1].model))
    bench.part("shapes", lambda: shapes(bench))
    bench.part("answers", lambda: answers(bench, 1, (1, 2) if quick else (1, 8, 32)))
    for factor in (2,) if quick else (8, 30, 200):
        bench.part(f"inflated {factor}", lambda factor=factor: answers(bench, factor))
    bench.part("precisions", lambda: precisions(bench))
    bench.part("peers", lambda: peers(bench))


if __name__ == "__main__":
    sys.exit(main())
