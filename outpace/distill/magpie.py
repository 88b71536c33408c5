"""Lets the target write prompts itself: it continues the beginning of a user's message in its chat template.

Magpie, Xu et al., arXiv:2406.08464: a model trained on conversations has also learned its users' messages. The draft is
so trained on likely prompts of its target, without a set of prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from outpace.core.errors import UserError, check_whole
from outpace.distill.options import stage_lock
from outpace.distill.progress_display import StageProgress
from outpace.distill.prompts import read_prompts
from outpace.distill.text import load_target
from outpace.distill.writer import AnswerJob, WriterOptions, make_writer
from outpace.models.text.tokenizer import Tokenizer

FILE = "prompts.jsonl"
TEMPERATURE = 1.0
MAX_TOKENS = 160
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
    file = folder / FILE
    with stage_lock(file, "writing prompts"):
        known = dict.fromkeys(read_prompts(file)) if file.is_file() and file.stat().st_size else {}
        if len(known) >= number:
            return file
        tokenizer = Tokenizer.from_folder(target)
        heads = [user_beginning(tokenizer, begin) for begin in begins]
        first = [tokenizer.continuation(begin) for begin in begins]  # decoded together: decoders may drop a first space
        model, longest = load_target(target, device), max(map(len, heads))
        max_tokens = min(MAX_TOKENS, model.max_positions - longest - 1)
        if max_tokens < 1:
            raise UserError(f"a message begins with {longest} tokens, the target's context has {model.max_positions}")
        writer = make_writer(model, tokenizer.stop_ids, replace(options, max_tokens=max_tokens, top=1), longest)
        before, started = len(known), time.monotonic()
        with file.open("a", encoding="utf-8") as stream:
            for tried, answer in enumerate(writer.answers(_jobs(heads, before)), 1):
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


def _jobs(heads: Sequence[Sequence[int]], before: int) -> Iterator[AnswerJob]:
    """Yield jobs forever; a continued run starts with another number, so that its noise differs."""
    for number in count(_MAX_TRIES * before):
        yield AnswerJob(number, tuple(heads[number % len(heads)]), TEMPERATURE)


def _message(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """Decode a message; None if it was cut off, is too short, or has a broken character."""
    if not ids or ids[-1] not in tokenizer.stop_ids:
        return None
    text = tokenizer.decode(ids).strip()
    return text if len(text) >= MIN_CHARACTERS and "\ufffd" not in text else None
