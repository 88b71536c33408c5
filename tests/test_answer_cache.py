"""The cache of earlier answers, which are drafted for repeated prompts: the same texts, in a fraction of the passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from doubles import QuickToy, make_request, write

from outpace.card.inline import InlineWorker
from outpace.core import registry
from outpace.core.adjust import Adjustments
from outpace.core.drafting import BuildContext
from outpace.core.types import Request
from outpace.drafters import build_drafter
from outpace.engine import earlier_texts
from outpace.engine.earlier_texts import AnswerCache
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
WIDE = EngineOptions(nodes=33, rows=256)


def engine(options: EngineOptions = WIDE) -> Engine:
    return Engine(TARGET, build_drafter("prediction+ngram", BuildContext(), {}), options=options)


def answer(parts: Engine, request: Request, method: str = "auto", is_exact: bool = True) -> TokenSequence:
    """Run one request to its end. If `is_exact`, its text is that of plain decoding."""
    decoder = registry.find("decoders", method)
    run = parts.submit(request, decoder, decoder.Options())
    while run.finish_reason is None:
        parts.step()
    if run.error is not None:
        raise run.error
    assert not is_exact or run.tokens == write(TARGET, request)
    return run


def passes(run: TokenSequence) -> int:
    return len(run.history.steps)


def accepted_of_prediction(run: TokenSequence) -> int:
    return sum(step.predicted_accepted for step in run.history.steps)


def asked(*tokens: int, **options: Any) -> Request:
    return make_request(tokens or PROMPT, **options)


def filled(*texts: Sequence[int], **options: Any) -> AnswerCache:
    """A cache of these texts, whose first token alone is the prompt."""
    known = AnswerCache()
    for text in texts:
        known.store(asked(text[0], **options), text)
    return known


@pytest.mark.parametrize("method", ["speculative", "card"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "rule": "gumbel", "seed": 7}], ids=["greedy", "gumbel"])
def test_a_repeated_prompt_takes_few_passes(method: str, options: dict[str, Any]) -> None:
    request = asked(max_tokens=60, **options)
    if method == "card":
        made = Engine(TARGET, None, InlineWorker(build_drafter("prediction", BuildContext(), {})), WIDE)
    else:
        made = engine()
    with made as parts:
        first, again = passes(answer(parts, request, method)), passes(answer(parts, request, method))
    assert again <= min(20, first / 2), (first, again)


def test_a_prompt_that_continues_an_answer_gets_the_rest() -> None:
    request = asked(max_tokens=60)
    text = write(TARGET, request)
    with engine() as parts:
        answer(parts, request)
        on = answer(parts, asked(*PROMPT, *text[:7], max_tokens=53), "speculative")
    assert on.request.recalled == tuple(text[7:])
    assert passes(on) <= 20


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"choice": 1},
        {"temperature": 0.9},
        {"rule": "match"},
        {"cache_salt": "theirs"},
        {"adjustments": Adjustments(repetition_penalty=1.3)},
        {"prediction": (1, 2, 3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_requests_get_nothing(other: dict[str, Any]) -> None:
    own = {"temperature": 1.0, "rule": "gumbel", "seed": 7, "max_tokens": 20}
    with engine() as parts:
        answer(parts, asked(**own))
        assert answer(parts, asked(**own)).request.recalled
        assert not answer(parts, asked(**{**own, **other})).request.recalled


def test_a_rule_whose_text_follows_the_drafts_gets_nothing() -> None:
    """With the same seed it would write another text the second time."""
    request = asked(temperature=1.0, rule="rejection", seed=7, max_tokens=30)
    with engine() as parts:
        runs = [answer(parts, request, "autoregressive", is_exact=False) for _ in range(2)]
    assert all(run.tokens and not run.request.recalled for run in runs)


@pytest.mark.parametrize("reuse", [True, False])
def test_greedy_answers_are_recalled_for_any_seed_with_reuse(reuse: bool) -> None:
    with engine(EngineOptions(nodes=33, rows=256, reuse=reuse)) as parts:
        answer(parts, asked(seed=1))
        assert bool(answer(parts, asked(seed=2, choice=3)).request.recalled) is reuse


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "rule": "gumbel"}], ids=["greedy", "gumbel"])
@pytest.mark.parametrize("guess", [(0,) * 60, tuple(range(16)) * 8, (15,)])
def test_a_wrong_recalled_answer_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], guess: tuple[int, ...]
) -> None:
    monkeypatch.setattr(AnswerCache, "find", lambda self, request: guess)
    with engine() as parts:
        for seed in range(6):
            answer(parts, asked(seed, *PROMPT, seed=seed, **options))


def test_a_recalled_answer_does_not_count_as_the_caller_s_prediction() -> None:
    with engine() as parts:
        answer(parts, asked(max_tokens=40))
        again = answer(parts, asked(max_tokens=40))
        assert again.request.recalled
        assert not accepted_of_prediction(again)
        own = asked(max_tokens=40, prediction=tuple(write(TARGET, asked(max_tokens=40))))
        assert accepted_of_prediction(answer(parts, own)) > 0


def test_the_latest_text_with_the_prefix_is_found() -> None:
    known = filled((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 9))
    assert known.find(asked(1, 2, 3)) == (5, 6)
    assert known.find(asked(1)) == (9,)
    assert known.find(asked(1, 2, 3, 4)) == ()  # nothing follows it
    assert known.find(asked(2, 3)) == ()
    assert known.find(asked(1, 2, 3, 5, 6, 7)) == ()
    known.store(asked(7, 2), (7, 2))  # a prompt without an answer
    assert known.find(asked(7)) == ()


def test_a_token_is_not_found_in_the_middle_of_two() -> None:
    assert filled((1, 256, 65536, 7)).find(asked(1, 0)) == ()
    assert filled((1, 256, 65536, 7)).find(asked(1, 256)) == (65536, 7)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_texts, "_TEXTS", 3)
    monkeypatch.setattr(earlier_texts, "_TOKENS", 12)
    known = filled(*[(number, 50) for number in range(6)])
    assert [known.find(asked(number)) for number in range(6)] == [(), (), (), (50,), (50,), (50,)]
    known.store(asked(7), range(7, 18))
    assert [len(kept.text) for kept in known._kept.shared] == [44]
    known.store(asked(8), range(8, 30))  # longer than all that may be kept
    assert known.find(asked(7)) == tuple(range(8, 18))
    assert not known.find(asked(8))


def test_an_aborted_answer_is_kept() -> None:
    decoder = registry.find("decoders", "auto")
    with engine() as parts:
        run = parts.submit(asked(max_tokens=40), decoder, decoder.Options())
        for _ in range(5):
            parts.step()
        parts.abort(run)
        parts.sweep()
        assert answer(parts, asked(max_tokens=40)).request.recalled == tuple(run.tokens)
