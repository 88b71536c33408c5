"""The lossy rules: exact to what they say instead of p, strict at their strict ends; in the library and command."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from doubles import DRAFTERS, QuickToy, collect_warnings, decode, failing, make_drafter, make_request, write
from enumerating import (
    PROMPT,
    TARGETS,
    Chances,
    Enumerating,
    Shape,
    chances_of,
    check_equal,
    draft_of,
    exact_chances,
    go_every_way,
    p_after,
    rule_of,
)
from judges import random_judge
from rule_twins import above, norm
from test_tree import random_tree
from turns import case, in_turn

from outpace.api.llm import LLM
from outpace.cli import display
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.stats import RoundStats
from outpace.core.tree import Role
from outpace.core.types import Verdict
from outpace.models.load import Loaded
from outpace.rules._relaxed import Relaxed
from outpace.rules.cascade import MIXTURES

TARGET = TARGETS[3]
DRAFT = draft_of("partial", TARGET)
TWO = Shape(levels=2)
Row = list[float]


def pi_of(kind: str, a: float, p: Row, q: Row, raw_p: Row, raw_q: Row) -> Row:
    """The mixtures as the paper writes them."""
    most_p, most_q = max(raw_p), max(raw_q)
    distance = math.fsum(above(p, q))
    if kind in ("chow", "diff", "opt"):
        floor = {"chow": 1 - a, "diff": most_p - a, "opt": most_p - a * distance}[kind]
        return q if most_q >= floor else p
    chosen = {
        "token_v1": [value >= most_p - a for value in raw_q],
        "token_v2": [value >= most_p - a for value in raw_p],
        "token_v3": [value >= (1 - a) * most_p for value in raw_p],
    }[kind]
    kept = [value if one else 0.0 for value, one in zip(q, chosen, strict=True)]
    return [own + (1 - math.fsum(kept)) * value for own, value in zip(kept, p, strict=True)]


def cascade_chances(kind: str, a: float, asked: str, length: int, draft: str = "partial") -> Chances:
    """Return the product of pi along every text."""
    models = TARGET, draft_of(draft, TARGET)

    def row(text: Sequence[int]) -> Row:
        return pi_of(kind, a, *(p_after(model, text, how) for how in (asked, "bare") for model in models))

    return chances_of(row, 3, length)


SHAPES = [("bare", Shape()), ("top-k", Shape()), ("top-k", Shape(levels=2)), ("bare", Shape(levels=2, nodes=1))]
GREEDY = [(kind, a) for kind in MIXTURES for a in (0.0, 0.15, 0.4, 0.8)]


def cascades() -> Iterator[Any]:
    """Yield each mixture over every other shape with one alpha, which alternate; the long tests have all of them."""
    for number, (kind, (asked, shape)) in enumerate(itertools.product(MIXTURES, SHAPES)):
        for place, a in enumerate((0.15, 0.4, 0.0)):
            is_long = place != (number + number // len(SHAPES)) % 3 or (number + number // len(SHAPES)) % 2 == 0
            yield pytest.param(kind, asked, shape, a, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("kind", "asked", "shape", "a"), list(cascades()), ids=str)
def test_a_cascade_writes_its_pi(kind: str, asked: str, shape: Shape, a: float) -> None:
    """Root, inner tokens, the last ones, and where the budget leaves the root alone."""
    rule = rule_of("cascade", Enumerating(), defer=kind, alpha=a)
    check_equal(go_every_way(rule, "partial", shape, asked).texts, cascade_chances(kind, a, asked, 2))


@pytest.mark.parametrize(("kind", "a"), GREEDY, ids=str)
def test_a_greedy_cascade_compares_unscaled_probabilities(kind: str, a: float) -> None:
    """At temperature 0 the text is deterministic: each token is the draft's likeliest or the target's."""
    rule = rule_of("cascade", Enumerating(), defer=kind, alpha=a)
    for draft in ("partial", "garbage"):
        expected = cascade_chances(kind, a, "greedy", 3, draft)
        assert list(expected.values()) == [1.0]
        check_equal(go_every_way(rule, draft, TWO, "greedy", 3).texts, expected)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_greedy_cascade_moves_from_the_target_to_the_draft(kind: str) -> None:
    """Without this, the test above could pass with mixtures that never follow the draft."""
    texts = [next(iter(cascade_chances(kind, a, "greedy", 4, "garbage"))) for a in (-2.0, 0.4, 1.0)]
    assert texts[0] == next(iter(exact_chances("greedy", 4)))
    assert len(set(texts)) > 1


STRICT = [
    ("lenience", {"lenience": 0.0}),
    ("adaptive", {"most_lenience": 0.0}),
    *(("cascade", {"defer": kind, "alpha": -2.0}) for kind in MIXTURES),
]


@pytest.mark.parametrize(
    ("asked", "length"),
    [("bare", 1), ("min-p", 1), *(case(long, False) for long in (("min-p", 2), ("bare", 2), ("min-p", 3)))],
)
@pytest.mark.parametrize(("name", "options"), STRICT)
def test_the_strict_end_is_p(name: str, options: dict[str, Any], asked: str, length: int) -> None:
    rule = rule_of(name, Enumerating(), **options)
    check_equal(go_every_way(rule, "partial", TWO, asked, length).texts, exact_chances(asked, length))


def emitted(p: Row, q: Row, lenience: float) -> Row:
    accepted = [min(value, own / (1 - lenience)) for own, value in zip(p, q, strict=True)]
    rest, rejected = norm(above(p, q)), 1 - math.fsum(accepted)
    return [taken + rejected * left for taken, left in zip(accepted, rest, strict=True)]


@pytest.mark.parametrize("dial", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["lenience", "adaptive"])
def test_lenience_writes_what_its_formula_says_on_the_line_of_yin(name: str, dial: float) -> None:
    """P(reject) + TV(p, written) = TV(p, q): no rule gives more of one for as much of the other."""
    p, q = p_after(TARGET, PROMPT), p_after(DRAFT, PROMPT)
    distance = math.fsum(above(p, q))
    entropy = -math.fsum(value * math.log(value) for value in p)
    spared = dial if name == "lenience" else dial * (1 - math.sqrt(math.exp(-entropy) * distance))
    rule = rule_of(name, Enumerating(), **{"lenience" if name == "lenience" else "most_lenience": dial})
    found = go_every_way(rule, length=1)
    written = emitted(p, q, spared)
    assert [found.texts.get((token,), 0.0) for token in range(3)] == pytest.approx(written, abs=1e-12)
    loss = math.fsum(above(written, p))
    assert loss > 0
    assert (1 - found.accepted) + loss == pytest.approx(distance, abs=1e-12)


TARGET16 = QuickToy(16, 3, 0)
PROMPTS = ((3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1), (7,), (2, 7, 1, 8))


@pytest.mark.parametrize(("drafter", "method"), in_turn(DRAFTERS, ["speculative", "card"]))
def test_relaxed_rules_write_plain_texts_at_their_strict_ends(drafter: str, method: str) -> None:
    worker = "inline" if method == "card" else None
    for name, plain, options, temperature in (
        ("top_beta", "greedy", {"beta": 1}, 0.0),
        ("top_beta", "greedy", {"tau": 0.0}, 0.0),
        ("typical", "gumbel", {"epsilon": 1.0, "delta": 1e9}, 0.9),
    ):
        rule = rule_of(name, **options)
        requests = [make_request(prompt, rule, 30, temperature=temperature) for prompt in PROMPTS]
        run = decode(requests, method, make_drafter(drafter, TARGET16), worker=worker, target=TARGET16)
        expected = [write(TARGET16, make_request(prompt, plain, 30, temperature=temperature)) for prompt in PROMPTS]
        assert run.texts == expected
        assert name != "typical" or run.figures.accepted == 0


@pytest.mark.parametrize(
    ("name", "temperature", "dials"),
    [
        ("top_beta", 0.0, [{"beta": 1}, {"beta": 3}, {"beta": 8, "tau": 3.0}]),
        ("typical", 1.0, [{"epsilon": 0.5, "delta": 1e9}, {}, {"epsilon": 0.001}]),
        ("lenience", 1.0, [{"lenience": 0.0}, {"lenience": 0.4}, {"lenience": 0.9}]),
        ("adaptive", 1.0, [{"most_lenience": 0.0}, {"most_lenience": 0.5}, {"most_lenience": 0.99}]),
        ("cascade", 1.0, [{"alpha": -2.0}, {"alpha": 0.2}, {"alpha": 0.8}]),
    ],
)
def test_looser_dials_accept_more(name: str, temperature: float, dials: Sequence[dict[str, Any]]) -> None:
    lengths = []
    for options in dials:
        rule = rule_of(name, **options)
        requests = [
            make_request(prompt, rule, 30, temperature=temperature, seed=n) for n in range(2) for prompt in PROMPTS
        ]
        run = decode(requests, "speculative", make_drafter("garbage", TARGET16, width=1), target=TARGET16)
        lengths.append(run.figures.mean_accepted_length)
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_path_of_good_tokens_counts_and_may_end_late(seed: int) -> None:
    tree, chance = random_tree(seed), random.Random(seed)
    good = [{chance.choice([tree.tokens[n] for n in tree.children(node)] or [0]), 3} for node in range(len(tree))]

    class Given(Relaxed):
        def acceptable(self, judged: Any) -> Callable[[int], bool]:
            return good[judged].__contains__

        def _own(self, judged: Any) -> int:
            return 100 + int(judged)

    for rows in range(1, len(tree) + 1):  # the other nodes are late
        paths = [tree.path(node) for node in range(len(tree))]
        paths = [path for path in paths if all(tree.roles[node] != Role.PROBE for node in path)]
        taken = [p for p in paths if all(a < rows and tree.tokens[b] in good[a] for a, b in itertools.pairwise(p))]
        longest = max(taken, key=len)
        own = 100 + longest[-1] if longest[-1] < rows else None
        assert Given().walk(tree, range(rows)) == Verdict(longest, own, relaxed=len(longest) - 1)


@pytest.mark.parametrize("drafter", ["ngram", "empty", "failing"])
def test_a_cascade_without_q_ends_with_an_error(drafter: str) -> None:
    """It never writes the target's text in silence."""
    request = make_request(PROMPTS[0], "cascade", 30, temperature=1.0)
    inner = (
        failing(make_drafter("model", TARGET16, width=1)) if drafter == "failing" else make_drafter(drafter, TARGET16)
    )

    def run() -> None:
        with pytest.raises(UserError, match="rule cascade needs the draft model's q"):
            decode([request], "speculative", inner, target=TARGET16, check_storage=False)

    collect_warnings(run)
    with pytest.raises(UserError, match="rule cascade needs the draft model's q"):
        decode([request], "autoregressive", target=TARGET16, check_storage=False)


def test_an_unknown_mixture_is_refused() -> None:
    with pytest.raises(UserError, match="unknown defer 'token_v4'"):
        rule_of("cascade", defer="token_v4")


RATIO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # the rule, a loose dial, the strict one
    ("lenience", {"lenience": 0.4}, {"lenience": 0.0}),
    ("adaptive", {"most_lenience": 0.8}, {"most_lenience": 0.0}),
    *(("cascade", {"defer": kind, "alpha": 0.4}, {"defer": kind, "alpha": -2.0}) for kind in MIXTURES),
]
PICKED: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("top_beta", {"beta": 3}, {"beta": 1}, 0.0),
    ("typical", {}, {"epsilon": 1.0, "delta": 1e9}, 1.0),
    ("rollback", {"rollback": 3.0}, {"rollback": 0.0}, 0.0),
]
SEEDS = (20, pytest.param(120, marks=pytest.mark.long))


def first_round(name: str, options: dict[str, Any], temperature: float, seed: int) -> tuple[RoundStats, list[int]]:
    """The Step of one drafted token, and the text."""
    rule = rule_of(name, **options)
    request = make_request((2, 7, 1, 8, 1 + seed % 14), rule, 2, temperature=temperature, seed=seed)
    drafter = make_drafter("garbage", TARGET16, width=1)
    run = decode([request], "speculative", drafter, target=TARGET16, draft_length=1)
    return run.steps[0][0], run.texts[0]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "loose", "strict"), RATIO, ids=lambda value: str(value))
def test_relaxed_is_what_the_ratio_rule_rejects_by_the_same_number(
    name: str, loose: dict[str, Any], strict: dict[str, Any], seeds: int
) -> None:
    counted = []
    for seed in range(seeds):
        step, exact = first_round(name, loose, 1.0, seed)[0], first_round("rejection", {}, 1.0, seed)[0]
        lost = name == "cascade" and exact.accepted > step.accepted  # pi may have less of a token than p
        assert step.relaxed == (0 if lost else step.accepted - exact.accepted)
        counted.append(step.relaxed)
        assert first_round(name, strict, 1.0, seed)[0].relaxed == 0
    assert 0 < sum(counted) < len(counted)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "loose", "strict", "temperature"), PICKED, ids=lambda value: str(value))
def test_relaxed_is_what_plain_decoding_would_not_have_written(
    name: str, loose: dict[str, Any], strict: dict[str, Any], temperature: float, seeds: int
) -> None:
    counted = []
    for seed in range(seeds):
        step, text = first_round(name, loose, temperature, seed)
        plain = "gumbel" if temperature else "greedy"
        exact = write(TARGET16, make_request((2, 7, 1, 8, 1 + seed % 14), plain, 1, temperature=temperature, seed=seed))
        assert step.relaxed == (step.accepted and text[0] != exact[0])
        counted.append(step.relaxed)
        assert first_round(name, strict, temperature, seed)[0].relaxed == 0
    assert 0 < sum(counted) < len(counted)


def test_picked_siblings_are_counted_by_what_the_rejections_have_left() -> None:
    """Without lenience no token of a tree of n-grams is relaxed, whatever was rejected before it."""
    for lenience, expected in ((0.0, False), (0.9, True)):
        rule = rule_of("lenience", lenience=lenience)
        requests = [make_request((3, 1, 4, 1, 5, 3, 1, 4) * 2, rule, 60, temperature=1.0, seed=n) for n in range(12)]
        run = decode(requests, "speculative", make_drafter("ngram", TARGET16), target=TARGET16)
        assert run.figures.accepted > 0
        assert (run.figures.relaxed > 0) is expected


def test_what_a_stop_cuts_off_is_not_counted() -> None:
    rule = rule_of("typical", epsilon=0.0, delta=0.0)  # accepts all that is possible at all
    request = make_request((2, 7, 1, 8), rule, 3, temperature=1.0)
    run = decode([request], "speculative", make_drafter("garbage", TARGET16, width=1), target=TARGET16, draft_length=8)
    assert run.figures.emitted == 3
    assert run.figures.relaxed <= run.figures.accepted <= 3


ASKED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.1, "seed": 3, "min_tokens": 24}
LOSSY = [name for name in registry.names("rules") if not registry.describe("rules", name).lossless]


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_says_so_in_its_help_and_in_each_answer(
    name: str, tiny_pair: tuple[Loaded, Loaded], tmp_path: Path
) -> None:
    assert registry.describe("rules", name).help.startswith("Lossy: ")
    temperature = 0.0 if name in ("top_beta", "judge") else 1.1
    own = {"judge": str(random_judge(tmp_path, tiny_pair[0]))} if name == "judge" else {}
    method = "speculative" if name == "cascade" else "auto"
    with LLM(*tiny_pair, rule=name, method=method, **own) as llm:
        assert llm.method == "speculative"
        result = llm.stream("hello hello", **{**ASKED, "temperature": temperature}).finish()
    assert not result.lossless
    assert "speculative (lossy): " in display.summary(result)


def test_a_plain_answer_of_a_cascade_is_the_targets_own(tiny_pair: tuple[Loaded, Loaded]) -> None:
    cascade: dict[str, Any] = {"method": "speculative", "rule": "cascade", "defer": "chow", "alpha": "1.0"}
    with LLM(*tiny_pair, **cascade) as llm, LLM(*tiny_pair, method="autoregressive") as alone:
        plain, own = llm.stream("hello", plain=True, **ASKED).finish(), alone.stream("hello", **ASKED).finish()
        assert plain.tokens == own.tokens
        assert plain.lossless
        assert llm.stream("hello", **ASKED).finish().tokens != own.tokens, "with a = 1 the draft alone writes"


def test_bild_has_its_own_rule_by_default(tiny_pair: tuple[Loaded, Loaded]) -> None:
    greedy = {"max_tokens": 24, "min_tokens": 24}
    with LLM(tiny_pair[0], method="autoregressive") as llm:
        plain = llm.stream("hello", **greedy).finish().tokens
    texts = {}
    for rollback in (0.0, 1e9):
        with LLM(*tiny_pair, method="bild", rollback=rollback, fallback=0.0) as llm:
            assert llm.rule == "rollback"
            assert llm.engine.options.nodes == 11
            result = llm.stream("hello", **greedy).finish()
            assert not result.lossless
            texts[rollback] = result.tokens
    assert texts[0.0] == plain != texts[1e9]
    with LLM(*tiny_pair, method="bild", rule="greedy", nodes=6) as llm:
        result = llm.stream("hello", **greedy).finish()
        assert (result.tokens, result.lossless, llm.engine.options.nodes) == (plain, True, 6)


def test_options_of_rules_are_flags_and_json_says_lossless(tiny_pair: tuple[Loaded, Loaded], run: Run) -> None:
    model = ["generate", "hello", "--target", tiny_pair[0].name, "--draft", "layers:0", "--json", "--max-tokens", "6"]
    for more, lossless in (
        (["--rule", "typical", "--epsilon", "0.2", "--delta", "0.5", "--temperature", "1"], False),
        (["--rule", "multi_round", "--draws", "3,1", "--temperature", "1"], True),
        (["--method", "bild", "--rollback", "3", "--fallback", "0.1"], False),
        (["--method", "speculative", "--lengths", "heuristic"], True),
    ):
        said = json.loads(run(*model, *more)[1])
        assert said.get("lossless", True) is lossless
        assert ("relaxed_tokens" in said) is not lossless


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"rule": "typical", "beta": 2},
            r"'beta' \(--beta\) of method speculative, rule typical, drafter model; it "
            "belongs to rule top_beta$",
        ),
        ({"rule": "lenience", "lenience": 2}, "lenience is 2"),
        (
            {"method": "speculative", "rule": "cascade", "drafter": "ngram"},
            "rule cascade mixes .* ngram has none; the rules",
        ),
        ({"rule": "cascade"}, "^rule cascade does not go with method auto, use it with method bild or speculative$"),
        ({"rule": "cascade", "method": "autoregressive"}, "this method drafts nothing; the rules that fit are"),
        ({"rule": "cascade", "method": "card"}, "rule cascade needs sequential drafting"),
        ({"rule": "multi_round", "draws": "0"}, "draws is 0"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    options: dict[str, Any], says: str, tiny_pair: tuple[Loaded, Loaded]
) -> None:
    with pytest.raises(UserError, match=says):
        LLM(*tiny_pair, **options)
