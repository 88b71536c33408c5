"""Rounds of `auto` that the kernels carry out in one call, beside the same planner's rounds asked for step by step.

Run: python bench/whole_rounds.py --data FOLDER [--prompts 4] [--tokens 128] [--rounds 5] [--batch 1,2,8]
     [--temperature 0.8] [--top-p 0.95]
FOLDER holds prompts as docs/benchmarks.md describes them. Plain decoding and both ways in turn on the same prompts,
each time by a new LLM over the models that are loaded; medians over the rounds. `host`: what a round takes outside of
the kernels. Prompts' reading counts in tokens/s, as users meet it. One JSON line last; exit 1 where a text differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from short_answers import as_prompt, end, new_llm, read_prompts, shipped_pair

from outpace.core.errors import UserError
from outpace.engine.engine import Engine
from outpace.engine.native_rounds import Carriers
from outpace.models.llama.native.pair import NativePair
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.load import Loaded

PLAIN, STEPS, WHOLE = "plain", "auto, step by step", "auto, whole rounds"
WAYS = (PLAIN, STEPS, WHOLE)


class Watch:
    """Seconds by what was done: in the kernels, and in the engine's steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its time noted."""

        def wrapped(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return wrapped

    @contextmanager
    def watching(self, way: str) -> Iterator[None]:
        """One way's answers."""
        kept = [(owner, name, getattr(owner, name)) for owner, name in SEAMS]
        try:
            for owner, name, call in kept:
                setattr(owner, name, self.timed("step" if owner is Engine else "kernels", call))
            if way == STEPS:
                Carriers.may_carry = lambda *_: None  # type: ignore[assignment, method-assign]
            yield
        finally:
            for owner, name, call in kept:
                setattr(owner, name, call)


SEAMS = ((Engine, "step"), (NativeLlama, "_forward"), (NativePair, "carry"), (Carriers, "may_carry"))


def answer(
    target: Loaded, draft: Loaded, way: str, texts: Sequence[str], batch: int, options: dict[str, Any]
) -> dict[str, Any]:
    """All prompts by one way, so many at once; `options` as `LLM.generate` takes them."""
    watch = Watch()
    method = "autoregressive" if way == PLAIN else "auto"
    with watch.watching(way), new_llm(target, draft, method) as llm:
        prompts = [as_prompt(target, text) for text in texts]
        llm.generate(prompts[:batch], **options)
        watch.seconds.clear()
        began, results = time.perf_counter(), []
        for first in range(0, len(prompts), batch):
            results += llm.generate(prompts[first : first + batch], **options)
        seconds = time.perf_counter() - began
    written = sum(len(result.tokens) for result in results)
    passes = sum(result.figures.passes for result in results)
    host = watch.seconds["step"] - watch.seconds["kernels"]
    return {
        "tokens_per_second": written / seconds,
        "host_us": 1e6 * host / passes,
        "tokens_a_pass": written / passes,
        "texts": [tuple(result.tokens) for result in results],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", default="1", help="so many at once, separated by commas")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    args = parser.parse_args()
    options = {"max_tokens": args.tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": 1}
    texts = list(read_prompts(args.data, args.prompts).values())
    target, draft = shipped_pair()
    batches = [int(one) for one in args.batch.split(",")]
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("answers", total=args.rounds * len(batches) * len(WAYS))
        for turn in range(args.rounds):
            for batch in batches:
                for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                    found[batch, way].append(answer(target, draft, way, texts, batch, options))
                    progress.advance(task)
    table = Table("at once", "way", "tokens/s", "over plain", "tokens a pass", "host, us a round and request")
    rows, differing = [], 0
    for batch in batches:
        plain = [run["tokens_per_second"] for run in found[batch, PLAIN]]
        for way in WAYS:
            runs = found[batch, way]
            differing += sum(run["texts"] != found[batch, PLAIN][0]["texts"] for run in runs)
            own = [run["tokens_per_second"] for run in runs]
            ratio = median(mine / other for mine, other in zip(own, plain, strict=True))
            host, length = (median(run[name] for run in runs) for name in ("host_us", "tokens_a_pass"))
            table.add_row(str(batch), way, f"{median(own):.0f}", f"{ratio:.3f}x", f"{length:.2f}", f"{host:.0f}")
            rows.append(
                {"batch": batch, "way": way, "tokens_per_second": median(own), "over_plain": ratio, "host": host}
            )
    Console(width=120).print(table)
    end({"rows": rows, "differing": differing}, differing)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
