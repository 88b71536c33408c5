"""What a decoder may yield after a target pass: drafts, a wait, another pass; and a wait for depth."""

from __future__ import annotations

from typing import Any

import pytest
from doubles import Candidate, QuickToy, decoder_of, layer_of, make_drafter, make_request, write

from outpace.card.cache import CandidateCache
from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.core.tree import Role, TokenTree, depths
from outpace.core.types import Await, Commit, Draft, Request, Verify
from outpace.decoders import Autoregressive, Speculative
from outpace.decoders.base import DecoderGenerator, RequestContext
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence

TARGET = QuickToy(16, 3, 0)
PROMPT = (3, 1, 4, 1, 5)
GAMMA = 3


def pearl(place: RequestContext, seen: list[int]) -> DecoderGenerator:
    """Wait for a chain of GAMMA tokens in each round, as PEARL does."""
    candidates = place.candidates
    while True:
        yield Await(depth=GAMMA)
        tree = candidates.query(place.budget)
        seen.append(max(depths(tree.parents)))
        picks = yield Verify(tree)
        yield Await(depth=GAMMA + 2)
        seen.append(candidates.has_grown(0, GAMMA + 2))
        candidates.add_late_children(tree)
        verdict = place.request.rule.walk(tree, picks)
        hit, correction = candidates.correct(tree, verdict, len(picks))
        place.correct(correction)
        yield Commit(tree, verdict, hit)


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


def test_a_wait_for_depth_is_served_before_and_after_the_pass() -> None:
    clock = SimulatedClock(lambda: 1.0, lambda rows: 0.5)  # the drafter would never be in time
    worker = InlineWorker(make_drafter("perfect", TARGET, width=1), clock)
    seen: list[Any] = []
    with Engine(TARGET, worker=worker, options=EngineOptions(nodes=12)) as engine:
        runs = [engine.submit(one, decoder_of(pearl, "parallel"), seen) for one in requests()]
        finish(engine, runs)
        assert worker.failure is None
    assert [run.tokens for run in runs] == [write(TARGET, one) for one in requests()]
    assert all(seen)
    assert min(seen[::2]) >= 1
    assert max(len(run.history.steps) for run in runs) <= 12, "chains of three, and a perfect draft"


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


@pytest.mark.parametrize(("layers", "depth", "has"), [(1, 0, True), (2, 0, False), (0, 2, True), (1, 3, False)])
def test_a_cache_knows_its_layers_and_its_depth(layers: int, depth: int, has: bool) -> None:
    cache = CandidateCache(5)
    cache.insert(layer_of(0, [Candidate(1, 0, 7, -0.1, Role.PRIMARY), Candidate(2, 1, 8, -0.1, Role.PRIMARY)]))
    assert cache.has_grown(layers, depth) is has
    cache.wait(layers, 0.0, depth)
    cache.give_up()
    assert cache.has_grown(layers, depth), "there is nothing to wait for"
