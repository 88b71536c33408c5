"""Stage text: the target answers prompts, greedily and sampled in turn, and its text is kept with its distribution."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from outpace.core.errors import UserError, check_range
from outpace.distill import numbering, prompts
from outpace.distill.engine_writer import EngineWriter
from outpace.distill.progress import Progress
from outpace.distill.shards import TextFolder
from outpace.distill.weights import load_weights
from outpace.distill.writer import Answer, Job, Writer, WriterOptions
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config import from_dict
from outpace.models.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.8, 1.0)
LONGEST_PROMPT = 768  # tokens; longer ones are left out
SHARD = 256  # answers
WINDOW = 512  # jobs sorted by length, so that prompts of a cohort are alike


@dataclass(frozen=True)
class TextPlan:
    """How much to write: until `tokens` are there, or `seconds` have passed. A prompt is answered with each of
    `temperatures` in turn, round by round; one that stands there twice has twice the share."""

    prompts: Sequence[str]
    writer: WriterOptions = field(default_factory=WriterOptions)
    tokens: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    temperatures: Sequence[float] = TEMPERATURES

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UserError("temperatures are none, there must be one at least")
        for temperature in self.temperatures:
            check_range("a temperature", temperature, 0.0, 10.0)


def write_text(target: Path, name: str, folder: Path, plan: TextPlan, progress: Progress) -> TextFolder:
    """Writes shards into `folder` and goes on where an earlier run stopped. `name` is how the target is called."""
    texts = prompts.collect(plan.prompts)
    tokenizer = Tokenizer.from_folder(target)
    options = plan.writer
    settings = {"target": name, "top": options.top, "max_tokens": options.max_tokens, "seed": options.seed}
    store = TextFolder(folder, settings)
    if store.dropped:
        progress({"dropped": len(store.dropped)})
    if plan.tokens is not None and store.tokens >= plan.tokens:
        return store
    writer = _writer(target, tokenizer.stop_ids, plan)
    longest = min(LONGEST_PROMPT, writer.max_positions - options.max_tokens)
    if longest < 1:
        raise UserError(f"max_tokens is {options.max_tokens}, the target's context has {writer.max_positions}")
    clock = _Clock(store, plan)
    jobs = _until(clock, _jobs(texts, plan.temperatures, tokenizer, longest, store.finished))
    _fill(store, writer.answers(jobs), clock, progress)
    return store


def _writer(target: Path, stop_ids: frozenset[int], plan: TextPlan) -> Writer | EngineWriter:
    """The engine on the native kernels where they are there and take the target, else the batched torch decoder."""
    if plan.device == "cpu" and importlib.util.find_spec("outpace_kernels") is not None:
        from outpace.models.llama.native_runtime import NativeLlama, Options, UnsupportedShape

        with Checkpoint.open(target) as checkpoint, suppress(UnsupportedShape):
            settings = Options(threads=torch.get_num_threads(), kv_dtype="float16")
            model = NativeLlama.from_tensors(from_dict(checkpoint.config), checkpoint.tensor, options=settings)
            return EngineWriter(model, stop_ids, plan.writer)
    return Writer(load_weights(target, plan.device, plan.dtype), stop_ids, plan.writer)


class _Clock:
    """When to stop, and how fast it goes."""

    def __init__(self, store: TextFolder, plan: TextPlan) -> None:
        self._store, self._plan, self.started = store, plan, time.monotonic()
        self.written = 0  # answer tokens that are finished but not in a shard, or were written in this run
        self._before = store.tokens

    @property
    def tokens(self) -> int:
        return self._before + self.written

    def is_over(self) -> bool:
        seconds, tokens = self._plan.seconds, self._plan.tokens
        late = seconds is not None and time.monotonic() - self.started >= seconds
        return late or (tokens is not None and self.tokens >= tokens)

    def figures(self) -> dict[str, float]:
        passed = time.monotonic() - self.started
        rate = self.written / passed if passed else 0.0
        figures = {"tokens": float(self.tokens), "tokens_per_second": rate, "shards": float(len(self._store.shards))}
        left = [self._plan.seconds - passed] if self._plan.seconds is not None else []
        if self._plan.tokens is not None and rate:
            left.append((self._plan.tokens - self.tokens) / rate)
        return figures | ({"seconds_left": max(min(left), 0.0)} if left else {})


def _fill(store: TextFolder, answers: Iterator[Answer], clock: _Clock, progress: Progress) -> None:
    """Collects answers into shards; what is finished when a run is interrupted goes into a shorter one."""
    waiting: list[Answer] = []
    try:
        for answer in answers:
            waiting.append(answer)
            clock.written += len(answer.tokens)
            if len(waiting) == SHARD:
                store.add(waiting)
                waiting = []
            progress(clock.figures())
    except UserError:
        raise
    except BaseException:
        if waiting:
            store.add(waiting)
        raise
    if waiting:
        store.add(waiting)


def _until(clock: _Clock, jobs: Iterator[Job]) -> Iterator[Job]:
    for job in jobs:
        if clock.is_over():
            return
        yield job


def _jobs(
    texts: Sequence[str], temperatures: Sequence[float], tokenizer: Tokenizer, longest: int, finished: set[int]
) -> Iterator[Job]:
    """Every prompt once a round, shuffled by its number, for ever; windows are sorted by length."""
    encode = _encoder(tokenizer)
    found = False
    for turn in count():
        numbered = sorted((numbering.number(text, turn), text) for text in texts)
        window: list[Job] = []
        for number, text in numbered:
            if number in finished:
                found = True
                continue
            ids = tuple(encode(text))
            if not 1 <= len(ids) <= longest:
                continue
            temperature = temperatures[(numbering.number(text) + turn) % len(temperatures)]
            window.append(Job(number, ids, temperature, numbering.is_held_out(text)))
            if len(window) == WINDOW:
                found = True
                yield from sorted(window, key=lambda job: len(job.prompt))
                window = []
        found = found or bool(window)
        yield from sorted(window, key=lambda job: len(job.prompt))
        if not found:
            raise UserError(f"no prompt has between 1 and {longest} tokens, so there is nothing to answer")


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether the target answers chat messages."""
    try:
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    except UserError:
        return False
    return True


def _encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """A chat message where the target has a template; else a snippet for it to continue."""
    if not has_template(tokenizer):
        return tokenizer.encode
    return lambda text: tokenizer.chat([{"role": "user", "content": text}])
