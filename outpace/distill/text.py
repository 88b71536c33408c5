"""Writes training text (stage text): the target answers prompts, greedily and sampled, into shards on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path

from outpace.core.errors import UserError
from outpace.distill.options import TEXT, DistillOptions
from outpace.distill.progress_display import Progress
from outpace.distill.prompts import collect, is_held_out, prompt_hash
from outpace.distill.shards import TextFolder
from outpace.distill.writer import AnswerJob, WriterOptions, WrittenAnswer, make_writer
from outpace.models.base import Model
from outpace.models.files.find import shipped_model
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer

MAX_PROMPT = 768  # tokens; longer prompts are skipped
SHARD = 256  # answers
WINDOW = 512  # jobs sorted by prompt length, so that prompts of similar length are prefilled together


def write_text(target: Path, options: DistillOptions, seconds: float | None, progress: Progress) -> TextFolder:
    """Write shards into the run's folder, continuing an earlier run, until there are `options.tokens` or for `seconds`.

    `target` is the target's folder. Each pass over the prompts answers them at another of the temperatures.
    """
    texts, tokenizer, writing = collect(options.prompts), Tokenizer.from_folder(target), options.writer
    name = shipped_model().stem if options.target is None else Path(options.target).name
    settings = {"target": name, "top": writing.top, "max_tokens": writing.max_tokens, "seed": writing.seed}
    store = TextFolder(options.out / TEXT, settings)
    if store.num_dropped:
        progress({"dropped": store.num_dropped})
    if options.tokens is not None and store.tokens >= options.tokens:
        return store
    model = load_target(target, options.device)
    max_prompt = max_prompt_length(writing, model.max_positions)
    writer = make_writer(model, tokenizer.stop_ids, writing, max_prompt)
    jobs = _jobs(texts, options.temperatures, tokenizer, max_prompt, store.finished)
    started, before, written = time.monotonic(), store.tokens, 0

    def has_more_to_write(job: AnswerJob) -> bool:
        is_late = seconds is not None and time.monotonic() - started >= seconds
        return not is_late and (options.tokens is None or before + written < options.tokens)

    waiting: list[WrittenAnswer] = []
    try:
        for answer in writer.answers(takewhile(has_more_to_write, jobs)):
            waiting.append(answer)
            written += len(answer.tokens)
            if len(waiting) == SHARD:
                full, waiting = waiting, []
                store.add(full)
            passed = time.monotonic() - started
            rate = written / passed if passed else 0.0
            figures = {"tokens": before + written, "tokens_per_second": rate, "shards": len(store.shards)}
            left = [seconds - passed] if seconds is not None else []
            left += [(options.tokens - before - written) / rate] if options.tokens is not None and rate else []
            progress(figures | ({"seconds_left": max(min(left), 0.0)} if left else {}))
    finally:
        if waiting:  # also after an interrupt
            store.add(waiting)
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
    if device == "cpu":
        with suppress(UnsupportedShape):
            model = load_model(str(target), runtime="native", kv_dtype="float16").model
            return model
    model = load_model(str(target), runtime="llama", device=device, exact=False).model
    return model


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
            has_jobs = True
            temperature = temperatures[(prompt_hash(text) + turn) % len(temperatures)]
            window.append(AnswerJob(number, ids, temperature, is_held_out(text)))
            if len(window) == WINDOW:
                yield from sorted(window, key=lambda job: len(job.prompt))
                window = []
        yield from sorted(window, key=lambda job: len(job.prompt))
        if not has_jobs:
            raise UserError(f"no prompt has between 1 and {max_prompt} tokens, so there is nothing to answer")
