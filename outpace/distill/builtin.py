"""The built-in prompts: topics of our own times templates of our own, for chat, code, maths, translation and lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outpace.distill import builtin_words as words
from outpace.distill.numbering import number

TEMPLATES_A_TOPIC = 12  # a topic meets this many of its kind's templates, chosen by its name
NAMES = ("Amara", "Bruno", "Chidi", "Dana", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Lior")


def prompts() -> Iterator[str]:
    """Every prompt once, the same ones in every run."""
    yield from _crossed(words.TOPICS, words.ABOUT, TEMPLATES_A_TOPIC)
    yield from _crossed(words.THINGS, words.LISTS, 3)
    yield from _crossed(words.OCCASIONS, words.WRITING, 5)
    yield from _crossed(words.ROLES, words.ROLE_PLAY, 4)
    yield from _crossed(words.TASKS, words.CODING, 9)
    yield from _signatures()
    yield from _crossed(words.PASSAGES, words.READING, len(words.READING))
    yield from _pairs()
    for language, sentence in ((language, s) for s in words.SENTENCES for language in words.LANGUAGES):
        yield f"Translate to {language}: {sentence}"
    for topics, templates in words.ELSEWHERE:
        yield from _crossed(topics, templates, len(templates))
    for story in words.SUMS:
        yield from (_sum(story, variant) for variant in range(20))
    yield from words.RIDDLES


def _crossed(topics: Sequence[str], templates: Sequence[str], count: int) -> Iterator[str]:
    """`count` of the templates for each topic; neighbouring topics get different ones."""
    for topic in topics:
        ranked = sorted(templates, key=lambda template: number(topic + template))
        yield from (template.format(topic) for template in ranked[:count])


def _signatures() -> Iterator[str]:
    """Python functions to complete, from a name, arguments, what they do and an example."""
    for name, arguments, purpose, example in words.FUNCTIONS:
        head = f"def {name}({arguments}):\n"
        yield f'{head}    """{purpose}\n    >>> {example}\n    """\n'
        yield f"Complete this Python function.\n\n{head}    # {purpose}\n"
        yield f"Write a Python function `{name}({arguments})`. {purpose} Show one call of it."
        yield f"Write unit tests for a function `{name}({arguments})` in Python. {purpose}"


def _pairs() -> Iterator[str]:
    """Comparisons of topics that stand next to each other."""
    for first, second in zip(words.TOPICS[::2], words.TOPICS[1::2], strict=False):
        yield f"Compare {first} and {second}: what do they have in common, and where do they differ?"


def _sum(story: str, variant: int) -> str:
    """A word problem with names and numbers that follow from the story and the variant."""
    bits = number(story, variant)
    first, second = NAMES[bits % 12], NAMES[(bits // 12 + 1 + bits) % 12]
    values = [2 + bits // 10**place % 17 for place in (2, 4, 6)]
    return story.format(first, second if second != first else "Mara", *values)
