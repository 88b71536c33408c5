"""Prompts that the target writes itself: what its chat template begins as a user's message, it goes on with.

Magpie, Xu et al., arXiv:2406.08464: a model that learnt from conversations has learnt its users' messages too. So a
draft is trained on what its target is likely to be asked, and nobody has to bring a set of prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from outpace.core.errors import UserError, check_whole
from outpace.distill.alone import alone
from outpace.distill.progress import StageProgress
from outpace.distill.prompts import read_prompts
from outpace.distill.text import load_target
from outpace.distill.writer import Job, WriterOptions, writer_of
from outpace.models.text.tokenizer import Tokenizer

FILE = "prompts.jsonl"
STAGE = "prompts"
TEMPERATURE = 1.0
LONGEST = 160  # tokens
SHORTEST = 15  # characters: greetings and broken beginnings are shorter
_MARK = "WHERE A MESSAGE STANDS"
_IN_VAIN = 64  # answers for each prompt, after which the target is held not to write any


def write_prompts(
    target: Path,
    number: int,
    folder: Path,
    options: WriterOptions,
    device: str,
    progress: StageProgress,
    begins: Sequence[str] = ("",),
) -> Path:
    """Sees to it that `folder`/prompts.jsonl has `number` prompts, one a line as `--prompts` takes them; goes on behind
    those that are there. Each ends where the target would hand over, and none stands there twice. They begin
    as `begins` says, in turn.

    The file follows from the target, `options.seed` and `options.rows`: messages are kept in the order in which they
    end. UserError for a target that has no chat template, or that writes no messages, and where another process writes
    to this file.
    """
    check_whole("write_prompts", number, 1, 10**7)
    file = folder / FILE
    with alone(file, "writing prompts"):
        return _written(target, number, file, options, device, progress, begins)


def _written(
    target: Path,
    number: int,
    file: Path,
    options: WriterOptions,
    device: str,
    progress: StageProgress,
    begins: Sequence[str],
) -> Path:
    known = dict.fromkeys(read_prompts(file)) if file.is_file() and file.stat().st_size else {}
    if len(known) >= number:
        return file
    tokenizer = Tokenizer.from_folder(target)
    heads = [beginning(tokenizer, begin) for begin in begins]
    first = [
        tokenizer.continuation(begin) for begin in begins
    ]  # decoded with the rest: decoders may drop a first space
    model, most = load_target(target, device), max(map(len, heads))
    longest = min(LONGEST, model.max_positions - most - 1)
    if longest < 1:
        raise UserError(f"a message begins with {most} tokens, the target's context has {model.max_positions}")
    settings = replace(options, max_tokens=longest, top=1)
    writer = writer_of(model, tokenizer.stop_ids, settings, most)
    before, started = len(known), time.monotonic()
    with file.open("a", encoding="utf-8") as stream:
        for tried, written in enumerate(writer.answers(_jobs(heads, before)), 1):
            text = _message(tokenizer, [*first[written.job.number % len(first)], *written.tokens.tolist()])
            if text is not None and text not in known:
                known[text] = None
                stream.write(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
                stream.flush()
            rate = (len(known) - before) / (time.monotonic() - started)
            left = {"seconds_left": (number - len(known)) / rate} if rate else {}
            progress(STAGE, {"prompts": float(len(known)), **left})
            if len(known) >= number:
                return file
            if tried >= _IN_VAIN * (len(known) - before + 1):
                break
    raise UserError(
        f"of {tried} messages that the target began, {len(known) - before} ended as a user's message does: it writes no"
        " prompts of its own, name some with --prompts"
    )


def beginning(tokenizer: Tokenizer, begin: str = "") -> list[int]:
    """The ids that stand before a user's first message, and those of its `begin`. UserError without a chat template
    that has such a place."""
    if not tokenizer.has_template:
        raise UserError("the target has no chat template, so it does not know where a user's message begins")
    text = tokenizer.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    head, mark, _ = text.partition(_MARK)
    if not mark or not head:
        raise UserError("the target's chat template does not show where a user's message begins")
    return tokenizer.continuation(head + begin)


def _jobs(heads: Sequence[Sequence[int]], before: int) -> Iterator[Job]:
    """For ever; noise by number, so that a run that goes on does not write the same again."""
    for number in count(_IN_VAIN * before):
        yield Job(number, tuple(heads[number % len(heads)]), TEMPERATURE)


def _message(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """The message that these tokens are; None for one that was cut, is too short, or has a broken character."""
    if not ids or ids[-1] not in tokenizer.stop_ids:
        return None
    text = tokenizer.decode(ids).strip()
    return text if len(text) >= SHORTEST and "\ufffd" not in text else None
