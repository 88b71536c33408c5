"""Stage text: the target answers prompts, greedily and sampled in turn, and its text is kept with its distribution."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from outpace.core.errors import UserError, check_range
from outpace.distill import numbering, prompts
from outpace.distill.progress import Progress
from outpace.distill.shards import TextFolder
from outpace.distill.writer import Job, WriterOptions, Written, writer_of
from outpace.models.base import Model
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.load import load_model
from outpace.models.runtimes import missing_kernels
from outpace.models.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.8, 1.0)
LONGEST_PROMPT = 768  # tokens; longer ones are left out
SHARD = 256  # answers
WINDOW = 512  # jobs sorted by length, so that prompts that are read together are alike


@dataclass(frozen=True)
class TextPlan:
    """How much to write: until `tokens` are there, or `seconds` have passed. A prompt is answered with each of
    `temperatures` in turn, round by round; one that stands there twice has twice the share."""

    prompts: Sequence[str]
    writer: WriterOptions = field(default_factory=WriterOptions)
    tokens: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    temperatures: Sequence[float] = TEMPERATURES

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)


def check_temperatures(temperatures: Sequence[float]) -> None:
    """UserError unless there is one, and each is one to draw at."""
    if not temperatures:
        raise UserError("temperatures is empty, at least one is needed")
    for temperature in temperatures:
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
    model = load_target(target, plan.device)
    longest = longest_prompt(options, model.max_positions)
    writer = writer_of(model, tokenizer.stop_ids, options, longest)
    clock = _Clock(store, plan)
    jobs = _until(clock, _jobs(texts, plan.temperatures, tokenizer, longest, store.finished))
    _fill(store, writer.answers(jobs), clock, progress)
    return store


def longest_prompt(options: WriterOptions, context: int) -> int:
    """Tokens of the longest prompt that is answered; UserError where an answer alone fills the target's context."""
    if options.max_tokens >= context:
        raise UserError(f"an answer may have {options.max_tokens} tokens, the target's context has {context}")
    return min(LONGEST_PROMPT, context - options.max_tokens)


def load_target(target: Path, device: str) -> Model:
    """The target as its users run it: by the native kernels where they are there and take it, else by torch. Training
    text needs no exact mode, and half the memory for keys and values."""
    model: Model
    if device == "cpu" and missing_kernels() is None:
        with suppress(UnsupportedShape):
            model = load_model(str(target), runtime="native", kv_dtype="float16").model
            return model
    model = load_model(str(target), runtime="llama", device=device, exact=False).model
    return model


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


def _fill(store: TextFolder, answers: Iterator[Written], clock: _Clock, progress: Progress) -> None:
    """Collects answers into shards; what is finished when a run is interrupted goes into a shorter one."""
    waiting: list[Written] = []
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
    found = False
    for turn in count():
        numbered = sorted((numbering.number(text, turn), text) for text in texts)
        window: list[Job] = []
        for number, text in numbered:
            if number in finished:
                found = True
                continue
            ids = tuple(tokenizer.encode_prompt(text))
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
