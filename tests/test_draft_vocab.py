"""A draft with a reduced output vocabulary: only its tokens are proposed, the text stays the target's."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recurrent
import reference
import torch
from commands import run_command
from files import CONFIG, model_folder
from heads import write_head
from passes import build, open_smollm2
from safetensors.torch import save_file
from turns import in_turn

import outpace
from outpace.models.base import chain
from outpace.models.llama import kept_tokens
from outpace.models.llama.config import draft_vocab
from outpace.models.llama.config.draft_vocab import FILE
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.llama.kept_tokens import MAX_ADDED, KeptTokens
from outpace.models.llama.native.weights import PANEL
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_draft, load_model
from outpace.models.options import LoadOptions

LAYERS = "layers:0-9"  # of the shipped target
WIDE = replace(reference.TINY, vocab_size=6000)
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


def test_kept_tokens_are_the_first_and_those_read_last() -> None:
    kept = KeptTokens(100, 10_000, PANEL)
    assert kept.first == 128
    assert kept.kept.ids.tolist() == list(range(128))
    kept.read([5, 9_999, 300])
    assert kept.kept.panels.tolist() == [0, 1, 2, 3, 9, 312]
    assert kept.kept.ids.tolist() == [*range(128), *range(288, 320), *range(9_984, 10_000)], "the last panel is cut"
    many = range(128, 10_000, PANEL)
    kept.read([*many])
    kept.read([300])
    assert 300 in kept.kept.ids
    assert len(kept.kept.panels) == 128 // PANEL + MAX_ADDED // PANEL
    kept.read([129])
    assert {129, 300} <= {*kept.kept.ids.tolist()}
    assert many[-MAX_ADDED // PANEL + 1] not in kept.kept.ids, "the one that was read before all others went"


@pytest.mark.parametrize("needs_hidden", [False, True])
def test_a_reduced_layer_scores_kept_tokens_as_the_whole_one(needs_hidden: bool) -> None:
    """The prompt's tokens are kept; what the model reads later is scored from then on. All rows have the same bits."""
    whole, reduced = open_smollm2(), open_smollm2()
    reduced.reduce_output(1024)
    prompt = [17, 40_000, 12, 49_151]
    sessions = [model.open(16, 8) for model in (whole, reduced)]
    for tokens in (prompt, [33_000, 3]):
        parts = [
            chain(session, tokens, [len(tokens) - 1])._replace(best=3, hidden_rows=[0] if needs_hidden else [])
            for session in sessions
        ]
        if needs_hidden:
            (full, states), (got, own) = (
                model.score_sparse_hidden([part], [1]) for model, part in zip((whole, reduced), parts, strict=True)
            )
            assert (states == own).all()
        else:
            full, got = (model.score_sparse([part]) for model, part in zip((whole, reduced), parts, strict=True))
        assert got.ids is not None
        assert {*range(1024), *prompt, *tokens} <= {*got.ids.tolist()}
        assert len(got.ids) <= 1024 + 32 * (len(prompt) + len(tokens))
        assert (got.values == full.values[:, got.ids]).all()
        dense = got.to_dense()
        assert dense.shape == full.to_dense().shape
        if not needs_hidden:
            assert got.best[0][0] == np.argsort(-dense[0], kind="stable")[:3].tolist()
        for session in sessions:
            session.keep(range(len(tokens)))


@cache
def torch_kinds() -> dict[str, Callable[[], Any]]:
    """Builders of torch's models with 6,000 tokens: on the CPU, captured, and by the fused kernels."""
    captured = {"captured": GraphLlama, "captured, exact": ExactGraphLlama}
    kinds = {
        "exact": partial(build, Llama, WIDE, exact=True),
        "untied": partial(build, Llama, replace(WIDE, tie_embeddings=False)),
        "bfloat16": partial(build, Llama, WIDE, exact=False, dtype=torch.bfloat16),
        **{name: partial(build, kind, WIDE, exact="exact" in name) for name, kind in captured.items()},
        "captured, float16": partial(build, GraphLlama, WIDE, exact=False, dtype=torch.float16),
    }
    if importlib.util.find_spec("triton"):
        from outpace.models.llama.cuda.fused_runtime import FusedLlama

        kinds["fused"] = partial(build, FusedLlama, WIDE, exact=False, is_eager=True)
    return kinds


def recurrent_model(folder: Path, **options: Any) -> Any:
    if not folder.exists():
        recurrent.make("grouped", folder, vocab_size=WIDE.vocab_size)
        recurrent.add_mtp(folder)  # and a tokenizer
    return load_model(folder, dtype="float32", **options).model


@pytest.mark.parametrize("kind", [*torch_kinds(), "recurrent"])
def test_torchs_layer_of_few_rows_scores_kept_tokens_as_the_whole_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are replaced in place, so captured passes stay; of eight added tokens those that were read last stay."""
    monkeypatch.setattr(kept_tokens, "MAX_ADDED", 8)
    make = torch_kinds().get(kind) or partial(recurrent_model, tmp_path / "model")
    whole, reduced = make(), make()
    models, first = (whole, reduced), reduced.score([chain(reduced.open(4, 4), [5, 6], [1])])  # captured before
    assert first.isfinite().all()
    reduced.reduce_output(1024)
    sessions = [model.open(64, 8) for model in models]
    read, captures = list[int](), []
    for tokens in ([17, 5000, 12, 5999], [4321, 3, 5000, 2], [1500, 1600, 1700, 1800], [1900, 2000, 2100, 2200]):
        parts = [chain(session, tokens, range(4)) for session in sessions]
        (full, hidden), (got, own) = (
            model.score_hidden([part._replace(hidden_rows=[0])], [1])[:2]
            for model, part in zip(models, parts, strict=True)
        )
        assert torch.equal(hidden, own), "the layers below are the same"
        read = [token for token in read if token not in tokens] + [token for token in tokens if token >= 1024]
        read = read[-8:]
        kept = [*range(1024), *sorted(read)]
        torch.testing.assert_close(got[:, kept], full[:, kept], rtol=2e-3, atol=2e-3)
        others = np.setdiff1d(np.arange(WIDE.vocab_size), kept)
        assert bool((got[:, others] == -torch.inf).all())
        for session in sessions:
            session.keep(range(4))
        captures.append(reduced.num_captures)
    assert {5999, 5000} & {*read} == set(), "they were dropped"
    assert len({*captures}) == 1, "no pass was captured again"
    own, full = (model.project(hidden[0]).values for model in reversed(models))
    assert torch.equal(own, full), "other uses have the whole layer"
    assert reduced.reduced_output == (1024, 8, WIDE.vocab_size, reduced.reduced_output.share)
    assert reduced.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("how", ["speculative", "card", "planned", "auto"])
def test_texts_with_a_reduced_layer_are_the_targets(how: str, temperature: float) -> None:
    worker = "inline" if how in ("card", "planned") else None
    with outpace.load(None, LAYERS, method=how, worker=worker, draft_vocab=2048) as llm:
        assert llm.draft is not None
        assert llm.draft.model.kept_tokens.first == 2048
        params = {"max_tokens": 32, "temperature": temperature, "seed": 2}
        fast = llm.stream("A café in Zürich", **params).finish()
        plain = llm.stream("A café in Zürich", **params, plain=True).finish()
    assert fast.tokens == plain.tokens
    assert fast.figures.drafted > 0


RUNTIMES: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"dtype": "float32"},
    "captured": {"graphs": "eager"},
}
WAYS: list[dict[str, Any]] = [
    {"method": "card", "worker": "thread"},
    {"method": "speculative"},
    {"method": "card", "worker": "inline"},
    {"method": "planned", "worker": "thread"},
    {"method": "card", "worker": "process"},
    {"method": "speculative", "width": 1},
]


@pytest.mark.parametrize(("runtime", "way", "temperature"), in_turn(RUNTIMES, WAYS, [0.0, 0.9]), ids=str)
def test_texts_of_every_runtime_and_worker_are_the_targets(
    runtime: str, way: dict[str, Any], temperature: float, tmp_path: Path
) -> None:
    """The target writes tokens of the whole vocabulary; the draft scores most of them only once they were written."""
    target, params = model_folder(tmp_path / "wide", vocab_size=6000), {"max_tokens": 48, "seed": 3}
    params["temperature"] = temperature
    with outpace.load(target, "layers:0", draft_vocab=1024, profile=False, **RUNTIMES[runtime], **way) as llm:
        assert llm.draft is not None
        plain = llm.stream("hello world", **params, plain=True).finish()
        deadline = time.monotonic() + 120.0
        has_drafted = False
        while not has_drafted:  # a worker begins when it is ready, and reads what was written when it drafts
            assert time.monotonic() < deadline
            fast, kept = llm.stream("hello world", **params).finish(), llm.draft.model.reduced_output
            assert fast.tokens == plain.tokens
            is_elsewhere = way.get("worker") == "process"  # with its own model
            has_drafted = fast.figures.drafted > 0 and (kept.added > 0 or is_elsewhere)
    assert max(plain.tokens) > 1024
    assert kept.first == 1024


def test_a_wrong_number_of_tokens_is_refused(tmp_path: Path) -> None:
    for value in (0, 1023, "many", -5, 1.5):
        with pytest.raises(outpace.UserError, match=f"draft_vocab is '{value}', it must be auto, all, or a number"):
            LoadOptions(draft_vocab=value)  # type: ignore[arg-type]
    with pytest.raises(outpace.UserError, match="draft_vocab is 50000, it must be between 1024 and 49152"):
        outpace.load(None, LAYERS, draft_vocab=50_000)
    other = folder(tmp_path / "whole")
    with pytest.raises(
        outpace.UserError, match="draft_vocab 2048 is for draft models by the runtimes native and llama"
    ):
        load_model(other, is_draft=True, runtime="transformers", draft_vocab=2048)
    for more in ({}, {"draft": "none"}, {"method": "autoregressive"}):
        with pytest.raises(outpace.UserError, match=r"draft_vocab 2048 reduces .* a draft model, and there is none"):
            outpace.load(other, draft_vocab=2048, **more)
    with pytest.raises(outpace.UserError, match="draft_vocab is 2048, it must be between 1024 and 272"):
        load_model(other, is_draft=True, dtype="float32", draft_vocab=2048)
    own = folder(tmp_path, torch.tensor(IDS, dtype=torch.int32))
    for dtype in ("auto", "float32"):
        with pytest.raises(outpace.UserError, match=f"draft_vocab is 2048, but .* to {len(IDS)}"):
            load_model(own, is_draft=True, dtype=dtype, draft_vocab=2048)
    with pytest.raises(outpace.UserError, match=r"draft_vocab 2048 is for draft models, the head .* has its own"):
        load_draft(write_head(tmp_path / "head"), load_model(other), draft_vocab=2048)


def test_the_layer_is_reduced_where_it_is_a_large_part_of_a_pass() -> None:
    model = open_smollm2()
    model.reduce_output(None)
    assert model.kept_tokens is None, "SmolLM2 has 49,152 tokens"


def test_explain_says_how_many_tokens_the_draft_scored() -> None:
    words = ("generate", "Hi", "--draft", LAYERS, "--draft-vocab", "2048", "--max-tokens", "4", "--explain")
    code, _, err = run_command(*words)
    assert code == 0
    assert re.search(
        r"the draft scored the first 2,048 of 49,152 tokens and \d+ others: \d+% of the bytes of a step", err
    )


def test_doctor_says_what_a_draft_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_command("doctor", "--draft", LAYERS)
    assert whole[0] == 0
    assert "output layer  whole" in whole[1]
    monkeypatch.setattr(draft_vocab, "USUAL_TOKENS", 4096)
    code, out, _ = run_command("doctor", "--draft", LAYERS, "--json")
    assert code == 0
    kept = json.loads(out)["output"]
    assert (kept["first"], kept["vocab"]) == (4096, 49_152)
    assert f"{kept['share']:.0%} of the bytes of a step" in kept["text"]
