"""A constraint on the answer, in the engine: the same text by every method, complete ends, faults of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from constraints import Failing, Table, rings
from doubles import DRAFTERS, SMALL, QuickToy, decode, make_drafter, make_request, write
from turns import in_turn
from twins import LETTERS, TEXTS

from outpace.core.errors import UserError
from outpace.core.registry import find
from outpace.core.types import Adjustments, LogprobsOptions, Request, Row
from outpace.engine.engine import Engine

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5)
RULES = {
    "greedy": {},
    "gumbel": {"temperature": 1.0},
    "gumbel-top-k": {"temperature": 1.3, "top_k": 5},
    "gumbel-top-p": {"temperature": 1.0, "top_p": 0.7},
    "match": {"temperature": 1.0},
}


def request_of(name: str, width: int = 5, max_tokens: int = 30, **options: Any) -> Request:
    constraint = Table(len(PROMPT), rings(16, width), options.pop("last", frozenset()))
    rule = name.partition("-")[0]
    return make_request(PROMPT, rule, max_tokens, constraint=constraint, **RULES.get(name, {}), **options)


def masked_slowly(request: Request) -> list[int]:
    """Every row masked before its rule sees it, by sums of its own; no session, no tree, no guard."""
    text = list(request.prompt)
    constraint: Any = request.constraint
    bare = replace(request, constraint=None)
    for _ in range(request.max_tokens):
        logits = TARGET._row(text)
        for token in range(16):
            if not constraint._may(text, token):
                logits[token] = -torch.inf
        text += request.rule.reduce(logits[None], [Row(bare, text)])
        if text[-1] in request.stop_ids or text[-1] in constraint.last:
            break
    return text[len(request.prompt) :]


@pytest.mark.parametrize(("name", "method"), in_turn(RULES, ["autoregressive", "speculative", "auto", "card"]))
def test_the_text_is_that_of_masked_rows_by_every_method(name: str, method: str) -> None:
    for drafter in DRAFTERS if method != "autoregressive" else [None]:
        request = request_of(name, last=frozenset({11}) if drafter == "perfect" else frozenset())
        worker = "inline" if method == "card" else None
        built = make_drafter(drafter, TARGET) if drafter else None
        run = decode([request, make_request(PROMPT)], method, built, worker=worker, target=TARGET)
        assert run.texts[0] == masked_slowly(request)
        assert run.texts[1] == write(TARGET, make_request(PROMPT))  # the other request is not affected


@pytest.mark.parametrize("drafter", ["perfect", "garbage", "ngram"])
def test_the_ratio_rule_writes_what_is_allowed(drafter: str) -> None:
    request = request_of("rejection", temperature=1.0, seed=5)
    run = decode([request], "speculative", make_drafter(drafter, TARGET, width=1), target=TARGET)
    constraint: Any = request.constraint
    assert len(run.texts[0]) == request.max_tokens
    assert constraint.allowed(PROMPT, run.texts[0]) == request.max_tokens


def test_a_mask_is_made_only_where_a_pick_is_refused() -> None:
    everything = [frozenset(range(16))] * 16
    for name, expected in (("greedy", 0), ("gumbel", 0), ("gumbel-top-k", 30), ("match", 30)):
        request = replace(request_of(name), constraint=Table(len(PROMPT), everything))
        assert decode([request], target=TARGET).texts == [write(TARGET, replace(request, constraint=None))]
        constraint: Any = request.constraint
        assert constraint.masks == expected, name


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "card"])
def test_a_complete_text_ends(method: str) -> None:
    worker = "inline" if method == "card" else None
    drafter = make_drafter("perfect", TARGET) if method != "autoregressive" else None
    request = request_of("greedy", width=16, last=frozenset(range(8)), max_tokens=40)
    run = decode([request], method, drafter, worker=worker, target=TARGET)
    assert run.reasons == ["stop"]
    assert run.texts[0][-1] < 8
    assert all(token >= 8 for token in run.texts[0][:-1])


def test_logprobs_follow_the_picks_and_processed_ones_are_masked() -> None:
    request = request_of("greedy", width=2, logprobs=LogprobsOptions(16, processed=True))
    with Engine(TARGET, options=SMALL) as engine:
        decoder = find("decoders", "autoregressive")
        run = engine.submit(request, decoder, decoder.Options())
        while run.finish_reason is None:
            engine.step()
        for record, before in zip(run.history.logprobs, run.committed[len(PROMPT) - 1 :], strict=False):
            allowed = rings(16, 2)[before]
            assert record.token in allowed
            assert {token for token, value in record.top if value > -np.inf} == allowed


def test_nothing_left_to_write_ends_this_request_alone() -> None:
    banned = Adjustments(banned=TEXTS.ban(LETTERS))
    request = request_of("greedy", adjustments=banned)
    other = make_request(PROMPT)
    runs = submitted([request, other])
    assert isinstance(runs[0].error, UserError)
    assert "may follow" in str(runs[0].error)
    assert runs[1].tokens == write(TARGET, other)


@pytest.mark.parametrize("asked", [0, 3, 9])
@pytest.mark.parametrize("name", ["greedy", "match"])
def test_a_fault_in_a_constraint_ends_this_request_alone(asked: int, name: str) -> None:
    constraint = Failing(len(PROMPT), rings(16, 5), asked, lambda: UserError("the grammar became too complex"))
    request, other = replace(request_of(name), constraint=constraint), make_request(PROMPT)
    for method, drafter in (("autoregressive", None), ("speculative", "both")):
        constraint._left = asked
        runs = submitted([request, other], method, make_drafter(drafter, TARGET) if drafter else None)
        assert "too complex" in str(runs[0].error)
        assert runs[1].tokens == write(TARGET, other)


def submitted(requests: list[Request], method: str = "autoregressive", drafter: Any = None) -> list[Any]:
    with Engine(TARGET, drafter, options=SMALL) as engine:
        decoder = find("decoders", method)
        runs = [engine.submit(request, decoder, decoder.Options()) for request in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
        if drafter is not None:
            assert engine.drafting.drafter is not None, "the drafter was given up"
    return runs
