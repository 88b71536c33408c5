"""What a mutation is, and the fast losslessness checks that it must fail: texts, ends, filters, distributions."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from doubles import (
    QuickToy,
    chi_square,
    collect_warnings,
    decode,
    make_drafter,
    make_request,
    make_rule,
    probabilities,
    write,
)

from outpace.card.inline import SimulatedClock
from outpace.core.sampling import Sampling
from outpace.core.types import Request, Row
from outpace.drafters.model import ModelDrafter, Options

TARGET = QuickToy(12, 3, 0)
SMALL = QuickToy(4, 2, 11)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5), (7,), (2, 7, 1, 8))
FILTERED = {"temperature": 1.2, "top_k": 3}
CASES = [
    {"rule": "greedy"},
    {"rule": "gumbel", "temperature": 1.0, "seed": 5},
    {"rule": "match", "temperature": 0.8, "seed": 3},
    {"rule": "gumbel", **FILTERED},
    {"rule": "match", **FILTERED},
]
BROKEN = (TypeError, AttributeError, NameError, ImportError)  # the mistake itself does not run: it proves nothing
Original = Callable[..., Any]
METHODS = (("speculative", 1), ("speculative", 4), ("card", 4), ("card", 2))


@dataclass(frozen=True)
class Mutation:
    """`mistake` is called instead of a function of all `owners`, with the function and what it was given. `find` lists
    the tests that fail."""

    name: str
    owners: Sequence[Any]
    attribute: str
    mistake: Callable[..., Any]
    find: Callable[[], str | None] | None = None  # None: find_difference

    @contextmanager
    def applied(self) -> Iterator[Counter[str]]:
        """Puts the mistake in; counts how often it was asked."""
        calls: Counter[str] = Counter()
        originals = [(owner, vars(owner)[self.attribute]) for owner in self.owners]

        def counted(original: Original) -> Original:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls["all"] += 1
                return self.mistake(original, *args, **kwargs)

            return call

        try:
            for owner, original in originals:
                setattr(owner, self.attribute, counted(original))
            yield calls
        finally:
            for owner, original in originals:
                setattr(owner, self.attribute, original)


def requests_of(case: dict, **more: object) -> list[Request]:
    options = {**case, "max_tokens": 24, **more}
    return [make_request(prompt, **{**options, "seed": case.get("seed", 0) + i}) for i, prompt in enumerate(PROMPTS)]


# Written at import, before any mutation is put in; greedy text needs no noise, so nothing but the target decides it.
GREEDY_TEXTS = [write(TARGET, request) for request in requests_of(CASES[0])]


def speculate(requests: Sequence[Request], method: str, width: int) -> tuple[list[list[int]], str | None]:
    """The texts, and why the drafter died if it did. Draft forwards of any length, so that some come late."""
    chance = random.Random(width)
    clock = SimulatedClock(lambda: chance.expovariate(1.0), lambda rows: chance.expovariate(0.5))
    near = make_drafter("model", TARGET)._expander.model
    drafter = ModelDrafter(near, Options(width=width, tree_nodes=24))  # unwatched: the text must show the mistake
    worker = "inline" if method == "card" else None
    run, messages = collect_warnings(
        lambda: decode(requests, method, drafter, worker=worker, target=TARGET, clock=clock, check_storage=False)
    )
    return run.texts, messages[0] if messages else None


def compare(requests: Sequence[Request], expected: list[list[int]], what: str) -> Iterator[str]:
    plain = decode(requests, target=TARGET, check_storage=False).texts
    if plain != expected:
        yield f"{what}: plain decoding writes another text"
    for method, width in METHODS:
        texts, death = speculate(requests, method, width)
        if texts != plain:
            yield f"{what}: {method}, width {width}, writes another text than plain decoding"
        if death:
            yield f"{what}: {method}, width {width}: {death}"


def text_differences() -> Iterator[str]:
    """Each method against plain decoding; greedy also against the text written before."""
    for case in CASES:
        requests = requests_of(case)
        plain = GREEDY_TEXTS if case["rule"] == "greedy" else decode(requests, target=TARGET, check_storage=False).texts
        yield from compare(requests, plain, str(case["rule"]))


def end_differences() -> Iterator[str]:
    """Texts cut at every third length, and at the first of a token that comes late enough to stand in a path."""
    for length in (5, 8, 11):
        cut = [text[:length] for text in GREEDY_TEXTS]
        yield from compare(requests_of(CASES[0], max_tokens=length), cut, "max_tokens")
    for stop in range(TARGET.vocab_size):
        if all(stop in text[2:] and stop not in text[:2] for text in GREEDY_TEXTS[::2]):
            cut = [text[: text.index(stop) + 1] if stop in text else text for text in GREEDY_TEXTS]
            yield from compare(requests_of(CASES[0], stop_ids=frozenset({stop})), cut, "stop token")


def filter_differences() -> Iterator[str]:
    """No token that the filters exclude is ever written."""
    for case in CASES[3:]:
        for request, text in zip(
            requests_of(case), decode(requests_of(case), target=TARGET, check_storage=False).texts, strict=True
        ):
            for place, token in enumerate(text):
                row = TARGET._row([*request.prompt, *text[:place]])
                if probabilities(row, request.sampling)[token] == 0.0:
                    yield f"{case['rule']} writes a token of probability 0"


def distribution_differences() -> Iterator[str]:
    """Pairs of tokens over many seeds, and over many choices, against their exact probabilities."""
    sampling = Sampling(1.6, top_k=3)
    expected = {
        (a, b): probabilities(SMALL._row((1,)), sampling)[a] * probabilities(SMALL._row((1, a)), sampling)[b]
        for a, b in itertools.product(range(4), repeat=2)
    }
    for name, part in itertools.product(("gumbel", "match"), ("seed", "choice")):
        requests = [make_request((1,), name, 2, sampling=sampling, **{part: number}) for number in range(3000)]
        first = make_rule(name).reduce(
            SMALL._row((1,)).repeat(len(requests), 1), [Row(request, (1,)) for request in requests]
        )
        second = make_rule(name).reduce(
            torch.stack([SMALL._row((1, a)) for a in first]), [Row(request, (1, 0)) for request in requests]
        )
        deviation = chi_square(Counter(zip(first, second, strict=True)), expected)
        if abs(deviation) > 4.5:
            yield f"{name}: pairs over many {part}s are {deviation:.0f} standard deviations off"


CHECKS = (text_differences, end_differences, filter_differences, distribution_differences)


def find_difference() -> str | None:
    """The first difference that any check finds; None for a lossless library."""
    return next((difference for check in CHECKS for difference in check()), None)


def judge(mutation: Mutation) -> tuple[bool, str]:
    """Whether the checks notice the mistake, and by what."""
    with mutation.applied() as calls:
        try:
            difference = (mutation.find or find_difference)()
        except BROKEN as error:
            return False, f"the mutation is broken: {type(error).__name__}: {error}"
        except Exception as error:
            difference = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not calls["all"]:
        return False, "the mutated function was never called"
    return difference is not None, difference or "no check notices it"
