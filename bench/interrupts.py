"""Programs are interrupted at random moments of loading and of streaming: how they end, and what they leave behind.

Run: python bench/interrupts.py [--count 100] [--models tiny,shipped,converted] [--state FOLDER]; --help has the
others. The interrupts (SIGINT to the program's process group, as Ctrl-C in a terminal sends it) are shared out among
all models and all ways of WAYS; half come before the first text, half up to a second after. `tiny` is a random model
that is made here, `shipped` the shipped one, `converted` the shipped one with an empty cache, so that it is converted
first. A program must end with status 130 or by the signal, without a traceback, and leave no process and no
half-written file; exit 1 where one does not. How many took longer than `--limit` seconds is shown, and no failure.
With `--state` a folder keeps what is known, and a later call with the same models and seed goes on from there; with
`--seconds` none begins after that time. `--again` makes those that took longer than the limit once more, and replaces
them. A table, and one JSON line last. Linux only: processes are found by /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from known import Known
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outpace.models.llama.config.llama_config import from_dict, tensor_shapes

WAYS = {
    "auto": (),
    "card, thread": ("--method", "card", "--drafter", "ngram", "--worker", "thread"),
    "card, process": ("--method", "card", "--drafter", "ngram", "--worker", "process"),
}
MODELS = ("tiny", "shipped", "converted")
ENDS_WELL = {130: "130", -signal.SIGINT: "SIGINT"}
HANGS_AFTER = 120.0  # seconds
SETTLES = 3.0  # seconds that what ends with the program may take
MARK = "OUTPACE_BENCH_INTERRUPTS"  # in the environment of all that a program starts
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Ending:
    """How one program ended. `status` None: it did not."""

    model: str
    way: str
    was_streaming: bool
    status: int | None
    seconds: float
    traceback: str
    processes: int
    files: int

    @property
    def is_early(self) -> bool:
        """The interpreter itself was still starting: none of the commands' code had run."""
        return bool(self.traceback) and "cli" not in self.traceback and "__main__.py" not in self.traceback

    @property
    def is_well(self) -> bool:
        told = not self.traceback and self.status in ENDS_WELL
        return (told or self.is_early) and not self.processes and not self.files


def make_tiny(folder: Path) -> Path:
    """A random model with a token for each byte, if there is none yet."""
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = tensor_shapes(from_dict(CONFIG))
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


class Programs:
    """Starts programs of one model in one way."""

    def __init__(self, model: str, way: str, folder: Path) -> None:
        self.model, self.way, self._folder = model, way, folder
        target = ["--target", str(folder / "tiny")] if model == "tiny" else []
        self._command = [sys.executable, "-m", "outpace", "generate", "Tell me a long story.", *target, *WAYS[way]]
        self._command += ["--ignore-eos", "--max-tokens", "8000" if model != "tiny" else "16000"]

    @contextmanager
    def start(self) -> Iterator[tuple[subprocess.Popen[bytes], Path, dict[str, str]]]:
        """A program, the file that takes what it writes, and its environment; it is gone after the block."""
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            cache = Path(own) / "cache" if self.model == "converted" else self._folder / "cache"
            environment = os.environ | {MARK: uuid.uuid4().hex, "OUTPACE_CACHE": str(cache)}
            out, err = Path(own) / "out", Path(own) / "err"
            with out.open("wb") as text, err.open("wb") as said:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdout=text,
                    stderr=said,
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            try:
                yield process, Path(own), environment
            finally:
                process.kill()
                process.wait()

    def first_text(self) -> float:
        """Seconds to the first text, with whatever is converted and kept at the first start there already."""
        for _ in range(2):
            with self.start() as (process, folder, _):
                began = time.monotonic()
                if not _writes(process, folder / "out"):
                    raise SystemExit(f"{' '.join(self._command)} ended: {(folder / 'err').read_text()}")
                seconds = time.monotonic() - began
        return seconds

    def interrupt(self, before: float | None, after: float) -> Ending:
        """Interrupts a program `before` seconds have passed, or `after` seconds of its text."""
        with self.start() as (process, folder, environment):
            if before is None and _writes(process, folder / "out"):
                time.sleep(after)
            elif before is not None:
                time.sleep(before)
            was_streaming = (folder / "out").stat().st_size > 0
            os.killpg(process.pid, signal.SIGINT)
            began = time.monotonic()
            try:
                status = process.wait(HANGS_AFTER)
            except subprocess.TimeoutExpired:
                status = None
            seconds = time.monotonic() - began
            left = _settled(environment[MARK])
            files = [file for file in Path(environment["OUTPACE_CACHE"]).rglob("*") if ".part" in file.name]
            said = (folder / "err").read_text(errors="replace")
        told = any(word in said for word in ("Traceback", "Exception ignored", "Fatal"))
        return Ending(self.model, self.way, was_streaming, status, seconds, said if told else "", len(left), len(files))


def _writes(process: subprocess.Popen[bytes], file: Path) -> bool:
    """Waits for the first text; False where the program ended without."""
    while process.poll() is None:
        if file.stat().st_size:
            return True
        time.sleep(0.005)
    return False


def _settled(mark: str) -> list[int]:
    """Processes that a program started and that are still there some time after its end; they are ended."""
    deadline = time.monotonic() + SETTLES
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def _table(endings: Sequence[Ending], limit: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("interrupts", "130", "by signal", "other", "hang", "traceback", "left", "median s", "slowest s")
    for head in ("model and way", *heads, f"over {limit:g} s"):
        table.add_column(head, justify="left" if head == "model and way" else "right")
    groups = {(one.model, one.way): [e for e in endings if (e.model, e.way) == (one.model, one.way)] for one in endings}
    for (model, way), group in [*groups.items(), (("all", ""), list(endings))]:
        found = _counts(group, limit)
        figures = [str(found[head]) for head in (*heads, "over limit")]
        table.add_row(f"{model} {way}", *figures)
    return table


def _counts(endings: Sequence[Ending], limit: float) -> dict[str, Any]:
    statuses = Counter(ending.status for ending in endings if not ending.is_early)
    return {
        "interrupts": len(endings),
        "while streaming": sum(ending.was_streaming for ending in endings),
        "130": statuses[130],
        "by signal": statuses[-signal.SIGINT],
        "before the program": sum(ending.is_early for ending in endings),
        "hang": statuses[None],
        "other": sum(count for status, count in statuses.items() if status is not None and status not in ENDS_WELL),
        "traceback": sum(bool(ending.traceback) and not ending.is_early for ending in endings),
        "left": sum(ending.processes + ending.files for ending in endings),
        "median s": round(median(ending.seconds for ending in endings), 3),
        "slowest s": round(max(ending.seconds for ending in endings), 3),
        "over limit": sum(ending.seconds > limit for ending in endings),
    }


def interrupt_all(known: Known, kinds: Sequence[Programs], args: argparse.Namespace) -> None:
    """Those not known yet, or the slow ones again, while there is time. Moments depend on seed and number alone."""
    until = time.monotonic() + args.seconds
    endings = known.found["endings"]
    slow = [number for number, ending in enumerate(endings) if ending["seconds"] > args.limit]
    spans = {} if args.again else known.found["spans"]  # by kind, seconds to the first text
    for number in slow if args.again else range(len(endings), args.count):
        kind, chance = kinds[number % len(kinds)], random.Random(f"{args.seed} {number}")
        if time.monotonic() > until:
            return
        name = f"{kind.model}, {kind.way}"
        if name not in spans:
            spans[name] = kind.first_text()
            known.save()
        before = chance.uniform(0.0, spans[name]) if number // len(kinds) % 2 else None
        ending = kind.interrupt(before, chance.uniform(0.0, 1.0))
        endings[number : number + 1] = [asdict(ending)]
        known.save()
        if not ending.is_well:
            print(f"{name}, {before=}: {ending}\n{ending.traceback}", file=sys.stderr)


def main() -> None:
    """Interrupts, the table, the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="a folder for what is known so far")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no interrupt begins")
    parser.add_argument("--again", action="store_true", help="those that took longer than the limit, once more")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.state or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        asked = {"models": args.models, "seed": args.seed}
        known = Known(folder / "known.json", asked, spans={}, endings=[])
        make_tiny(folder / "tiny")
        kinds = [Programs(model, way, folder) for model in args.models.split(",") for way in WAYS]
        interrupt_all(known, kinds, args)
    endings = [Ending(**ending) for ending in known.found["endings"]]
    if not endings:
        raise SystemExit("error: no interrupt was made: give more --seconds")
    Console(width=140).print(_table(endings, args.limit))
    well = all(ending.is_well for ending in endings)
    print(json.dumps({"well": well, "limit": args.limit, "seed": args.seed, **_counts(endings, args.limit)}))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
