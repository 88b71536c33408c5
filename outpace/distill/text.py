"""Writes training text (stage text): the target answers prompts, greedily and sampled, into shards on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from outpace.core.errors import UserError, check_range
from outpace.distill.progress_display import Progress
from outpace.distill.prompts import collect, is_held_out, prompt_hash
from outpace.distill.shards import TextFolder
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer, make_writer
from outpace.models.base import Model
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.load import load_model
from outpace.models.runtimes import missing_kernels
from outpace.models.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.8, 1.0)
MAX_PROMPT = 768  # tokens; longer prompts are skipped
SHARD = 256  # answers
WINDOW = 512  # jobs sorted by prompt length, so that prompts of similar length are prefilled together


@dataclass(frozen=True)
class TextPlan:
    """How much to write: until there are `tokens`, or for `seconds`.

    Each pass over the prompts answers them at another of the `temperatures`; a temperature listed twice is used twice
    as often.
    """

    prompts: Sequence[str]
    writer: WriterOptions = field(default_factory=WriterOptions)
    tokens: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    temperatures: Sequence[float] = TEMPERATURES

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Raise UserError unless there is at least one temperature and all are valid."""
    if not temperatures:
        raise UserError("temperatures is empty, at least one is needed")
    for temperature in temperatures:
        check_range("a temperature", temperature, 0.0, 10.0)


def write_text(target: Path, name: str, folder: Path, plan: TextPlan, progress: Progress) -> TextFolder:
    """Write shards into `folder`, continuing an earlier run; `name` is the target's name in the manifest."""
    texts = collect(plan.prompts)
    tokenizer = Tokenizer.from_folder(target)
    options = plan.writer
    settings = {"target": name, "top": options.top, "max_tokens": options.max_tokens, "seed": options.seed}
    store = TextFolder(folder, settings)
    if store.dropped:
        progress({"dropped": len(store.dropped)})
    if plan.tokens is not None and store.tokens >= plan.tokens:
        return store
    model = load_target(target, plan.device)
    max_prompt = max_prompt_length(options, model.max_positions)
    writer = make_writer(model, tokenizer.stop_ids, options, max_prompt)
    budget = _Budget(store, plan)
    jobs = _jobs(texts, plan.temperatures, tokenizer, max_prompt, store.finished)
    _fill(store, writer.answers(takewhile(lambda _: not budget.is_used_up(), jobs)), budget, progress)
    return store


def max_prompt_length(options: WriterOptions, context: int) -> int:
    """Return the tokens of the longest prompt to answer; UserError if an answer alone fills the target's context."""
    if options.max_tokens >= context:
        raise UserError(f"an answer may have {options.max_tokens} tokens, the target's context has {context}")
    return min(MAX_PROMPT, context - options.max_tokens)


def load_target(target: Path, device: str) -> Model:
    """Load the target on the native kernels if they support it, else on torch.

    Training text needs no exact mode, and float16 is enough for the KV cache.
    """
    model: Model
    if device == "cpu" and missing_kernels() is None:
        with suppress(UnsupportedShape):
            model = load_model(str(target), runtime="native", kv_dtype="float16").model
            return model
    model = load_model(str(target), runtime="llama", device=device, exact=False).model
    return model


class _Budget:
    """Counts the written tokens and the time, and says when to stop."""

    def __init__(self, store: TextFolder, plan: TextPlan) -> None:
        self._store, self._plan, self._started = store, plan, time.monotonic()
        self.written = 0  # answer tokens of this run
        self._before = store.tokens

    def is_used_up(self) -> bool:
        seconds, tokens = self._plan.seconds, self._plan.tokens
        is_late = seconds is not None and time.monotonic() - self._started >= seconds
        return is_late or (tokens is not None and self._before + self.written >= tokens)

    def figures(self) -> dict[str, float]:
        passed, tokens = time.monotonic() - self._started, self._before + self.written
        rate = self.written / passed if passed else 0.0
        figures = {"tokens": float(tokens), "tokens_per_second": rate, "shards": float(len(self._store.shards))}
        left = [self._plan.seconds - passed] if self._plan.seconds is not None else []
        if self._plan.tokens is not None and rate:
            left.append((self._plan.tokens - tokens) / rate)
        return figures | ({"seconds_left": max(min(left), 0.0)} if left else {})


def _fill(store: TextFolder, answers: Iterator[WrittenAnswer], budget: _Budget, progress: Progress) -> None:
    """Collect answers into shards; an interrupted run writes its finished answers to a shorter shard."""
    waiting: list[WrittenAnswer] = []
    try:
        for answer in answers:
            waiting.append(answer)
            budget.written += len(answer.tokens)
            if len(waiting) == SHARD:
                store.add(waiting)
                waiting = []
            progress(budget.figures())
    except UserError:
        raise
    except BaseException:
        if waiting:
            store.add(waiting)
        raise
    if waiting:
        store.add(waiting)


def _jobs(
    texts: Sequence[str], temperatures: Sequence[float], tokenizer: Tokenizer, max_prompt: int, finished: set[int]
) -> Iterator[AnswerJob]:
    """Yield jobs forever, in passes over all prompts shuffled by their hash; windows are sorted by prompt length."""
    has_jobs = False
    for turn in count():
        window: list[AnswerJob] = []
        for number, text in sorted((prompt_hash(text, turn), text) for text in texts):
            if number in finished:
                has_jobs = True
                continue
            ids = tuple(tokenizer.encode_prompt(text))
            if not 1 <= len(ids) <= max_prompt:
                continue
            temperature = temperatures[(prompt_hash(text) + turn) % len(temperatures)]
            window.append(AnswerJob(number, ids, temperature, is_held_out(text)))
            if len(window) == WINDOW:
                has_jobs = True
                yield from sorted(window, key=lambda job: len(job.prompt))
                window = []
        has_jobs = has_jobs or bool(window)
        yield from sorted(window, key=lambda job: len(job.prompt))
        if not has_jobs:
            raise UserError(f"no prompt has between 1 and {max_prompt} tokens, so there is nothing to answer")
