"""Collects the prompts that the target answers, from files, hub data sets or the built-in set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outpace.api.prompt_file import load_data_set, read_prompt_file, user_turns
from outpace.core.errors import UserError

HUB = "hub:"
BUILT_IN = "builtin"
HELD_OUT_ONE_IN = 50


def prompt_hash(text: str, turn: int = 0) -> int:
    """Hash a prompt and a pass over the prompts to 63 bits; it names the job, seeds its noise, and shuffles."""
    digest = hashlib.sha256(f"{turn}\n{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_held_out(text: str) -> bool:
    """Whether a prompt is kept for evaluation: one in fifty, by its text, so the choice is the same in every run."""
    return prompt_hash(text) % HELD_OUT_ONE_IN == 0


def collect(sources: Sequence[str]) -> list[str]:
    """Return the distinct opening messages of all sources; a source is a .jsonl file, `hub:NAME` or `builtin`."""
    texts: dict[str, None] = {}
    for source in sources:
        if source == BUILT_IN:
            texts.update(dict.fromkeys(builtin_prompts()))
        elif source.startswith(HUB):
            texts.update(dict.fromkeys(_from_hub(source.removeprefix(HUB))))
        else:
            texts.update(dict.fromkeys(read_prompts(Path(source).expanduser())))
    return list(texts)


def evaluation_prompts(files: Sequence[str], sources: Sequence[str]) -> dict[str, list[str]]:
    """Return the prompts to evaluate on by task: one task per file, or the held-out prompts of the sources."""
    if files:
        return {Path(file).stem: read_prompts(Path(file)) for file in files}
    held_out = [text for text in collect(sources) if is_held_out(text)]
    if not held_out:
        raise UserError("none of the prompts is held out, so there is nothing to judge on: name files with --tasks")
    return {"held out": sorted(held_out, key=prompt_hash)}


def read_prompts(file: Path) -> list[str]:
    """Read the first turn of every line of a file of prompts."""
    return [entry["turns"][0] for entry in read_prompt_file(file)]


def _from_hub(name: str) -> Iterator[str]:
    rows: Iterable[Any] = load_data_set(f"{HUB}{name}", name, split="train")
    for place, row in enumerate(rows):
        yield user_turns(f"{HUB}{name}, row {place}", row)[0]


def builtin_prompts() -> Iterator[str]:
    """Yield the built-in prompts: topics combined with templates, for chat, code, maths, translation and lists."""
    words = json.loads(Path(__file__).with_name("builtin_prompts.json").read_text(encoding="utf-8"))
    for group in ("topics", "lists", "letters", "roles", "coding"):
        yield from _combine(**words[group])
    for name, arguments, purpose, example in words["functions"]:
        head = f"def {name}({arguments}):\n"
        yield f'{head}    """{purpose}\n    >>> {example}\n    """\n'
        yield f"Complete this Python function.\n\n{head}    # {purpose}\n"
        yield f"Write a Python function `{name}({arguments})`. {purpose} Show one call of it."
        yield f"Write unit tests for a function `{name}({arguments})` in Python. {purpose}"
    yield from _combine(**words["reading"])
    topics = words["topics"]["entries"]
    for one, other in zip(topics[::2], topics[1::2], strict=False):
        yield f"Compare {one} and {other}: what do they have in common, and where do they differ?"
    for sentence in words["sentences"]:
        yield from (f"Translate to {language}: {sentence}" for language in words["languages"])
    for group in words["other_languages"]:
        yield from _combine(**group)
    for story in words["word_problems"]:
        yield from (_word_problem(story, variant, words["names"]) for variant in range(20))
    yield from words["riddles"]


def _combine(entries: Sequence[str], templates: Sequence[str], templates_per_entry: int) -> Iterator[str]:
    """Combine each entry with some templates, which differ between entries."""
    for entry in entries:
        ranked = sorted(templates, key=lambda template: prompt_hash(entry + template))
        yield from (template.format(entry) for template in ranked[:templates_per_entry])


def _word_problem(story: str, variant: int, names: Sequence[str]) -> str:
    """Fill a word problem with names and numbers that are derived from the story and the variant."""
    bits = prompt_hash(story, variant)
    first, second = names[bits % 12], names[(bits // 12 + 1 + bits) % 12]
    values = [2 + bits // 10**place % 17 for place in (2, 4, 6)]
    return story.format(first, second if second != first else "Mara", *values)
