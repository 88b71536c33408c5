"""The end of an answer: nothing is drafted that cannot be written any more, in any method, and the text stays the same.

`test_matrix.py` compares the depth of every draft with what is left, and `test_every_rule.py` enumerates the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from doubles import QuickToy, decode, make_request, write
from light import Empty
from test_matrix import (
    GIVEN,
    TARGET,
    WORKERS,
    Cell,
    check_depths,
    files_of,
    fits,
    given,
    heads_of,
    runs_model,
    single_drafters,
)

from outpace.card.cache import CandidateCache, Correction
from outpace.card.loop import Correct, DraftLoop, Open, SetDirectives
from outpace.card.wire import Identity, read_request, request_message
from outpace.core import registry
from outpace.core.drafting import DraftDirectives
from outpace.core.tree import TokenTree
from outpace.core.types import Adjustments, DraftState
from outpace.drafters import build_drafter
from outpace.drafters.model import ModelDrafter, Options
from outpace.models.base import Part

PROMPT = (3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1)
METHODS = [name for name in registry.names("decoders") if registry.find("decoders", name).drafting]


class Counting(QuickToy):
    """The target's own equal, which counts its forwards and the rows in them."""

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.forwards = 0

    def score(self, forest: Sequence[Part]) -> Any:
        self.forwards += 1
        return super().score(forest)


def drafters_with_a_model() -> list[str]:
    return [name for name in single_drafters() if runs_model(name) and name != "layer_skip" and not heads_of(name)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", drafters_with_a_model())
def test_no_draft_is_made_for_the_last_token(method: str, drafter: str) -> None:
    """Not even the prompt is read."""
    worker = WORKERS[registry.find("decoders", method).drafting][0]
    if not fits(Cell(method, drafter, None, worker, "greedy")):
        pytest.skip("they do not go together")
    for max_tokens, is_drafted in ((1, False), (12, True)):
        model = Counting()
        built = build_drafter(drafter, GIVEN._replace(draft=model), files_of(drafter))
        request = make_request(PROMPT, max_tokens=max_tokens)
        run = decode([request], method, built, worker=worker, target=TARGET, seconds=iter(range(1 << 30)).__next__)
        assert run.texts == [write(TARGET, request)]
        assert (model.forwards > 0) == is_drafted or (method in ("auto", "planned") and not model.forwards)


@pytest.mark.parametrize("length", [2, 3, 5, 8])
def test_a_draft_has_one_forward_less_than_tokens_are_left(length: int) -> None:
    """A perfect chain of 8 would be longer: the token after it is the target's own."""
    model = Counting()
    drafter = ModelDrafter(model, Options(width=1, floor=0.0))
    request = make_request(PROMPT, max_tokens=length)
    run = decode([request], "speculative", drafter, target=TARGET, draft_length=8)
    assert (run.texts, len(run.steps[0])) == ([write(TARGET, request)], 1)
    assert model.forwards == run.figures.drafted == run.figures.accepted == length - 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("left", [1, 2, 4])
def test_the_context_ends_a_draft_like_max_tokens(method: str, left: int) -> None:
    target = QuickToy(16, 3, 0)
    target.max_positions = len(PROMPT) + left
    model = Counting()
    built = ModelDrafter(model, Options(width=2))
    worker = WORKERS[registry.find("decoders", method).drafting][0]
    request = make_request(PROMPT, max_tokens=100)
    run = decode([request], method, built, worker=worker, target=target)
    ends = make_request(PROMPT, max_tokens=left)
    assert (run.texts, run.reasons) == ([write(TARGET, ends)], ["length"])
    check_depths(run, [ends])
    assert left > 1 or not model.forwards


class Heedless(Empty):
    """A drafter of another package that has never heard of an end: eight tokens below the root in each growth."""

    def grow(self, states: Sequence[DraftState], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            text, node = [*state.tokens], 0
            for _ in range(8):
                text.append(int(TARGET._row(text).argmax()))
                child = tree.child(node, text[-1])
                node = child if child is not None else tree.add(node, text[-1], tree.scores[node] - 1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 4, 11])
def test_what_a_drafter_adds_beyond_the_end_is_not_verified(method: str, length: int) -> None:
    worker = WORKERS[registry.find("decoders", method).drafting][0]
    request = make_request(PROMPT, max_tokens=length)
    run = decode([request], method, Heedless(), worker=worker, target=TARGET)
    assert run.texts == [write(TARGET, request)]
    for step in run.steps[0]:
        assert step.verified_rows <= length
        length -= step.emitted


@pytest.mark.parametrize("name", [name for name in single_drafters() if name != "layer_skip"])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_every_drafter_stops_where_a_tree_may_not_grow(name: str, left: int) -> None:
    """However often it is asked, and whatever it has found."""
    built = build_drafter(name, given(name, GIVEN.draft), files_of(name))
    if built.capabilities.needs.layers or built.capabilities.needs.session:
        pytest.skip("it drafts with the target's hidden states or session, see test_matrix.py")
    text = tuple(write(TARGET, make_request(PROMPT, max_tokens=60)))
    request = make_request((*PROMPT, *text), prediction=(*text[-6:], *text))
    state, tree = built.open(request), TokenTree(request.prompt[-1])
    tree.max_depth = left - 1
    for _ in range(6):
        built.grow([state], [tree])
    assert tree.deepest <= left - 1


@pytest.mark.parametrize(
    "directives", [DraftDirectives(), DraftDirectives(outcomes=4), DraftDirectives(in_levels=True)]
)
def test_a_worker_s_tree_ends_with_the_answer(directives: DraftDirectives) -> None:
    """After corrections too, and in a drafter that receives the whole text at once."""
    request = make_request(PROMPT, max_tokens=7)
    text = write(TARGET, request)
    for tokens in (text[:3], text[:6]):
        model = Counting()
        loop = DraftLoop(ModelDrafter(model, Options(width=3, floor=0.0)))
        loop.post(Open(0, request))
        loop.post(SetDirectives(0, directives))
        depths = []
        for length in range(len(tokens) + 1):
            for _ in range(12):
                loop.grow()
            depths.append(loop._requests[0].tree.deepest)
            if length < len(tokens):
                loop.post(Correct(0, Correction(tokens[length : length + 1], length + 1, -1 - length)))
        assert all(depth <= 6 - length for length, depth in enumerate(depths))
        assert depths[0] == 6
        again = DraftLoop(ModelDrafter(model, Options(width=3, floor=0.0)))
        again.post(Open(0, request, 50))
        again.post(Correct(0, Correction(tokens, len(tokens), -9)))
        for _ in range(12):
            again.grow()
        assert again._requests[0].tree.deepest == 6 - len(tokens)


def test_the_outcomes_of_ssd_that_can_be_written_are_drafted_for() -> None:
    """A chain that ends takes no place from them."""
    loop = DraftLoop(ModelDrafter(Counting(), Options(width=2, floor=0.0)))
    loop.post(Open(0, make_request(PROMPT, max_tokens=4)))
    loop.post(SetDirectives(0, DraftDirectives(outcomes=6)))
    for _ in range(12):
        loop.grow()
    tree = loop._requests[0].tree
    other = [node for node in tree.children(0) if not tree.has_children(node)]
    assert tree.deepest == 3
    assert len(tree.children(0)) - len(other) == 2, "the likeliest child and the next one"


def test_a_cache_offers_nothing_beyond_the_end() -> None:
    cache = CandidateCache(4, 16, max_tokens=3)
    cache._tree.chain(0, [1, 2, 3, 5], [-0.1, -0.2, -0.3, -0.4])
    assert cache.query(8).tokens == [4, 1, 2]
    assert cache.query(2).tokens == [4, 1]


def test_a_copy_has_nothing_beyond_the_end() -> None:
    tree = TokenTree(4)
    tree.chain(0, [1, 2, 3], [-0.1, -0.2, -0.3])
    assert len(tree.copy(range(4))) == 4
    tree.max_depth = 2
    copy = tree.copy(range(4))
    assert (copy.tokens, copy.max_depth) == ([4, 1, 2], 2)
    assert tree.copy([1, 2, 3]).tokens == [1, 2]
    assert tree.copy([1, 2]).max_depth == 1


def test_a_wish_for_more_tokens_than_the_context_holds_reaches_other_machines() -> None:
    own = Identity("", 16, "", "", 64)
    request = make_request(PROMPT, max_tokens=5, adjustments=Adjustments(min_tokens=50))
    sent = read_request(request_message(request), own)
    assert sent.adjustments is not None
    assert (sent.max_tokens, sent.adjustments.min_tokens) == (5, 5)
