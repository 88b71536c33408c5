"""Drafter parallel: one forward drafts all layers of a tree, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from doubles import QuickToy, decode, make_request, write
from files import model_folder
from torch import Tensor

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.drafters.parallel import Options, ParallelDrafter
from outpace.models.base import Part
from outpace.models.load import load_draft, load_model

BLOCK = 4
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


class Foresight(QuickToy):
    """Predicts for each mask the token that it would write after its own best tokens in place of the earlier masks."""

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.forwards = 0

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> object:
        self.forwards += 1
        return super()._score_hidden(forest, layers)

    def _row(self, context: Sequence[int]) -> Tensor:
        known = [token for token in context if token != self.mask_token]
        for _ in range(len(context) - len(known)):
            known.append(int(super()._row(known).argmax()))
        return super()._row(known)


def test_one_forward_drafts_a_whole_chain() -> None:
    target, draft = QuickToy(16, 3, 0), Foresight()
    request = make_request((3, 1, 4, 1, 5, 9, 2, 6), "greedy", 40)
    drafter = ParallelDrafter(draft, draft.mask_token, Options(block=BLOCK, width=1))
    run = decode([request], "speculative", drafter, target=target, draft_length=BLOCK)
    assert run.texts == [write(target, request)]
    rounds = 40 // (BLOCK + 1)
    assert run.figures.emitted == 40
    assert run.figures.accepted == rounds * BLOCK
    assert draft.forwards == rounds


@pytest.mark.parametrize("width", [1, 3])
def test_layers_are_products_of_their_rows(width: int) -> None:
    """Each layer has children of the best nodes above it, ranked by the logits of its depth."""
    target, draft = QuickToy(16, 3, 0), Foresight()
    request = make_request((3, 1, 4, 1, 5, 9, 2, 6), "greedy", 12)
    drafter = ParallelDrafter(draft, draft.mask_token, Options(block=BLOCK, width=width))
    run = decode([request], "speculative", drafter, target=target, draft_length=2)
    assert run.texts == [write(target, request)]
    assert len(run.figures.positions) == BLOCK  # all layers come with the first step


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("method", ["speculative", "auto", "card"])
def test_a_model_with_a_mask_token_drafts_in_parallel(dtype: str, method: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "model", pard_token=271)
    target = load_model(folder, dtype=dtype)
    draft = load_draft(model_folder(tmp_path, "draft", seed=1, pard_token=271), target, dtype=dtype)
    assert (draft.drafter, draft.model.mask_token) == ("parallel", 271)
    worker = {"worker": "inline"} if method == "card" else {}
    with LLM(target, draft, method=method, profile=False, **worker) as llm:
        assert llm.build_options.drafter == ("parallel+prediction+ngram" if method == "auto" else "parallel")
        for temperature in (0.0, 0.8):
            asked = {"max_tokens": 24, "temperature": temperature, "ignore_eos": True}
            prompts = ["hello world", "one two three"]
            plain = [one.tokens for one in llm.generate(prompts, plain=True, **asked)]
            assert [one.tokens for one in llm.generate(prompts, **asked)] == plain


def test_wrong_mask_tokens_are_refused(tmp_path: Path) -> None:
    target = load_model(model_folder(tmp_path, "target"))
    with pytest.raises(UserError, match=r"config.json: pard_token is 272, it must be a token below 272"):
        load_draft(model_folder(tmp_path, "beyond", pard_token=272), target)
    with pytest.raises(UserError, match="drafter parallel needs a draft model trained to draft in parallel"):
        LLM(target, load_draft(tmp_path / "target", target), drafter="parallel", profile=False)
