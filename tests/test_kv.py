"""Keys and values in fewer bits: what is held, what it takes, and the same text by every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import model_folder
from passes import text
from test_runtimes import PROMPT
from turns import in_turn

import outpace
from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.base import chain
from outpace.models.llama.config.llama_config import ENTRY_BYTES, LlamaConfig
from outpace.models.llama.torch.session import KVFormat
from outpace.models.load import load_model
from outpace.models.options import LoadOptions

HELD = list(ENTRY_BYTES)
RUNTIMES = ["native", "llama", "graphs"]
LOADED: dict[str, dict[str, Any]] = {
    "native": {"runtime": "native", "dtype": "int8"},
    "llama": {"runtime": "llama", "dtype": "float32"},
    "graphs": {"runtime": "llama", "dtype": "float32", "graphs": "eager"},
}
METHODS: list[dict[str, Any]] = [
    {"method": "auto"},
    {"method": "card", "drafter": "model", "worker": "inline"},
    {"method": "speculative", "drafter": "model"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


def open_pair(folder: Path, runtime: str, kv_dtype: str, **options: Any) -> LLM:
    return outpace.load(folder, folder, kv_dtype=kv_dtype, profile=False, **LOADED[runtime], **options)


@pytest.mark.parametrize(("runtime", "kv_dtype", "temperature"), in_turn(["native", "llama"], HELD, [0.0, 1.0]))
def test_texts_are_those_of_plain_decoding(folder: Path, runtime: str, kv_dtype: str, temperature: float) -> None:
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "seed": 3}
    with open_pair(folder, runtime, kv_dtype, method="autoregressive") as llm:
        plain = [result.tokens for result in llm.generate([PROMPT, "hello"], **asked)]
    for how in METHODS:
        with open_pair(folder, runtime, kv_dtype, **how) as llm:
            assert (llm.target.model.kv_dtype, llm.draft.model.kv_dtype) == (kv_dtype, kv_dtype)
            assert [result.tokens for result in llm.generate([PROMPT, "hello"], **asked)] == plain


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_fewer_bits_change_the_logits_a_little(folder: Path, runtime: str) -> None:
    scores = {}
    for kv_dtype in HELD:
        model = load_model(folder, kv_dtype=kv_dtype, **LOADED[runtime]).model
        tokens = text(model, 40)
        scores[kv_dtype] = model.score([chain(model.open(40, 40), tokens, logit_rows=range(40))])
    size = scores["float32"].norm()
    near = {kv_dtype: float((scores[kv_dtype] - scores["float32"]).norm() / size) for kv_dtype in HELD}
    assert 0 < near["float16"] < near["int8"] < 0.1


@pytest.mark.parametrize("kv_dtype", HELD)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_session_takes_the_bytes_that_it_reports(folder: Path, runtime: str, kv_dtype: str) -> None:
    model = load_model(folder, kv_dtype=kv_dtype, **LOADED[runtime]).model
    config: LlamaConfig = model.config
    assert model.token_bytes == config.token_bytes(kv_dtype)
    session = model.open(model.max_positions, 64)
    session.reserve(128)
    if runtime == "llama":
        assert sum(layer.nbytes for layer in session.kv) == model.session_bytes(session.slots)
    elif runtime == "graphs":
        held = session.pool.kv
        assert held.nbytes == model.session_bytes(session.slots)
    else:
        assert session.store.bytes == model.session_bytes(session.slots)
        assert session.store.bytes >= 128 * model.token_bytes


@pytest.mark.parametrize("depth", [2, 22, 32, 64, 80])
def test_both_runtimes_store_the_same_bytes(depth: int) -> None:
    from outpace_kernels.emulation import as_bytes

    x = np.random.default_rng(depth).normal(0, 3, (5, 7, depth)).astype(np.float32)
    x[0] = 0
    x[1, 2] *= 1e-32
    holding = KVFormat("int8", torch.float32, depth)
    held = holding.encode(torch.from_numpy(x))
    assert (held.shape[-1], held.dtype) == (holding.width, torch.int8)
    assert np.array_equal(holding.decode(held).numpy(), as_bytes(x))
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(as_bytes(x) - x) <= largest / 127 * 0.51 + 1e-30).all()


def test_half_precision_stays_finite() -> None:
    holding = KVFormat("float16", torch.float64, 4)
    x = torch.tensor([1e9, -1e9, 1.0, 0.0], dtype=torch.float64)
    assert holding.decode(holding.encode(x)).tolist() == [65504.0, -65504.0, 1.0, 0.0]


def test_where_kv_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="unknown kv_dtype 'int4', allowed are auto, float16"):
        LoadOptions(kv_dtype="int4")
    with pytest.raises(UserError, match="kv_dtype int8 is for the runtimes native and llama, not for transformers"):
        load_model(folder, runtime="transformers", kv_dtype="int8")
    with pytest.raises(UserError, match="kv_dtype is for models that are loaded by name"):
        load_model(torch.nn.Linear(1, 1), kv_dtype="int8")
