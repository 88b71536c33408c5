"""Rejection with real keys: counted texts follow p, and what it does not go with is refused.

`test_every_rule.py` has the exact enumeration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from doubles import chi_square, decode, make_request
from enumerating import PROMPT, TARGETS, draft_of, exact_chances
from files import smollm2_file
from test_library import folder
from toy import Toy

import outpace
from outpace.api.llm import LLM
from outpace.core.distribution import TokenDistribution
from outpace.core.sampling import Sampling, log_probs
from outpace.core.stats import summarize
from outpace.core.tree import DrawnChildren, Siblings, TokenTree
from outpace.core.types import Request, Row
from outpace.decoders.speculative import Speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, chain
from outpace.models.load import load_draft, load_model
from outpace.rules.rejection import Rejection

WIDE = EngineOptions(nodes=8, rows=1 << 14, chunk=1 << 12, batch=512)
GROUP = 100  # requests in one engine


@pytest.mark.parametrize("count", [100, pytest.param(1200, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "gamma"), [("partial", 2), ("garbage", 1), ("ngram", 3), ("plain", 1)])
def test_texts_over_many_seeds_by_chi_square(name: str, gamma: int, count: int) -> None:
    """The real keys: texts of three tokens over seeds, and over choices."""
    target = TARGETS[3]
    exact = exact_chances("bare", 3)
    drafter: Any = NgramDrafter(NgramOptions(branches=1, copies=3))
    if name in ("partial", "garbage"):
        drafter = ModelDrafter(draft_of(name, target), Options(width=1, floor=0.0))
    rule = Rejection()
    for part in ("seed", "choice"):
        requests = [make_request(PROMPT, rule, 3, temperature=1.0, **{part: number}) for number in range(count)]
        method, options = ("autoregressive", {}) if name == "plain" else ("speculative", {"draft_length": gamma})
        seen, accepted = Counter[tuple[int, ...]](), 0
        for start in range(0, count, GROUP):
            some = requests[start : start + GROUP]
            run = decode(some, method, drafter, target=target, engine=WIDE, check_storage=False, **options)
            seen.update(map(tuple, run.texts))
            accepted += run.figures.accepted
        assert abs(chi_square(seen, exact)) < 4.0
        assert name == "plain" or accepted > count / 12


def test_drawn_children_that_it_is_not_exact_for_are_refused() -> None:
    request = make_request(PROMPT, Rejection(), 3, temperature=1.0)
    picks = Rejection().reduce(torch.zeros(1, 3, dtype=torch.float64), [Row(request, PROMPT)])
    for kind, count in ((Siblings.DRAWN, 2), (Siblings.WITHOUT_REPLACEMENT, 1)):
        tree = TokenTree(0)
        tree.draw(0, DrawnChildren(TokenDistribution(np.ones(3)), tuple(range(count))), kind)
        with pytest.raises(ValueError, match="rejection is not exact for"):
            Rejection().walk(tree, picks)


@pytest.mark.parametrize(
    ("options", "asked", "says"),
    [
        ({"method": "card"}, {}, "; the rules that fit are greedy, gumbel and match$"),
        ({"method": "card", "rule": "typical"}, {}, "rule typical writes a text that depends on what was drafted, use"),
        ({"method": "card"}, {}, "rule rejection needs sequential drafting, use it with method speculative"),
        ({"drafter": "model+ngram"}, {}, "rule rejection takes one drafter, not 'model.ngram'"),
        ({}, {}, "rule rejection does not work with temperature 0, use rule greedy"),
    ],
)
def test_what_rejection_does_not_go_with_is_said(
    options: dict, asked: dict, says: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = folder(tmp_path_factory.mktemp("refused"), "target")
    with (
        pytest.raises(outpace.UserError, match=says),
        outpace.load(path, "layers:0", **{"rule": "rejection", "method": "speculative", **options}) as llm,
    ):
        llm.stream("hello", **asked)


def test_through_the_library_answers_come_again_and_options_hold(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = load_model(folder(tmp_path_factory.mktemp("library"), "target"))
    draft = load_draft("layers:0", target)
    asked = {"max_tokens": 30, "temperature": 1.2, "top_k": 8, "logprobs": 2, "min_tokens": 30, "seed": 4}
    for drafter in ("model", "ngram", None):
        with closing(LLM(target, draft, rule="rejection", drafter=drafter)) as llm:
            assert llm.method == "speculative"  # a plan follows the clock, and the text would follow the plan
            first, again = (llm.stream("hello hello hello", bad_words=["b"], **asked).finish() for _ in range(2))
        assert (first.tokens, first.logprobs) == (again.tokens, again.logprobs)
        assert len(first.tokens) == len(first.logprobs) == 30
        assert first.figures.drafted > 0
        assert not set(first.tokens) & target.tokenizer.stop_ids


class Memoized(Toy):
    """Another model's logits, computed once for each text; in exact mode a row is the same wherever it is computed."""

    def __init__(self, model: Model) -> None:
        super().__init__(vocab_size=1)
        self.vocab_size, self._model = model.vocab_size, model
        self.num_layers = 1 << 30  # rows depend on the whole text
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def _score_hidden(self, forest: Sequence[Any], layers: Sequence[int]) -> Any:
        output = super()._score_hidden(forest, layers)
        return output._replace(logits=output.logits.view(-1, self.vocab_size))

    def _row(self, context: Sequence[int]) -> torch.Tensor:
        text = tuple(int(token) for token in context)
        if text not in self._rows:
            session = self._model.open(len(text), len(text))
            self._rows[text] = self._model.score([chain(session, text, [len(text) - 1])])[0]
        return self._rows[text]


def next_tokens(model: Model, text: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
    """Return p of every token that may follow a text, by a plain forward."""
    logits = model.score([chain(model.open(len(text), len(text)), text, [len(text) - 1])])
    p = log_probs(logits.double(), [sampling])[0].exp()
    return {token: p[token].item() for token in torch.nonzero(p).flatten().tolist()}


@pytest.mark.long
@pytest.mark.smollm2
def test_pairs_on_smollm2_by_chi_square() -> None:
    """Two-token texts over many seeds with a real, bad draft model, most of whose tokens are rejected."""
    smollm2_file()
    prompt, sampling, count = (504, 3947, 281, 260, 4081, 314), Sampling(1.0, top_k=4), 2000
    loaded = load_model(None)
    layers = ",".join(map(str, [*range(10), *range(20, 30)]))
    target, draft = Memoized(loaded.model), Memoized(load_draft(f"layers:{layers}", loaded).model)
    expected = {
        (token, other): p * p_other
        for token, p in next_tokens(target, prompt, sampling).items()
        for other, p_other in next_tokens(target, (*prompt, token), sampling).items()
    }
    drafter = ModelDrafter(draft, Options(width=1, tree_nodes=4, floor=0.0, draws="1"))
    rule, options = Rejection(), Speculative.Options(draft_length=1)
    with closing(Engine(target, drafter, options=EngineOptions(nodes=2, rows=128, chunk=16, batch=64))) as engine:
        requests = [Request(prompt, rule, 2, sampling, seed) for seed in range(count)]
        runs = [engine.submit(request, Speculative, options) for request in requests]
        while engine.waiting or engine.running:
            engine.step()
    assert not [run.error for run in runs if run.error]
    seen = Counter(tuple(run.tokens) for run in runs)
    figures = summarize(step for run in runs for step in run.history.steps)
    assert len([p for p in expected.values() if p > 0]) >= 9
    assert min(count * p for p in expected.values() if p > 0) > 2
    assert abs(chi_square(seen, expected)) < 4.0
    assert 0 < figures.accepted < figures.drafted
