"""Writes training text (stage text): the target answers prompts, greedily and sampled, into shards on disk.

The target can write the prompts itself: it continues the beginning of a user's message in its chat template (Magpie,
Xu et al., arXiv:2406.08464), as a model trained on conversations has also learned its users' messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

from outpace.core.drafting import Needs
from outpace.core.errors import UserError, check_whole
from outpace.distill.options import TEXT, DistillOptions, stage_lock
from outpace.distill.progress_display import Progress, StageProgress
from outpace.distill.prompts import collect, is_held_out, prompt_hash, read_prompts
from outpace.distill.shards import TextFolder
from outpace.distill.writer import TAPS, AnswerJob, WriterOptions, WrittenAnswer, tap_list, write_answers
from outpace.models.base import Model, check_needs, runtime_name
from outpace.models.files.cache import weights_digest
from outpace.models.files.find import locate, shipped_model
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer

MAX_PROMPT = 768  # tokens; longer prompts are skipped
SHARD = 256  # answers
WINDOW = 512  # jobs sorted by prompt length, so that prompts of similar length are prefilled together


def write_text(target: Path, options: DistillOptions, seconds: float | None, progress: Progress) -> TextFolder:
    """Write shards into the run's folder, continuing an earlier run, until there are `options.tokens` or for `seconds`.

    `target` is the target's folder. Each pass over the prompts answers them at another of the temperatures. Hidden
    states after the layers `options.writer.taps` are kept.
    """
    texts, tokenizer, writing = collect(options.prompts), Tokenizer.from_folder(target), options.writer
    spec = shipped_model() if options.target is None else Path(options.target)
    settings = {
        "target": options.target_name,
        "top": writing.top,
        "max_tokens": writing.max_tokens,
        "seed": writing.seed,
    }
    model = load_target(spec, options.device)
    if taps := writing.taps:
        check_needs(model, Needs(layers=taps, prompt=True))
    store = TextFolder(options.out / TEXT, settings, _origin(spec, tokenizer, model, taps))
    if store.num_dropped:
        progress({"dropped": store.num_dropped})
    if options.tokens is not None and store.tokens >= options.tokens:
        return store
    max_prompt = max_prompt_length(writing, model.max_positions)
    jobs = _jobs(texts, options.temperatures, tokenizer, max_prompt, store.finished)
    started, before, written = time.monotonic(), store.tokens, 0

    def has_more_to_write(job: AnswerJob) -> bool:
        is_late = seconds is not None and time.monotonic() - started >= seconds
        return not is_late and (options.tokens is None or before + written < options.tokens)

    wanted, waiting = takewhile(has_more_to_write, jobs), list[WrittenAnswer]()
    try:
        for answer in write_answers(model, tokenizer.stop_ids, writing, max_prompt, wanted):
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


def _origin(spec: Path, tokenizer: Tokenizer, model: Model, taps: Sequence[int]) -> dict[str, str]:
    """Describe what writes the text: hidden states differ by weights, tokenizer, chat template and precision."""
    origin = {
        "weights": weights_digest(locate(str(spec))),
        "tokenizer": tokenizer.fingerprint[:16],
        "template": tokenizer.template_digest,
        "runtime": runtime_name(model),
    }
    return origin | ({TAPS: tap_list(taps)} if taps else {})


def max_prompt_length(options: WriterOptions, context: int) -> int:
    """Return the tokens of the longest prompt to answer; UserError if an answer alone fills the target's context."""
    if options.max_tokens >= context:
        raise UserError(f"an answer may have {options.max_tokens} tokens, the target's context has {context}")
    return min(MAX_PROMPT, context - options.max_tokens)


def load_target(target: Path, device: str) -> Model:
    """Load the target, a folder or a .gguf file, on the native kernels if they support it, else on torch.

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


PROMPTS_FILE = "prompts.jsonl"
TEMPERATURE = 1.0
MAX_MESSAGE = 160
MIN_CHARACTERS = 15  # greetings and broken beginnings are shorter
_MARK = "WHERE A MESSAGE GOES"
_MAX_TRIES = 64  # answers per new prompt, after which the target counts as unable to write prompts


def write_prompts(
    target: Path,
    number: int,
    folder: Path,
    options: WriterOptions,
    device: str,
    progress: StageProgress,
    begins: Sequence[str] = ("",),
) -> Path:
    """Write `folder`/prompts.jsonl with `number` distinct prompts, in the form of `--prompts`; continue an old file.

    The prompts begin with each of `begins` in rotation and end where the target ends a user's message. The file is
    determined by the target, `options.seed` and `options.rows`. UserError for a target without a chat template or
    one that writes no messages, and if another process writes to this file.
    """
    check_whole("write_prompts", number, 1, 10**7)
    file = folder / PROMPTS_FILE
    with stage_lock(file, "writing prompts"):
        known = dict.fromkeys(read_prompts(file)) if file.is_file() and file.stat().st_size else {}
        if len(known) >= number:
            return file
        tokenizer = Tokenizer.from_folder(target)
        heads = [user_beginning(tokenizer, begin) for begin in begins]
        first = [tokenizer.continuation(begin) for begin in begins]  # decoded together: decoders may drop a first space
        model, longest = load_target(target, device), max(map(len, heads))
        max_tokens = min(MAX_MESSAGE, model.max_positions - longest - 1)
        if max_tokens < 1:
            raise UserError(f"a message begins with {longest} tokens, the target's context has {model.max_positions}")
        settings = replace(options, max_tokens=max_tokens, top=1)
        before, started = len(known), time.monotonic()
        with file.open("a", encoding="utf-8") as stream:
            numbers = count(_MAX_TRIES * before)  # a continued run has other ones, so that its noise differs
            jobs = (AnswerJob(number, tuple(heads[number % len(heads)]), TEMPERATURE) for number in numbers)
            answers = write_answers(model, tokenizer.stop_ids, settings, longest, jobs)
            for tried, answer in enumerate(answers, 1):
                text = _message(tokenizer, [*first[answer.job.number % len(first)], *answer.tokens.tolist()])
                if text is not None and text not in known:
                    known[text] = None
                    stream.write(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
                    stream.flush()
                rate = (len(known) - before) / (time.monotonic() - started)
                left = {"seconds_left": (number - len(known)) / rate} if rate else {}
                progress("prompts", {"prompts": float(len(known)), **left})
                if len(known) >= number:
                    return file
                if tried >= _MAX_TRIES * (len(known) - before + 1):
                    break
    raise UserError(
        f"of {tried} messages that the target began, {len(known) - before} ended as a user's message does: it writes no"
        " prompts of its own, name some with --prompts"
    )


def user_beginning(tokenizer: Tokenizer, begin: str = "") -> list[int]:
    """Return the ids before a user's first message and those of its `begin`; UserError without a chat template."""
    if not tokenizer.has_template:
        raise UserError("the target has no chat template, so it does not know where a user's message begins")
    text = tokenizer.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    head, mark, _ = text.partition(_MARK)
    if not mark or not head:
        raise UserError("the target's chat template does not show where a user's message begins")
    return tokenizer.continuation(head + begin)


def _message(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """Decode a message; None if it was cut off, is too short, or has a broken character."""
    if not ids or ids[-1] not in tokenizer.stop_ids:
        return None
    text = tokenizer.decode(ids).strip()
    return text if len(text) >= MIN_CHARACTERS and "\ufffd" not in text else None
