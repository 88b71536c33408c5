"""Texts equal those of the naive loop at their ends, after failures, and for all seeds; test_matrix.py has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from doubles import QuickToy, collect_warnings, decode, decoder_of, failing, make_drafter, make_request, write

from outpace.core.errors import UserError
from outpace.core.registry import find
from outpace.core.types import Request, Row
from outpace.engine.engine import Engine
from outpace.rules.match import Match

TARGET = QuickToy(16, 3, 0)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5), (7,), (2, 7, 1, 8))
CASES = [
    {"rule": "greedy"},
    {"rule": "gumbel", "temperature": 1.0, "seed": 5},
    {"rule": "gumbel", "temperature": 0.6, "top_k": 5, "seed": 1 << 40},
    {"rule": "gumbel", "temperature": 1.3, "top_p": 0.8, "choice": 2},
]
METHODS = {
    "speculative": ("speculative", None, 4),
    "chain": ("speculative", None, 1),
    "planned": ("auto", None, 4),
    "card, simulated": ("card", "inline", 4),
    "card chain, simulated": ("card", "inline", 1),
    "card, thread": ("card", "thread", 4),
    "pearl, simulated": ("pearl", "inline", 4),
    "pearl, thread": ("pearl", "thread", 4),
    "planned, simulated": ("planned", "inline", 4),
    "planned, thread": ("planned", "thread", 4),
    "ssd, simulated": ("ssd", "inline", 4),
    "ssd, thread": ("ssd", "thread", 4),
}


def requests_of(case: dict, **more: object) -> list[Request]:
    """Return three requests with prompts of different lengths and consecutive seeds."""
    seed = case.get("seed", 0)
    return [
        make_request(prompt, **{**case, "max_tokens": 32, **more, "seed": seed + i}) for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_perfect_drafter_is_never_rejected_before_the_end(case: dict) -> None:
    requests = requests_of(case)
    run = decode(requests, "speculative", make_drafter("perfect", TARGET, width=1), target=TARGET)
    assert all(step.accepted == step.drafted == 4 for steps in run.steps for step in steps[:-1])
    card = decode(requests, "card", make_drafter("perfect", TARGET), worker="inline", target=TARGET)
    assert card.figures.hits > 0
    for step in (step for steps in card.steps for step in steps[1:-1]):  # a miss is an end of what was drafted so far
        assert step.hit != "miss" or step.accepted == step.depth_offered > 0


@pytest.mark.parametrize("rule", ["gumbel", "match"])
def test_text_depends_on_seed_and_choice_and_nothing_else(rule: str) -> None:
    keys = [(seed, choice) for seed in range(4) for choice in range(4)]
    requests = [make_request(PROMPTS[0], rule, temperature=1.0, seed=s, choice=c, max_tokens=12) for s, c in keys]
    first = decode(requests, "card", make_drafter("model", TARGET), worker="inline", target=TARGET).texts
    again = decode(requests[::-1], "card", make_drafter("garbage", TARGET), worker="inline", target=TARGET).texts
    assert again[::-1] == first
    assert len({tuple(text) for text in first}) == len(keys)


def inside_a_path(rounds: Sequence[int], text: Sequence[int]) -> int:
    """Return the position of a new token that is neither the first nor the last of its round."""
    start = 0
    for emitted in rounds:
        for place in range(start + 1, start + emitted - 1):
            if text.index(text[place]) == place:
                return place
        start += emitted
    raise AssertionError("no such place, choose another text")


@pytest.mark.parametrize("method", ["speculative", "card, simulated"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_text_ends_inside_an_accepted_path(method: str, case: dict, end: str) -> None:
    decoder, worker, _ = METHODS[method]
    request = requests_of(case, max_tokens=40)[2]
    whole = decode([request], decoder, make_drafter("perfect", TARGET), worker=worker, target=TARGET)
    place = inside_a_path([step.emitted for step in whole.steps[0]], whole.texts[0])
    cut = {"stop_ids": frozenset({whole.texts[0][place]})} if end == "stop" else {"max_tokens": place + 1}
    request = requests_of(case, **cut)[2]
    short = decode([request], decoder, make_drafter("perfect", TARGET), worker=worker, target=TARGET)
    assert short.texts == [whole.texts[0][: place + 1]] == [write(TARGET, request)]
    assert short.reasons == [end]
    assert short.steps[0][-1].emitted >= 2, "the end must come inside a path"
    neighbours = requests_of({**case, **cut})
    both = decode(neighbours, decoder, make_drafter("perfect", TARGET), worker=worker, target=TARGET)
    assert both.texts == [write(TARGET, neighbour) for neighbour in neighbours]


def test_tokens_past_the_end_are_not_counted_as_accepted() -> None:
    """Users see `accepted` as accepted prediction tokens: it never exceeds what was written."""
    requests = [make_request(prompt, max_tokens=7) for prompt in PROMPTS]
    for decoder, worker, width in METHODS.values():
        run = decode(requests, decoder, make_drafter("perfect", TARGET, width=width), worker=worker, target=TARGET)
        assert all(step.accepted <= step.emitted for steps in run.steps for step in steps), decoder


def test_first_token_stops() -> None:
    request = make_request(PROMPTS[0])
    stop = frozenset(write(TARGET, request)[:1])
    request = make_request(PROMPTS[0], stop_ids=stop)
    for decoder, worker, width in METHODS.values():
        run = decode([request], decoder, make_drafter("perfect", TARGET, width=width), worker=worker, target=TARGET)
        assert (run.texts, run.reasons) == ([list(stop)], ["stop"])


@pytest.mark.parametrize("verb", ["grow", "observe", "open"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_drafter_that_fails(verb: str, after: int) -> None:
    requests = requests_of({"rule": "gumbel", "temperature": 1.0})
    drafter = failing(make_drafter("model", TARGET), verb, after)
    run, messages = collect_warnings(lambda: decode(requests, "speculative", drafter, target=TARGET))
    assert run.texts == [write(TARGET, request) for request in requests]
    assert len(messages) == 1
    assert f"{verb} number {after}" in messages[0]


def test_requests_after_a_drafter_failed_are_decoded_plainly() -> None:
    module = find("decoders", "speculative")
    requests = requests_of({"rule": "greedy"})
    with Engine(TARGET, failing(make_drafter("model", TARGET), after=1)) as engine:
        texts = []
        for request in requests:
            try:
                run, _ = collect_warnings(lambda request=request: engine.submit(request, module, module.Options()))
            except UserError as error:
                pytest.fail(f"refused after the drafter died: {error}")
            for _ in range(100):
                if run.finish_reason is None:
                    collect_warnings(engine.step)
            texts.append(run.tokens)
    assert texts == [write(TARGET, request) for request in requests]


class Fixed(Match):
    """Draws the same uniform number every time."""

    def __init__(self, number: float) -> None:
        self.number = number

    def draw(self, row: Row) -> float:
        return self.number


def test_rules_of_one_class_in_one_batch_keep_their_own_options() -> None:
    requests = [make_request((2, 7), Fixed(number), 10, temperature=1.0) for number in (0.01, 0.5, 0.99)]
    alone = [decode([request], target=TARGET).texts[0] for request in requests]
    assert decode(requests, target=TARGET).texts == alone
    assert decode(requests, "speculative", make_drafter("model", TARGET), target=TARGET).texts == alone


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_coroutine_that_raises_ends_its_own_request_only(rounds: int) -> None:
    plain_module = find("decoders", "autoregressive")

    def decode_badly(place: Any, options: Any) -> Any:
        coroutine = plain_module().decode(place, options)
        answer = None
        for _ in range(2 * rounds):
            answer = yield coroutine.send(answer)
        raise ArithmeticError("on purpose")

    bad = decoder_of(decode_badly)
    request = make_request(PROMPTS[2], max_tokens=8)
    with Engine(TARGET) as engine:
        good, ill = engine.submit(request, plain_module, None), engine.submit(request, bad, None)
        ended = [run for _ in range(20) for run in engine.step()]
        assert (good.tokens, good.finish_reason) == (write(TARGET, request), "length")
        assert (ill.finish_reason, str(ill.error)) == ("error", "on purpose")
        assert ill.tokens == good.tokens[:rounds]
        assert engine.running == [], "a request that raised stays among the running ones"
    assert ill in ended, "step() never gave the request that ended"
