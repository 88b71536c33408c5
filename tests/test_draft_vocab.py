"""A draft with a reduced output vocabulary: only its tokens are proposed, the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from files import CONFIG, model_folder
from safetensors.torch import save_file

import outpace
from outpace.models.base import chain
from outpace.models.llama.config.draft_vocab import FILE
from outpace.models.load import load_model

IDS = list(range(0, CONFIG["vocab_size"], 3))


def folder(where: Path, ids: torch.Tensor | None = None) -> Path:
    """A tiny model; with `ids`, one that has a reduced output vocabulary."""
    if ids is None:
        return model_folder(where)
    result = model_folder(where, outpace={"draft_vocab_size": len(ids)})
    save_file({"ids": ids}, result / FILE)
    return result


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_other_tokens_score_nothing(tmp_path: Path, dtype: str) -> None:
    whole = load_model(folder(tmp_path / "whole"), dtype=dtype).model
    reduced = load_model(folder(tmp_path / "reduced", torch.tensor(IDS, dtype=torch.int32)), dtype=dtype).model
    scores, all_scores = (m.score([chain(m.open(8, 8), [5, 7, 9], range(3))]) for m in (reduced, whole))
    assert scores.shape == all_scores.shape
    torch.testing.assert_close(scores[:, IDS], all_scores[:, IDS], rtol=0, atol=1e-5)
    others = [token for token in range(CONFIG["vocab_size"]) if token not in IDS]
    assert bool((scores[:, others] == float("-inf")).all())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["speculative", "card"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_text_is_the_targets(tmp_path: Path, dtype: str, method: str, temperature: float) -> None:
    target = str(folder(tmp_path / "whole"))
    draft = str(folder(tmp_path / "reduced", torch.tensor(IDS, dtype=torch.int32)))
    worker = "inline" if method == "card" else None
    with outpace.load(target, draft, method=method, worker=worker, dtype=dtype) as llm:
        fast = llm.stream("hello", max_tokens=24, temperature=temperature, seed=2).finish()
        plain = llm.stream("hello", max_tokens=24, temperature=temperature, seed=2, plain=True).finish()
    assert fast.tokens == plain.tokens
    assert fast.figures.drafted > 0


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([3, 1], dtype=torch.int32), "must rise"),
        (torch.tensor([1, 1 << 20], dtype=torch.int32), "must rise"),
        (torch.tensor([1, 2], dtype=torch.int64), "config.json speaks of 2 ids of int32"),
        (torch.tensor([[1, 2]], dtype=torch.int32), "config.json speaks of 1 ids"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, ids: torch.Tensor, says: str) -> None:
    with pytest.raises(outpace.UserError, match=says):
        load_model(folder(tmp_path, ids))


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    where = folder(tmp_path, torch.tensor(IDS, dtype=torch.int32))
    (where / FILE).write_bytes(b"torn")
    with pytest.raises(outpace.UserError, match="does not hold it"):
        load_model(where)
    (where / FILE).unlink()
    with pytest.raises(outpace.UserError, match=FILE):
        load_model(where)
    assert json.loads((where / "config.json").read_text())["outpace"]["draft_vocab_size"] == len(IDS)
