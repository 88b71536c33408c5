"""How long chains are drafted: each policy's own arithmetic, and that none of them moves a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from doubles import QuickToy, decode, make_drafter, make_request, write
from enumerating import (
    ASKED,
    PROMPT,
    TARGETS,
    Enumerating,
    check_equal,
    draft_of,
    exact_chances,
    rule_of,
    texts_by_chance,
)
from test_lossy_rules import cascade_chances

from outpace.core.distribution import TokenDistribution
from outpace.core.errors import UserError
from outpace.core.tree import DrawnChildren, TokenTree
from outpace.decoders._lengths import Confidence, Expected, Heuristic
from outpace.decoders.bild import Bild
from outpace.decoders.speculative import LENGTHS, Speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import EngineOptions

TARGET16 = QuickToy(16, 3, 0)
PROMPTS = ((3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1), (7,), (2, 7, 1, 8))


def chain(*chances: float) -> TokenTree:
    tree = TokenTree(0)
    for node, chance in enumerate(chances):
        assert tree.draw(node, DrawnChildren(TokenDistribution(np.array([chance, 1 - chance])), (0,))) == 1
    return tree


def test_heuristic_adds_two_or_subtracts_one() -> None:
    lengths, seen = Heuristic(2), []
    for drafted, accepted in ((2, 2), (4, 4), (6, 3), (5, 0), (4, 4), (0, 0)):
        lengths.learn(chain(*[0.5] * drafted), range(accepted + 1))
        seen.append(lengths.limit)
    assert seen == [4, 6, 5, 4, 6, 6]
    for _ in range(9):
        lengths.learn(chain(0.5), [0])
    assert lengths.limit == 1


def test_confidence_stops_after_a_doubtful_token_and_fits_its_threshold() -> None:
    lengths = Confidence(9)
    tree = chain(0.9, 0.3)
    assert not lengths.is_enough(tree, [1])
    assert lengths.is_enough(tree, [2])
    judged = [(0.9, True), (0.8, True), (0.7, True), (0.65, False), (0.6, True), (0.5, False), (0.3, False)]
    for chance, accepted in [*judged, *judged]:
        lengths.learn(chain(chance), [0, 1] if accepted else [0])
    kept, lost = ([chance for chance, accepted in judged if accepted is which] for which in (True, False))
    costs = {
        one: sum(chance >= one for chance in lost) / len(lost) + 3 * sum(chance < one for chance in kept) / len(kept)
        for one, _ in judged
    }
    assert lengths.threshold == pytest.approx(min(costs, key=costs.__getitem__)) == pytest.approx(0.6)


def test_expected_acceptance_multiplies_acceptance_rates() -> None:
    lengths = Expected(9)
    assert not lengths.is_enough(chain(0.95), [1])
    assert not lengths.is_enough(chain(0.95, 0.85), [2])  # .95 * .85
    assert lengths.is_enough(chain(0.95, 0.85, 0.85), [3])
    for _ in range(50):
        lengths.learn(chain(0.95), [0])  # sure, and wrong
    assert lengths.is_enough(chain(0.95), [1])


POLICIES = [
    ("heuristic", {"draft_length": 1}),
    ("confidence", {"draft_length": 3}),
    ("expected", {"draft_length": 3}),
]


@pytest.mark.parametrize("rule", ["rejection", "block", "cascade"])
@pytest.mark.parametrize(("lengths", "options"), POLICIES, ids=str)
def test_lengths_that_depend_on_drawn_tokens_keep_the_distribution(lengths: str, options: dict, rule: str) -> None:
    """Drafting stops behind a token, never before it; a rule that wants q at leaves gets it there too."""
    target, chance = TARGETS[3], Enumerating()
    draft = draft_of("partial", target)
    options_of_rule = {"defer": "token_v3"} if rule == "cascade" else {}
    request = make_request(
        PROMPT, rule_of(rule, chance, **options_of_rule), 3 if lengths == "heuristic" else 2, **ASKED["top-k"]
    )

    def text() -> Sequence[int]:
        drafter = ModelDrafter(draft, Options(width=1, floor=0.5))
        nodes = EngineOptions(nodes=5)
        run = decode([request], "speculative", drafter, target=target, engine=nodes, lengths=lengths, **options)
        return run.texts[0]

    found = texts_by_chance(chance, text)
    length = request.max_tokens
    is_cascade = rule == "cascade"
    check_equal(
        found, cascade_chances("token_v3", 0.2, "top-k", length) if is_cascade else exact_chances("top-k", length)
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("drafter", ["perfect", "garbage", "ngram", "model"])
def test_texts_are_the_same_and_lengths_follow_the_draft(drafter: str, lengths: str) -> None:
    requests = [make_request(prompt, "greedy", 40) for prompt in PROMPTS]
    requests += [make_request(prompt, "gumbel", 40, temperature=1.0) for prompt in PROMPTS]
    proposer = make_drafter(drafter, TARGET16, width=1)
    run = decode(requests, "speculative", proposer, target=TARGET16, lengths=lengths, engine=EngineOptions(nodes=12))
    assert run.texts == [write(TARGET16, request) for request in requests]
    if lengths == "heuristic":
        offered = [step.depth_offered for steps in run.steps for step in steps]
        assert max(offered) > 4 or drafter != "perfect"
        assert offered.count(1) > len(offered) / 2 or drafter != "garbage"


@pytest.mark.parametrize(("fallback", "rollback"), [(0.6, 5.0), (0.5, 1.0), (0.9, 2.0), (0.3, 1e9)])
def test_bild_passes_to_the_target_if_the_draft_is_unsure_and_rolls_back(fallback: float, rollback: float) -> None:
    draft = make_drafter("model", TARGET16)._expander.model
    for prompt in PROMPTS:
        request = make_request(prompt, rule_of("rollback", rollback=rollback), 40)
        drafter = ModelDrafter(draft, Options(width=1, floor=0.0))
        nodes = EngineOptions(nodes=6)
        run = decode([request], "bild", drafter, target=TARGET16, engine=nodes, fallback=fallback)
        slow, rolled = bild_slowly(draft, prompt, fallback, rollback)
        assert run.texts[0] == slow
        assert run.figures.accepted > 0
        assert run.figures.accepted < run.figures.drafted or not rolled


def bild_slowly(draft: QuickToy, prompt: Sequence[int], fallback: float, rollback: float) -> tuple[list[int], bool]:
    """The text, and whether anything was taken back; forty tokens, at most five in a run."""
    text, rolled = list(prompt), False
    while len(text) < len(prompt) + 40:
        run: list[int] = []
        while len(run) < 5 and float((q := draft._row([*text, *run]).softmax(-1)).max()) >= fallback:
            run.append(int(q.argmax()))
        for token in run:
            p = TARGET16._row(text).softmax(-1)
            if -float(p[token].log()) > rollback and token != int(p.argmax()):
                rolled = True
                break
            text.append(token)
        text.append(int(TARGET16._row(text).argmax()))
    return text[len(prompt) : len(prompt) + 40], rolled


@pytest.mark.parametrize("drafter", ["perfect", "garbage"])
def test_bild_with_rollback_zero_is_plain_decoding(drafter: str) -> None:
    """Only the target's likeliest token is kept then."""
    requests = [make_request(prompt, rule_of("rollback", rollback=0.0), 30) for prompt in PROMPTS]
    run = decode(requests, "bild", make_drafter(drafter, TARGET16, width=1), target=TARGET16)
    assert run.texts == [write(TARGET16, make_request(prompt, "greedy", 30)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (Speculative, {"lengths": "long"}, "unknown lengths 'long'"),
        (Bild, {"fallback": 2.0}, "fallback"),
    ],
)
def test_wrong_lengths_are_refused(module: object, options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        module.Options(**options)  # type: ignore[attr-defined]
