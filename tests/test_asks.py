"""What a decoder may yield after a target pass: drafts and another pass."""

from __future__ import annotations

from typing import Any

from doubles import QuickToy, decoder_of, make_drafter, make_request, write

from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Draft, Request, Verify
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.base import DecoderGenerator, RequestContext
from outpace.decoders.speculative import Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5)


def second_look(place: RequestContext, passes: list[int]) -> DecoderGenerator:
    """Draft below what the target accepted, and verify again before the commit."""
    tree = TokenTree(place.last_token)
    while True:
        yield Draft(tree)
        picks = yield Verify(tree)
        walked = place.request.rule.walk(tree, picks)
        tree = tree.copy(walked.path)
        if len(tree) > 1:
            yield Draft(tree)
            picks = yield Verify(tree)
        passes.append(len(picks))
        tree = yield Commit(tree, place.request.rule.walk(tree, picks))


def finish(engine: Engine, runs: list[TokenSequence]) -> None:
    for _ in range(300):
        if all(run.finish_reason for run in runs):
            return
        engine.step()
    raise AssertionError("no end")


def requests() -> list[Request]:
    return [make_request(PROMPT, max_tokens=25), make_request(PROMPT[1:], "gumbel", 25, temperature=0.8, seed=4)]


def test_another_pass_and_drafts_between() -> None:
    passes: list[int] = []
    with Engine(TARGET, make_drafter("model", TARGET, width=2), options=EngineOptions(nodes=12)) as engine:
        runs = [engine.submit(one, decoder_of(second_look, "sequential"), passes) for one in requests()]
        runs.append(engine.submit(requests()[0], Speculative, Speculative.Options()))
        finish(engine, runs)
    texts = [write(TARGET, one) for one in requests()]
    assert [run.tokens for run in runs] == [*texts, texts[0]]
    assert any(count > 1 for count in passes), "nothing was judged twice"
    assert len(passes) == sum(len(run.history.steps) for run in runs[:2]), "a round is what is committed"


def test_an_error_after_the_pass_ends_only_its_request() -> None:
    def raising(place: RequestContext, options: None) -> DecoderGenerator:
        yield Verify(TokenTree(place.last_token))
        raise KeyError("after the pass")

    def yielding_text(place: RequestContext, options: None) -> Any:
        yield Verify(TokenTree(place.last_token))
        yield "no request of a decoder"

    with Engine(TARGET) as engine:
        broken, mistaken = (
            engine.submit(requests()[0], decoder_of(decode, ""), None) for decode in (raising, yielding_text)
        )
        plain = engine.submit(requests()[0], Autoregressive, Autoregressive.Options())
        finish(engine, [broken, mistaken, plain])
    assert isinstance(mistaken.error, TypeError)
    assert isinstance(broken.error, KeyError)
    assert plain.tokens == write(TARGET, requests()[0])
