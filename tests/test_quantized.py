"""Weights in 8 bits by torchao: near to the float ones, through captures too, and plain refusals without it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from files import model_folder
from passes import random_parents, text

import outpace
from outpace.core.errors import UserError, install_command
from outpace.models import devices
from outpace.models.base import Part, chain
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.models.llama.torch.linear import packer
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model
from outpace.models.options import LoadOptions

needed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
KINDS = ["int8", "fp8"]


def made(kind: type[Llama], **options: Any) -> Llama:
    return kind.from_tensors(reference.TINY, reference.random_tensors(reference.TINY).__getitem__, **options)


def scored(model: Llama) -> torch.Tensor:
    session, parents = model.open(100, 100), random_parents(20, 1)
    model.score([chain(session, text(model, 30))])
    return model.score([Part(session, text(model, 20, 2), parents, range(20), range(30))]).float()


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantized", KINDS)
def test_scores_are_near_and_the_captured_ones_the_same(quantized: str, dtype: torch.dtype) -> None:
    rows = [
        scored(made(Llama, dtype=dtype, exact=False)),
        scored(made(Llama, dtype=dtype, quantized=quantized)),
        scored(made(GraphLlama, dtype=dtype, quantized=quantized)),
    ]
    assert 0 < (rows[1] - rows[0]).norm() < 0.4 * rows[0].norm(), "random weights make much of a little"
    assert (rows[2] - rows[1]).norm() < (1e-4 if dtype == torch.float32 else 0.05) * rows[1].norm()


@needed
@pytest.mark.parametrize("quantized", KINDS)
def test_each_weight_is_rounded_to_its_outputs_scale(quantized: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(48, 32, generator=generator), torch.randn(48, generator=generator)
    x, rest = torch.randn(5, 32, generator=generator), torch.randn(5, 48, generator=generator)
    linear = packer(quantized)(weight, bias)
    error = (linear(x) - (x @ weight.T + bias)).abs()
    most = weight.abs().amax(1, keepdim=True) / 254 if quantized == "int8" else weight.abs() / 16 + 1e-3
    assert (error <= 1.05 * x.abs() @ most.expand_as(weight).T).all()
    assert error.max() > 1e-4, "nothing was rounded"
    torch.testing.assert_close(linear(x, rest), linear(x) + rest)


@needed
def test_it_says_what_it_is_and_so_do_its_layers() -> None:
    model = made(GraphLlama, dtype=torch.bfloat16, quantized="int8")
    assert (model.precision, model.shallow([0]).precision) == ("int8", "int8")
    assert made(Llama, quantized="fp8").shallow([0]).precision == "fp8"
    assert 2 * model.weight_bytes == made(GraphLlama, dtype=torch.bfloat16).weight_bytes


@needed
@pytest.mark.parametrize("dtype", KINDS)
def test_texts_are_those_of_plain_decoding(tmp_path: Path, dtype: str) -> None:
    given = {"runtime": "llama", "graphs": "eager", "dtype": dtype, "profile": False}
    with outpace.load(model_folder(tmp_path), "layers:0", method="speculative", **given) as llm:
        assert llm.target.precision == dtype
        plain = llm.generate(["the cat sat on the"], plain=True, max_tokens=20)
        assert [answer.tokens for answer in llm.generate(["the cat sat on the"], max_tokens=20)] == [plain[0].tokens]


@pytest.mark.parametrize("options", [{"dtype": "fp8"}, {"dtype": "int8", "runtime": "llama"}], ids=str)
def test_without_torchao_it_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"needs `{install_command('torchao')}`")):
        load_model("nowhere", **options)


def test_which_runtime_holds_8_bits() -> None:
    assert LoadOptions(dtype="int8").quantized is None
    assert LoadOptions(dtype="int8", device="cuda").quantized == "int8"
    assert LoadOptions(dtype="int8", device="cuda").of_draft("cpu").quantized is None
    assert LoadOptions(dtype="fp8").quantized == "fp8"
    assert LoadOptions(dtype="fp8").torch_dtype == torch.float32
