"""Compare plain decoding with `generate` of transformers: same float32 weights, prompts and number of tokens.

Run: python bench/plain_against_transformers.py [--rounds 5] [--tokens 64]. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM
from outpace.models.files.find import resolve
from outpace.models.llama.config.llama_config import tensor_shapes
from outpace.models.load import load_model

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that counts the vowels in a string.",
    "A train travels 60 miles in 1.5 hours. How fast does it go? Think step by step.",
)


def bandwidth() -> float:
    """Return the bytes per second that a sum over 512 MiB of float32 reads, the best of five."""
    block = torch.ones(1 << 27)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - start)
    return block.numel() * 4 / min(seconds)


def peer(count: int) -> Callable[[list[int]], tuple[list[int], float]]:
    """Return a function that runs greedy `generate` and returns tokens and decode seconds per token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(None), dtype=torch.float32)

    def run(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        fixed = {"do_sample": False, "pad_token_id": 2, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
        seconds = []
        for length in (1, count + 1):  # the difference excludes prefill
            start = time.perf_counter()
            out = model.generate(ids, max_new_tokens=length, min_new_tokens=length, **fixed)
            seconds.append(time.perf_counter() - start)
        return out[0, len(prompt) :].tolist(), (seconds[1] - seconds[0]) / count

    return run


def ours(llm: LLM, count: int) -> Callable[[list[int]], tuple[list[int], float]]:
    """Return the same for plain decoding by outpace, which also ignores stop tokens here."""
    from outpace.core.sampling import GREEDY
    from outpace.core.types import Request
    from outpace.decoders import Autoregressive
    from outpace.engine.build import find_rule

    def run(prompt: list[int]) -> tuple[list[int], float]:
        request = Request(tuple(prompt), find_rule("greedy", GREEDY), count + 1)
        running = llm.engine.submit(request, Autoregressive, Autoregressive.Options())
        while running.finish_reason is None:
            llm.engine.step()
        return running.tokens, (running.history.ended - running.history.first_token) / count

    return run


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    target = load_model(None, dtype="float32")
    llm = LLM(target, method="autoregressive")
    runs = {"outpace": ours(llm, args.tokens), "transformers": peer(args.tokens)}
    prompts = [target.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    same = total = 0
    for _ in range(args.rounds):
        for prompt in prompts:
            texts = []
            for name, run in runs.items():
                tokens, each = run(prompt)
                seconds[name].append(each)
                texts.append(tokens)
            same += texts[0] == texts[1]
            total += 1
    report(target.model, seconds, same, total)


def report(model: object, seconds: dict[str, list[float]], same: int, total: int) -> None:
    """Print the table, the lower bound and the JSON line."""
    config = model.config  # type: ignore[attr-defined]
    weights = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    rate = bandwidth()
    floor = weights * 4 / rate
    table = Table(title=f"greedy, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for column in ("engine", "tokens/s, median", "least", "most", "ms/token"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    medians = {}
    for name, each in seconds.items():
        medians[name] = 1 / statistics.median(each)
        row = (medians[name], 1 / max(each), 1 / min(each), 1e3 * statistics.median(each))
        table.add_row(name, *(f"{value:.1f}" for value in row))
    table.add_row("floor (weights read once)", f"{1 / floor:.1f}", "", "", f"{1e3 * floor:.1f}")
    console = Console()
    console.print(table)
    ratio = medians["outpace"] / medians["transformers"]
    console.print(f"{ratio:.2f} times transformers; {weights * 4 / 1e6:.0f} MB of weights at {rate / 1e9:.1f} GB/s")
    line = {"ratio": ratio, "tokens_per_second": medians, "floor_ms": 1e3 * floor, "equal_text": f"{same}/{total}"}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
