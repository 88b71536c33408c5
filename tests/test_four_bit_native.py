"""GPTQ and AWQ on their own weights (dtype file): panels hold the folder's values, products are the emulation's, and
every method writes one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import outpace_kernels as kernels
import pytest
import torch
from outpace_kernels import emulation
from passes import fresh, text, tree_scores
from test_four_bits import CUT, folders
from test_runtimes import PROMPT

import outpace
from outpace.models.files.find import open_source
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.load import load_model

ROUNDED = "rounded to int8, for the kernels do not take them so: "


def model_of(folder: Path, **options: Any) -> NativeLlama:
    with open_source(folder) as source:
        return NativeLlama.from_tensors(
            from_dict(source.config), source.weight, options=NativeOptions(weights="file", **options)
        )


@pytest.mark.parametrize(("way", "group", "changes"), [("gptq", 128, CUT), ("awq", 32, {})], ids=str)
def test_a_model_equals_its_emulation(
    tmp_path: Path, way: str, group: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = folders(tmp_path, way, group, **changes)
    expected = tree_scores(model_of(folder))[0]
    for name in kernels.instruction_sets():
        assert torch.equal(tree_scores(model_of(folder, instruction_set=name, threads=1))[0], expected)
    assert not torch.equal(tree_scores(model_of(plain))[0], expected)  # in int8
    monkeypatch.setattr(native, "kernels", emulation)
    assert torch.equal(tree_scores(model_of(folder))[0], expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("way", "method"), [("gptq", "auto"), ("awq", "speculative"), ("gptq_v2", "card")])
def test_texts_are_those_of_plain_decoding(tmp_path: Path, way: str, method: str, temperature: float) -> None:
    folder, _ = folders(tmp_path, way, 64)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 3}
    with outpace.load(folder, dtype="file", method="autoregressive", profile=False) as llm:
        assert (llm.target.precision, llm.target.notice) == ("file", f"{ROUNDED}F32")  # the embedding
        plain = llm.generate([PROMPT], **asked)[0].tokens
    worker = {"worker": "inline"} if method == "card" else {}
    drafts: dict[str, Any] = {"draft_dtype": "int8", "drafter": "model", **worker}
    with outpace.load(folder, folder, dtype="file", method=method, profile=False, **drafts) as llm:
        assert llm.generate([PROMPT], **asked)[0].tokens == plain


def test_a_folders_own_weights_are_the_default(tmp_path: Path) -> None:
    folder, plain = folders(tmp_path, "gptq", 64)
    found, asked = load_model(folder), load_model(folder, dtype="file")
    assert (found.precision, found.notice) == ("file", None)  # that the embedding comes in float is nothing to tell
    assert torch.equal(fresh(found.model, text(found.model, 9)), fresh(asked.model, text(asked.model, 9)))
    assert load_model(plain).precision == "int8"


@pytest.mark.parametrize(
    ("changes", "precision", "slow"),
    [
        ({"act_order": True}, "int8", "F32, GPTQ in act-order"),
        ({"hidden_size": 320}, "file", "F32, U4_64"),  # heads of 80 inputs cut blocks of 64
        ({"intermediate_size": 296}, "file", "F32, GPTQ with 296 inputs"),
    ],
)
def test_what_does_not_fit_is_rounded_with_a_notice(
    tmp_path: Path, changes: dict[str, Any], precision: str, slow: str
) -> None:
    folder, plain = folders(tmp_path, "gptq", 64, **changes)
    found = load_model(folder, dtype="file")
    assert (found.precision, found.notice) == (precision, ROUNDED + slow)
    one, other = (load_model(place, dtype="int8").model for place in (folder, plain))
    assert torch.equal(fresh(one, text(one, 9)), fresh(other, text(one, 9)))
