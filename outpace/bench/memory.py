"""Measures a method's peak memory: a new process loads its models, answers a prompt, and reports."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.contenders import PLAIN, Contender
from outpace.bench.method_runner import MethodRunner
from outpace.bench.peer import GRACE_SECONDS, PeerProcessError, send
from outpace.core import child_process
from outpace.core.lazy import torch
from outpace.models.runtimes import Loaded

_CODE = "from outpace.bench.memory import main; main()"


class PeakMemory(NamedTuple):
    """Peak bytes of a process with its workers, and on its GPU (None without one)."""

    host: int
    gpu: int | None


def peak_memory(models: LLM, contender: Contender, params: SamplingParams, prompt: Sequence[int]) -> PeakMemory:
    """Measure one method in a new process, whose errors are raised here; plain decoding loads the target alone."""
    drafts = () if contender.name == PLAIN or models.draft is None else (models.draft, *models.draft.others)
    again = [(draft.again, draft.model.vocab_size) for draft in drafts]
    process = child_process.start(_CODE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        send(process.stdin, (models.target.again, again, contender, params, list(prompt)))
        found = pickle.load(process.stdout)
    except (EOFError, OSError):
        status = child_process.stop(process, GRACE_SECONDS)
        raise PeerProcessError(f"its process {child_process.describe_exit(status)}") from None
    finally:
        child_process.stop(process, GRACE_SECONDS)
    if isinstance(found, Exception):
        raise found
    measured: PeakMemory = found
    return measured


def main() -> None:
    """Run the child process."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        found: Any = _measure(*pickle.load(sys.stdin.buffer))
    except Exception as error:
        found = error
    send(results, found)


def _measure(
    load_target: Callable[[], Loaded],
    again: Sequence[tuple[Callable[[], Loaded], int]],
    contender: Contender,
    params: SamplingParams,
    prompt: Sequence[int],
) -> PeakMemory:
    target, drafts = load_target(), []
    for load, vocab_size in again:
        drafts.append(load())
        drafts[-1].model.vocab_size = vocab_size
    draft = replace(drafts[0], others=tuple(drafts[1:])) if drafts else None
    models: Any = SimpleNamespace(target=target, draft=draft)
    with closing(MethodRunner(contender, models, params, 1)) as runner:
        runner.answer(prompt, params.max_tokens)
        has_gpu = "torch" in sys.modules and torch.cuda.is_initialized()
        gpu = sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) if has_gpu else None
        return PeakMemory(sum(map(_peak, _processes(os.getpid()))), gpu)


def _processes(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text(encoding="ascii").split():
            yield from _processes(int(child))


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
