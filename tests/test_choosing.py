"""Several draft models: the written text decides which of them drafts and never changes; invalid combinations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import QuickToy, decode, make_request, write
from test_library import folder
from test_tuning import FEW

from outpace.api import profile as profiles
from outpace.api.llm import LLM
from outpace.bench.tune import tune
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation
from outpace.drafters._composite import DraftSelector, SharedTree, expected_speed
from outpace.drafters.model import ModelDrafter, Options
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine.build import BuildOptions, build_engine
from outpace.engine.engine import EngineOptions
from outpace.models.load import Loaded, load_draft, load_model, silent

TARGET = QuickToy(16, 3, 0)
GARBAGE = QuickToy(16, 2, 99)
PROMPT = (3, 1, 4, 1, 5)
SMALL = EngineOptions(nodes=8, rows=64)


class Counting(QuickToy):
    """Counts its forwards."""

    passes = 0

    def score(self, forest: Any) -> Any:
        self.passes += 1
        return super().score(forest)


def choosing(*models: Any, costs: tuple[float | None, ...] = ()) -> DraftSelector:
    return DraftSelector([ModelDrafter(one, Options(width=2)) for one in models], costs or [0.1] * len(models))


def run(asked: Any, drafter: Any, target: Any = TARGET) -> Any:
    """Answer one request, check the text, and return the outcome."""
    found = decode([asked], "speculative", drafter, target=target, engine=SMALL)
    assert found.texts == [write(target, asked)]
    return found


def slots_of(state: Any) -> dict[int, int]:
    return {node_id: state.slots[node_id] for node_id in state.slots.ids()}


def test_a_likelihood_is_the_models_own_and_changes_nothing() -> None:
    drafter = ModelDrafter(TARGET, Options(width=2))
    request = make_request(PROMPT, max_tokens=40)
    state, tree = drafter.open(request), TokenTree(5)
    tokens, text = [7, 2, 9, 9], list(PROMPT)
    expected = [
        float(torch.log_softmax(TARGET._row([*text, *tokens[:n]]).double(), -1)[t]) for n, t in enumerate(tokens)
    ]
    assert drafter.likelihood(state, tokens) == pytest.approx(expected)
    for _ in range(3):
        drafter.grow([state], [tree])
    known = list(tree.tokens), slots_of(state), state.session.pending, state.session.length
    assert drafter.likelihood(state, tokens) == pytest.approx(expected)
    assert known == (tree.tokens, slots_of(state), state.session.pending, state.session.length)
    drafter.grow([state], [tree])
    again, other = drafter.open(request), TokenTree(5)
    for _ in range(4):
        drafter.grow([again], [other])
    assert (tree.tokens, tree.scores) == (other.tokens, other.scores)


def test_likelihoods_beyond_the_vocabulary_and_the_context() -> None:
    drafter = ModelDrafter(QuickToy(8, 2, 0), Options())
    assert drafter.likelihood(drafter.open(make_request((1, 2))), [3, 12])[1] == -math.inf  # type: ignore[index]
    assert drafter.likelihood(drafter.open(make_request((1, 2), max_tokens=3)), [1] * 9) is None


@pytest.mark.parametrize("models", [(GARBAGE, TARGET), (TARGET, GARBAGE)])
def test_the_better_draft_drafts(models: tuple[Any, Any]) -> None:
    asked = make_request(PROMPT, max_tokens=60)
    found, alone = run(asked, choosing(*models)), run(asked, ModelDrafter(TARGET, Options(width=2)))
    assert len(found.steps[0]) <= len(alone.steps[0]) + 6


def test_a_change_of_the_better_draft_is_noticed_within_a_few_rounds() -> None:
    """The first draft predicts the earlier answers, the second one this answer."""
    drafter = choosing(TARGET, GARBAGE)
    for number in range(4):
        run(make_request((number, 2), max_tokens=40), drafter)
    found = run(make_request(PROMPT, max_tokens=60), drafter, GARBAGE)
    accepted = [step.accepted for step in found.steps[0]]
    assert sum(accepted[:2]) <= 2
    assert sum(accepted[8:]) / len(accepted[8:]) > 2


def test_of_two_equal_drafts_the_cheaper_one_drafts() -> None:
    drafter = choosing(TARGET, QuickToy(16, 3, 0), costs=(0.5, 0.05))
    state = drafter.open(make_request(PROMPT))
    assert state.chosen == 1
    assert [expected_speed(0.7, 0.05) > expected_speed(0.8, 0.4), expected_speed(0.0, 0.3)] == [True, 1.0]


def test_idle_drafts_read_seldom() -> None:
    idle = Counting(16, 2, 99)
    found = run(make_request(PROMPT, max_tokens=400), choosing(TARGET, idle))
    assert idle.passes <= 6 + len(found.steps[0]) / 16 + 3


@pytest.mark.parametrize("method", ["speculative", "auto", "card"])
@pytest.mark.parametrize("rule", ["greedy", "gumbel", "match"])
def test_the_text_is_plain_decodings(method: str, rule: str) -> None:
    sampling = {} if rule == "greedy" else {"temperature": 0.9}
    asked = [make_request(PROMPT[:length], rule, 40, seed=length, **sampling) for length in (1, 3, 5)]
    near = QuickToy(16, 3, 0)
    near._tables = 0.7 * TARGET._tables + 0.3 * QuickToy(16, 3, 1)._tables
    drafter = SharedTree([NgramDrafter(NgramOptions()), choosing(GARBAGE, near, TARGET)])
    worker = "inline" if method == "card" else None
    found = decode(asked, method, drafter, worker=worker, target=TARGET, engine=SMALL)
    assert found.failure is None
    assert found.texts == [write(TARGET, request) for request in asked]


def test_the_state_is_saved() -> None:
    drafter, again = choosing(GARBAGE, TARGET), choosing(GARBAGE, TARGET)
    run(make_request(PROMPT), drafter)
    again.load_state_dict(drafter.state_dict())
    assert again.open(make_request(PROMPT)).chosen == 1
    assert choosing(GARBAGE, TARGET).open(make_request(PROMPT)).chosen == 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("choosing"), "target"), runtime="llama")


def test_the_library_takes_a_list_of_drafts(target: Loaded, tmp_path: Path) -> None:
    first, second = load_draft("layers:0", target), load_model(folder(tmp_path, "draft"), runtime="llama")
    with LLM(target, [first, second], method="speculative", profile=False) as llm:
        assert llm.draft is not None
        assert [one.name for one in llm.draft.others] == [second.name]
        texts = [llm.generate("hello", max_tokens=20, plain=plain)[0].tokens for plain in (False, True)]
        assert texts[0] == texts[1]
    with LLM(target, [first], method="speculative") as llm:
        assert llm.draft is first
    with LLM(target, [], method="speculative") as llm:
        assert llm.draft is None


@pytest.mark.parametrize(
    ("drafts", "options", "said"),
    [
        (["layers:0", "none"], {}, "one of them is none"),
        (["layers:0", "layers:0"], {}, "layers:0 is named twice"),
        (["layers:0", "layers:0,1"], {"drafter": "translated"}, "drafter translated takes one draft model"),
    ],
)
def test_invalid_combinations_of_drafts_are_refused(
    target: Loaded, drafts: list[str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        LLM(target, drafts, **options)


def test_a_process_drafts_with_one_model(target: Loaded) -> None:
    draft = replace(load_draft("layers:0", target), others=(target,))
    with pytest.raises(UserError, match="worker process drafts with one draft model"):
        build_engine(target, draft, BuildOptions("card", "model", worker="process"))


def test_tuning_ranks_the_drafts(target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "entry_path", lambda name, cache: tmp_path / name)
    monkeypatch.setattr(profiles, "FEWEST", 1)
    draft = replace(load_draft("layers:0", target), others=(load_draft("layers:0,1", target),))
    found = tune(target, draft, FEW, silent)
    assert set(found.drafts) == {"layers:0", "layers:0,1"}
    assert list(found.drafts.values()) == sorted(found.drafts.values(), reverse=True)
    assert set(found.rates) == {"auto", "planned", "autoregressive"}
    assert len(list((tmp_path / "profiles").iterdir())) == 3


def test_no_draft_reads_more_than_the_others_can_wait_for() -> None:
    """Those that are only compared neither: they read a part in each comparison."""
    sizes: list[int] = []

    class Noting(QuickToy):
        def score(self, forest: Any) -> Any:
            sizes.append(sum(len(part.tokens) for part in forest))
            return super().score(forest)

    drafter = choosing(Noting(16, 3, 0), Noting(16, 2, 99))
    request = make_request([place * place % 13 for place in range(200)], max_tokens=200)
    state, text = drafter.open(request), write(TARGET, request)
    state.max_read = 40
    for place, token in enumerate(text[:5]):
        tree = TokenTree(([request.prompt[-1], *text])[place], place, place + 1)
        drafter.grow([state], [tree])
        drafter.observe(state, Observation([tree.ids[0]], [token], TokenTree(token, place + 50, place + 60)))
    assert max(sizes) <= 40 + 5
    assert sum(sizes) > 200, "in the end both have read it"
