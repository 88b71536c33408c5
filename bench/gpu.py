"""Texts, passes, answers and speedups on one GPU, each with its lower bound.

Run: python bench/gpu.py [--minutes 8] [--parts "answers, 8B" ...] [--data prompts.jsonl] [--out gpu.jsonl]. It needs
only the repository and the shipped model. --data are files of JSON lines with `turns`, --rounds passes per median,
--repeats repetitions of each method, --batches numbers of concurrent requests. `--device cpu --quick` runs the parts in
eager mode with small sizes; the tests do so. Each row is appended to `--out` at once, so a time limit loses nothing.
The last line is JSON. The exit status is 1 if a text differs that must not; `pytest -m cuda tests/test_cuda.py`
compares the passes themselves.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import parse
from inflation import inflate
from torch import Tensor

from outpace.api.llm import LLM
from outpace.core import machine
from outpace.core.errors import UserError
from outpace.core.noise import unavailable_reason
from outpace.core.stats import merge_stats
from outpace.models.base import chain
from outpace.models.devices import check_device
from outpace.models.files.pairs import shipped_draft
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.load import load_draft, load_model

SHIPPED = "shipped"
SHAPES = {  # layers, hidden and intermediate size, heads, key heads and head size of Llama 3 and Qwen 2.5
    "1B": (16, 2048, 8192, 32, 8, 64),
    "8B": (32, 4096, 14336, 32, 8, 128),
    "32B": (64, 5120, 27648, 40, 8, 128),
}
QUICK_SHAPE = (32, 640, 1792, 12, 4, 64)  # to which --quick widens the target: a little more than the shipped model
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short Python function that adds two numbers, and say what each line does.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Think step by step.",
    "Summarise the story of Robinson Crusoe in a paragraph.",
)


Row = dict[str, Any]
CHECKED = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=2048,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)


def random_weights(config: LlamaConfig, device: str, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Weights of a random model by name, made where they are to lie; the same whatever was asked for before."""
    shapes = tensor_shapes(config)
    names = list(shapes)

    def tensor(name: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(names.index(name))
        made = torch.randn(shapes[name], generator=generator, device=device, dtype=dtype)
        return made * shapes[name][-1] ** -0.5 if len(shapes[name]) > 1 else 1 + 0.1 * made

    return tensor


def kinds(device: str, is_eager: bool = False) -> tuple[str, ...]:
    """Return the kinds of attention that captured passes support on this device."""
    is_fused = not is_eager and torch.device(device).type == "cuda" and unavailable_reason(torch.device(device)) is None
    return ("matmul", "fused") if is_fused else ("matmul",)


def captured(kind: str, *given: Any, **more: Any) -> GraphLlama:
    """Build a captured model with this kind of attention. Raise AssertionError if its kernels fail."""
    if kind != "fused":
        return GraphLlama.from_tensors(*given, **more)
    from outpace.models.llama.cuda.fused_runtime import FusedLlama  # imports Triton

    model = FusedLlama.from_tensors(*given, **more)
    assert isinstance(model, FusedLlama), model.notice
    return model


class Bench:
    """Holds the arguments, the clock and the rows found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.is_cuda = torch.device(args.device).type == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.ends = time.monotonic() + 60 * args.minutes
        self.rows: dict[str, list[Row]] = {}

    @property
    def has_time(self) -> bool:
        """Whether `--minutes` have not yet passed."""
        return time.monotonic() < self.ends

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    @property
    def free_gib(self) -> float:
        """Free GPU memory in GiB. Captured passes use more of it than models and sessions do."""
        return round(float(torch.cuda.mem_get_info(self.device)[0]) / (1 << 30), 2)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the median duration of `times` runs, after two warm-up runs."""
        found = []
        for number in range(times + 2):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            if number >= 2:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    def part(self, name: str, rows: Callable[[], Iterator[Row] | Sequence[Row]]) -> None:
        """Run one part while time is left. An error becomes a row and ends only this part."""
        found = self.rows.setdefault(name, [])
        start = time.monotonic()
        try:
            for row in rows() if self.has_time else ():
                self.add_row(name, row)
                if not self.has_time:
                    self.add_row(name, {"note": "the time limit was reached"})
                    break
        except Exception as error:  # the other parts still run
            self.add_row(name, {"error": f"{type(error).__name__}: {error}", "passed": False})
        self.release()
        show(name, found, time.monotonic() - start)

    def release(self) -> None:
        """Free the memory of models that are no longer used."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def add_row(self, part: str, row: Row) -> None:
        """Append a row to those of the part and to the file."""
        self.rows[part].append(row)
        with self.args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **row}) + "\n")


def show(name: str, rows: Sequence[Row], seconds: float) -> None:
    """Print the rows of one part, one per line."""
    print(f"\n{name} ({seconds:.0f} s)")
    for row in rows:
        cells = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + ", ".join(cells), flush=True)


def of_texts(llm: LLM, prompts: Sequence[str], count: int, method: str = "") -> list[Row]:
    """Compare texts with those of plain decoding; without exact mode near ties may flip."""
    found, label = [], f"{method} against plain decoding" if method else "text against plain decoding"
    asked = asked_of(llm.target, prompts)
    for sampling in _samplings(count):
        plain = llm.generate(asked, plain=True, **sampling)
        found.append(_alike(label, llm.target, sampling, plain, llm.generate(asked, **sampling)))
    return found


def of_plain(target: Any, slow: Any, prompts: Sequence[str], count: int) -> list[Row]:
    """Compare plain decoding by captured passes with plain decoding by the runtime without captures."""
    found = []
    with LLM(target, None, method="autoregressive") as ours, LLM(slow, None, method="autoregressive") as other:
        for sampling in _samplings(count):
            texts = [llm.generate(asked_of(target, prompts), **sampling) for llm in (other, ours)]
            found.append(_alike("captured passes against uncaptured ones", target, sampling, *texts))
    return found


def asked_of(target: Any, prompts: Sequence[str]) -> list[Any]:
    """Format prompts as chats if the tokenizer has a template."""
    if not getattr(target.tokenizer, "has_template", False):
        return list(prompts)
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def _samplings(count: int) -> list[dict[str, Any]]:
    return [{"max_tokens": count, "temperature": temperature, "seed": 1} for temperature in (0.0, 0.8)]


def _alike(label: str, target: Any, sampling: dict[str, Any], plain: Sequence[Any], ours: Sequence[Any]) -> Row:
    """Count differing answers per million tokens written up to the first difference."""
    written = differing = 0
    for one, other in zip(plain, ours, strict=True):
        same = next(
            (n for n, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        written += len(one.tokens) if same is None else same + 1
        differing += same is not None
    mode = f"{target.precision}{', exact' if target.model.exact else ''}"
    return {
        "check": f"{label}, temperature {sampling['temperature']:g} ({mode})",
        "differing_per_million": 1e6 * differing / written,
        "tokens": written,
        "passed": differing == 0 or not (target.model.exact or target.precision == "float32"),
    }


def bandwidth(bench: Bench) -> float:
    """Measure the bytes per second that reading memory reaches on the device."""
    if not bench.is_cuda:
        return machine.memory_bandwidth()
    buffer = torch.ones(1 << 29, dtype=torch.bfloat16, device=bench.device)
    return buffer.nbytes / bench.seconds(buffer.sum, 10)


class Method(NamedTuple):
    """A method's options, and the device of its draft: "gpu", "cpu" or "" (none)."""

    draft: str
    options: dict[str, Any]


SHORT, LONG = {"draft_length": 4, "nodes": 8}, {"draft_length": 6, "nodes": 32}
SEQUENTIAL = {"method": "speculative", "drafter": "model"}
CARD = {"method": "card", "drafter": "model"}
METHODS = {
    "plain": Method("", {"method": "autoregressive"}),
    "sequential, 4 steps": Method("gpu", SEQUENTIAL | SHORT),
    "sequential, 6 steps": Method("gpu", SEQUENTIAL | LONG),
    "sequential, 6 steps, draft on the CPU": Method("cpu", SEQUENTIAL | LONG),
    "CARD in a thread": Method("gpu", CARD | {"worker": "thread"}),
    "CARD, polled, draft on the CPU": Method("cpu", CARD | {"worker": "polled"}),
    "CARD in a process, draft on the CPU": Method("cpu", CARD | {"worker": "process"}),
    "planned, polled, draft on the CPU": Method("cpu", CARD | {"method": "planned", "worker": "polled"}),
    "auto": Method("gpu", {"method": "auto", "profile": False}),
    "auto, draft on the CPU": Method("cpu", {"method": "auto", "profile": False}),
}
# Methods measured with several requests.
IN_BATCHES = ("plain", "sequential, 4 steps", "auto", "auto, draft on the CPU")
PROMPTS_OF, TOKENS_OF = {"8B": 6, "32B": 3}, {"8B": 96, "32B": 64}  # at most, since large targets write slowly


class Models(NamedTuple):
    """A target with its draft, on the device and on the CPU."""

    target: Any
    draft: Any
    cpu_draft: Any

    def llm(self, method: Method, **more: Any) -> LLM:
        """Return an LLM with a method's options. On a CPU no pass can be polled, so a thread replaces that worker."""
        options, draft = method.options | more, {"gpu": self.draft, "cpu": self.cpu_draft}.get(method.draft)
        if options.get("worker") == "polled" and str(self.target.model.device) == "cpu":
            options = options | {"worker": "thread"}
        return LLM(self.target, draft, **options)


def method_speeds(bench: Bench, models: Models, about: dict[str, Any], batch: int) -> Iterator[Row]:
    """Measure tokens/s of the methods, interleaved, after a repetition that captures passes of all sizes."""
    size = about["inflate"] or ""
    count = min(bench.args.tokens, TOKENS_OF.get(size, bench.args.tokens))
    prompts = bench.args.prompts[: PROMPTS_OF.get(size)]
    asked = asked_of(models.target, [prompts[number % len(prompts)] for number in range(max(batch, len(prompts)))])
    about = about | {"batch": batch}
    rates: dict[str, list[float]] = {}
    last: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        chosen = {name: method for name, method in METHODS.items() if batch == 1 or name in IN_BATCHES}
        llms = {
            name: stack.enter_context(models.llm(method, batch=batch, reuse=False)) for name, method in chosen.items()
        }
        for turn in range(bench.args.repeats + 1):
            for name, llm in llms.items():
                if turn == 0 and name == "plain" and batch == 1:
                    continue  # the other methods capture its passes
                start = time.perf_counter()
                last[name] = llm.generate(asked, max_tokens=count)
                seconds = time.perf_counter() - start
                written = sum(len(result.tokens) for result in last[name])
                yield about | {"method": name, "turn": turn, "tokens_per_second": written / seconds}
                if turn:
                    rates.setdefault(name, []).append(written / seconds)
    plain = statistics.median(rates["plain"])
    for name, found in rates.items():
        row = about | {"method": name, "times_plain": statistics.median(found) / plain}
        row["tokens_a_pass"] = merge_stats([result.figures for result in last[name]]).mean_accepted_length
        yield row | {"differing": sum(a.tokens != b.tokens for a, b in zip(last[name], last["plain"], strict=True))}


def passes(bench: Bench, model: GraphLlama, name: str, sizes: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    """Time passes of each size (batch, nodes, context), with the time that memory bandwidth allows (floor)."""
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
    """Time a pass over `batch` new sessions."""
    sessions = [model.open(context + 1, nodes) for _ in range(batch)]
    for session in sessions:
        session.reserve(context + nodes)
        session.length = context  # the stored values do not change the time
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


def config_of(
    layers: int, hidden: int, middle: int, heads: int, key_heads: int, width: int, is_tied: bool
) -> LlamaConfig:
    """Return the config of a model of this shape with Llama 3's vocabulary."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": middle, "num_heads": heads}
    sizes |= {"num_kv_heads": key_heads, "head_dim": width, "vocab_size": 128256}
    return replace(CHECKED, **sizes, max_positions=131072, rope_theta=500000.0, tie_embeddings=is_tied)


def shapes(bench: Bench) -> Iterator[Row]:
    """Time random models of known sizes that fit into memory."""
    for name in ("1B",) if bench.args.quick else ("1B", "8B", "32B"):
        config = config_of(*SHAPES[name], is_tied=name == "1B") if bench.is_cuda else CHECKED
        for kind in kinds(bench.device)[
            -1 if name == "32B" else 0 :
        ]:  # to save time, only the fastest kind for the largest model
            tensor = random_weights(config, bench.device, bench.dtype)
            model = captured(kind, config, tensor, device=bench.device, dtype=bench.dtype)
            yield from passes(bench, model, name, grid(bench.args.quick))
            del model, tensor
            gc.collect()


def loaded(
    bench: Bench, size: str | None = None, exact: bool = False, graphs: str | None = None, draft: str | None = None
) -> Models:
    """Load target and drafts (`draft`, or the first of `--drafts`). The drafts need no exact mode. With `size` the
    target is widened to that shape."""
    dtype, graphs = str(bench.dtype).removeprefix("torch."), graphs or ("cuda" if bench.is_cuda else "eager")
    given: dict[str, Any] = {"device": bench.device, "dtype": dtype, "graphs": graphs}
    target = load_model(bench.args.model, exact=exact, **given)
    spec = draft or bench.args.drafts[0]
    spec = shipped_draft(target.name) or "layers:0" if spec == SHIPPED else spec
    on_cpu = {"device": "cpu", "dtype": "auto", "graphs": "auto", "exact": None}
    drafts = [load_draft(spec, target, **where) for where in (given, on_cpu)]
    if size:
        target = inflate(target, size, QUICK_SHAPE if bench.args.quick else SHAPES[size])
    return Models(target, *drafts)


def answers(bench: Bench, size: str | None = None) -> Iterator[Row]:
    """Measure tokens/s of each method with each draft, and passes by themselves."""
    for number, draft in enumerate(bench.args.drafts):
        models, about = loaded(bench, size, draft=draft), {"inflate": size, "draft": Path(draft).name}
        context = min(256, models.target.model.max_positions // 2)
        parts = list(passes(bench, models.target.model, "target", [(1, 1, context), (1, 16, context)]))
        parts += passes(bench, models.draft.model, "draft", [(1, 1, context)])
        seconds = seconds_of(bench, models.cpu_draft.model, 1, 1, context)
        parts.append({"model": "draft on the CPU", "context": context, "ms": 1e3 * seconds})
        yield from (about | row for row in parts)
        batches = [1] if number or size == "32B" else bench.args.batches
        for batch in batches:
            yield from method_speeds(bench, models, about, batch)
        if bench.is_cuda:
            peak = torch.cuda.max_memory_allocated(bench.device)
            yield about | {"peak_gib": peak / (1 << 30), "captures": models.target.model.captures.count}
        del models
        bench.release()


def texts(bench: Bench) -> Iterator[Row]:
    """Compare answers with those of plain decoding, without and with exact mode."""
    asked = bench.args.prompts, bench.args.tokens
    for exact in (False, True):
        models = loaded(bench, exact=exact)
        if not exact:
            yield from of_plain(models.target, loaded(bench, graphs="off").target, *asked)
        for name, method in METHODS.items():
            if name != "plain":
                with models.llm(method) as llm:
                    yield from of_texts(llm, *asked, name)


def own_passes(bench: Bench) -> Iterator[Row]:
    """Time passes of the target itself, without and with exact mode."""
    for exact, sizes in ((False, grid(bench.args.quick)), (True, grid(quick=True))):
        model = loaded(bench, exact=exact).target.model
        yield from passes(bench, model, "target, exact" if exact else "target", sizes)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raise UserError if the device does not exist."""
    options: dict[str, Any] = {"minutes": 8.0, "device": "cuda", "model": str, "drafts": [SHIPPED], "parts": [""]}
    options |= {"batches": [1, 8, 32], "data": [""], "out": Path("gpu.jsonl"), "tokens": 128, "rounds": 20}
    args = parse(__doc__, None, {"parts": PARTS}, given, **options, repeats=3, quick=False)
    check_device(args.device)
    args.prompts = list(PROMPTS)
    if args.data != [""]:
        each = max(1, 8 // len(args.data))
        files = [Path(name).read_text(encoding="utf-8").splitlines()[:each] for name in args.data]
        lines = [line for row in zip_longest(*files) for line in row if line]  # the files take turns
        args.prompts = [json.loads(line)["turns"][0] for line in lines]
    return args


def main(given: Sequence[str] | None = None) -> int:
    """Run all parts."""
    try:
        args = arguments(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    bench = Bench(args)
    about = {**machine.describe(args.device), "bandwidth": bandwidth(bench)}
    bench.part("machine", lambda: [about])
    for name in args.parts if args.parts != [""] else [one for one in PARTS if not (args.quick and one in WIDE)]:
        bench.part(name, lambda name=name: PARTS[name](bench))
    failed = [row for rows in bench.rows.values() for row in rows if row.get("passed") is False]
    print(json.dumps({"failed": len(failed), **bench.rows}))
    return 1 if failed else 0


WIDE = ("answers, 8B", "answers, 32B")
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "texts": texts,
    "answers, 8B": lambda bench: answers(bench, "8B"),
    "answers, 32B": lambda bench: answers(bench, "32B"),
    "answers": answers,
    "passes": own_passes,
    "shapes": shapes,
}


if __name__ == "__main__":
    sys.exit(main())
