"""Every option with every method: tokens, text, end and log-probabilities are plain decoding's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from doubles import QuickToy, make_drafter, make_request
from turns import one_of
from twins import LETTERS, TEXTS, Wish, Written, answer_all, nearly, write_slowly

from outpace.core.adjust import adjust_logits
from outpace.core.types import Adjustments, LogprobsOptions, Row

TARGET = QuickToy(16, 3, 0)
PROMPTS = ((3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1), (7,), (2, 7, 1, 8))
SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "gumbel": [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 5, "seed": 1 << 40},
        {"temperature": 1.3, "top_p": 0.8, "choice": 2},
        {"temperature": 1.4, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.05, "seed": 9},
    ],
    "match": [{"temperature": 0.7, "top_p": 0.9, "seed": 3}],
}
METHODS = {
    "ngram chain": ("speculative", "ngram", None, 1),
    "ngram tree": ("speculative", "ngram", None, 4),
    "model chain": ("speculative", "model", None, 1),
    "model tree": ("speculative", "model", None, 4),
    "perfect chain": ("speculative", "perfect", None, 1),
    "both": ("speculative", "both", None, 3),
    "card, simulated": ("card", "both", "inline", 4),
    "card, thread": ("card", "both", "thread", 4),
}

# From the text that is written without options, and its letters, to what is asked: so that each option bites.
Option = Callable[[Sequence[int], str], dict[str, Any]]


def adjust(**settings: Any) -> dict[str, Any]:
    return {"adjustments": Adjustments(**settings)}


def spelt(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def ban(*words: Sequence[int]) -> dict[str, Any]:
    return adjust(banned=TEXTS.ban(tuple(map(spelt, words))))


OPTIONS: dict[str, Option] = {
    "repetition up": lambda t, s: adjust(repetition_penalty=1.4),
    "repetition down": lambda t, s: adjust(repetition_penalty=0.6),
    "presence up": lambda t, s: adjust(presence_penalty=1.6),
    "presence down": lambda t, s: adjust(presence_penalty=-2.0),
    "frequency up": lambda t, s: adjust(frequency_penalty=0.9),
    "frequency down": lambda t, s: adjust(frequency_penalty=-1.2),
    "all penalties": lambda t, s: adjust(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": lambda t, s: adjust(logit_bias=((t[2], -3.0), ((t[2] + 5) % 16, 2.5))),
    "bias that bans and one that rules": lambda t, s: adjust(logit_bias=((t[1], -100.0), ((t[1] + 3) % 16, 4.0))),
    "bad word of one token": lambda t, s: ban((t[3],)),
    "bad word of two": lambda t, s: ban(t[3:5]),
    "bad words that overlap": lambda t, s: ban(t[2:4], t[3:6], t[:3], (t[9],)),
    "bad word that begins and ends in a token": lambda t, s: adjust(banned=TEXTS.ban((s[4:7], s[9:12]))),
    "min tokens": lambda t, s: {**adjust(min_tokens=9), "stop_ids": frozenset({t[2], t[5]})},
    "allowed tokens": lambda t, s: adjust(allowed=tuple({t[1], t[3], t[4], (t[0] + 1) % 16})),
    "allowed tokens, one of them a stop": lambda t, s: {
        **adjust(allowed=(t[2], (t[2] + 1) % 16), min_tokens=4, logit_bias=((t[2], -2.0),)),
        "stop_ids": frozenset({t[2]}),
    },
    "stop token": lambda t, s: {"stop_ids": frozenset({t[6], (t[6] + 1) % 16})},
    "stop string": lambda t, s: {"stops": (s[5:9],)},
    "stop strings after nine tokens": lambda t, s: {**adjust(min_tokens=9), "stops": (s[5:7], s[12:14], s[2:3])},
    "stop string, included": lambda t, s: {"stops": (s[5:9],), "include": True},
    "stop strings": lambda t, s: {"stops": ("xyz", s[6:12], s[7:9], s[6:8])},
    "chosen logprobs": lambda t, s: {"logprobs": LogprobsOptions(0)},
    "five logprobs": lambda t, s: {"logprobs": LogprobsOptions(5)},
    "chosen logprobs, processed": lambda t, s: {**adjust(presence_penalty=0.4), "logprobs": LogprobsOptions(0, True)},
    "more logprobs than tokens, processed": lambda t, s: {**ban(t[1:3]), "logprobs": LogprobsOptions(40, True)},
    "logprobs cut by a stop string": lambda t, s: {"stops": (s[7:9],), "logprobs": LogprobsOptions(2)},
    "echo with logprobs": lambda t, s: {"logprobs": LogprobsOptions(3, prompt=True)},
    "one token": lambda t, s: {"max_tokens": 1, "logprobs": LogprobsOptions(1)},
    "seven tokens": lambda t, s: {"max_tokens": 7},
    "everything": lambda t, s: {
        **adjust(
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias=tuple({t[0]: -1.0, t[4]: 1.5}.items()),
            banned=TEXTS.ban((spelt(t[2:4]), spelt([t[7]]))),
            min_tokens=6,
        ),
        "stop_ids": frozenset({t[3], t[8]}),
        "stops": (s[6:8], s[12:14]),
        "include": True,
        "logprobs": LogprobsOptions(4, processed=True, prompt=True),
    },
}


def make_wish(prompt: Sequence[int], rule: str, sampling: dict[str, Any], asked: dict[str, Any]) -> Wish:
    ends = {name: asked[name] for name in ("stops", "include") if name in asked}
    rest = {name: value for name, value in asked.items() if name not in ends}
    return Wish(make_request(prompt, rule, **{"max_tokens": 20, **sampling, **rest}), **ends)


@cache
def bare(prompt: tuple[int, ...], rule: str, number: int) -> Written:
    """What is written where nothing is asked."""
    return write_slowly(TARGET, make_wish(prompt, rule, SAMPLINGS[rule][number], {}))


@cache
def wishes_of(option: str) -> tuple[tuple[Wish, Written], ...]:
    """The option with every rule, for two of the prompts, and the text without it for each."""
    made = []
    for rule, samplings in SAMPLINGS.items():
        number = sum(map(ord, option)) % len(samplings)
        for prompt in (PROMPTS[0], PROMPTS[1 + len(option) % 2]):
            plain = bare(prompt, rule, number)
            asked = OPTIONS[option](plain.tokens, plain.text)
            made.append((make_wish(prompt, rule, samplings[number], asked), plain))
    return tuple(made)


@cache
def expected(option: str) -> tuple[Written, ...]:
    """Plain decoding's answers, each written alone."""
    return tuple(answer_all([wish], target=TARGET)[0] for wish, _ in wishes_of(option))


@pytest.mark.parametrize("option", OPTIONS)
def test_plain_decoding_is_the_slow_twin(option: str) -> None:
    bites = 0
    for (wish, plain), written in zip(wishes_of(option), expected(option), strict=True):
        slow = write_slowly(TARGET, wish)
        assert (written.tokens, written.text, written.reason) == (slow.tokens, slow.text, slow.reason)
        assert nearly(written.logprobs, slow.logprobs, 1e-9)
        assert nearly(written.prompt_logprobs, slow.prompt_logprobs, 1e-9)
        assert len(written.logprobs) == (len(written.tokens) if wish.request.logprobs else 0)
        bites += (slow.tokens, slow.text, slow.logprobs) != (plain.tokens, plain.text, [])
    assert bites >= 3, "the option changes next to nothing here: the test would not notice if it were ignored"


# A tree's rows are chains too; the others propose by what "both" and the thread propose by, and take each option alone.
LONG = ("ngram chain", "model chain", "perfect chain", "ngram tree", "card, simulated")


def methods() -> Iterator[Any]:
    """Methods with every option and one of its six wishes, which alternate.

    The long tests have all methods and wishes.
    """
    yield from ((name, 6) for name in METHODS if name not in LONG)
    yield from (pytest.param(name, 1, marks=pytest.mark.long) for name in METHODS)


@pytest.mark.parametrize(("method", "every"), list(methods()))
def test_every_option_at_once(method: str, every: int) -> None:
    """All wishes in one batch: a row that is adjusted by its neighbour's options would show."""
    decoder, drafter, worker, width = METHODS[method]
    first = list(METHODS).index(method)
    parts = [(option, slice((number + first) % every, None, every)) for number, option in enumerate(OPTIONS)]
    wishes = [wish for option, part in parts for wish, _ in wishes_of(option)[part]]
    names = [option for option, part in parts for _ in wishes_of(option)[part]]
    plain = [written for option, part in parts for written in expected(option)[part]]
    proposer = make_drafter(drafter, TARGET, width=width)
    run = answer_all(wishes, decoder, proposer, worker, target=TARGET)
    for name, mine, alone in zip(names, run, plain, strict=True):
        assert mine[:5] == alone[:5], name
    assert sum(step.accepted for written in run for step in written.steps) > len(run)
    for name in OPTIONS:  # a method that drafts nothing where this option is asked would prove nothing
        steps = [step for written, mine in zip(run, names, strict=True) if mine == name for step in written.steps]
        assert (sum(step.drafted for step in steps) > 0) == (name != "one token"), name  # the target writes the last


def test_rows_that_share_one_text_are_adjusted_by_their_own_requests() -> None:
    logits, text = torch.zeros(3, 4), (1, 2)
    biases = [make_request(text, adjustments=Adjustments(logit_bias=((token, 1.0),))) for token in range(3)]
    assert torch.equal(adjust_logits(logits, [Row(request, text) for request in biases]), torch.eye(3, 4))
    assert not logits.any(), "the scores themselves were changed"


@pytest.mark.parametrize("what", one_of(3, ["options", "rejection", "memory"]))  # which have short tests of their own
def test_the_checks_of_the_mutations_pass_without_one(what: str) -> None:
    import option_checks

    assert getattr(option_checks, f"find_in_{what}")() is None
