"""An inflated model: as many more layers as it says, and every bit of its scores and texts its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from files import model_folder
from passes import fresh, text
from turns import in_turn

import outpace
from outpace.core.errors import UserError
from outpace.models.load import load_draft, load_model

RUNTIMES = ["llama", "native"]
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "normed": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "windowed": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "without_rotation": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("runtime", "dtype"), [(runtime, "auto") for runtime in RUNTIMES] + [("llama", "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_and_the_cost_grows(kind: str, runtime: str, dtype: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path, **KINDS[kind])
    own, large = (load_model(path, runtime=runtime, dtype=dtype, inflate=factor).model for factor in (1, 3))
    tokens = text(own, 40)
    assert torch.equal(fresh(large, tokens), fresh(own, tokens))
    assert set(large.config.windows) == set(own.config.windows)
    layers, more = own.config.num_layers, large.config.num_layers
    assert more > 3 * layers
    assert large.token_bytes * layers == own.token_bytes * more
    bytes_each = (large.weight_bytes - own.weight_bytes) / (more - layers)
    assert abs(large.weight_bytes - 3 * own.weight_bytes) < bytes_each


@pytest.mark.parametrize(("runtime", "asking"), in_turn(RUNTIMES, [{}, {"temperature": 0.9, "seed": 4}]), ids=str)
def test_every_method_writes_the_models_own_text(folder: Path, runtime: str, asking: dict[str, Any]) -> None:
    texts = set()
    for factor, method in ((1, "autoregressive"), (4, "autoregressive"), (4, "speculative")):
        with outpace.load(folder, runtime=runtime, inflate=factor, method=method) as llm:
            texts.add(llm.generate(["hello world 12 hello world"], max_tokens=40, **asking)[0].tokens)
    assert len(texts) == 1


def test_it_is_labelled_and_stays_inflated_in_another_process(folder: Path) -> None:
    loaded = load_model(folder, inflate=4)
    assert (loaded.name, loaded.inflate) == (f"{folder} (cost x 4)", 4)
    assert "a pass costs as much as one of a model 4 times as large" in loaded.notice
    assert load_model(folder).name == str(folder)
    assert loaded.again is not None
    assert loaded.again().inflate == 4
    assert load_draft(folder, loaded).inflate == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inflate": 0}, "inflate is 0, it must be between 1 and 256"),
        ({"inflate": 257}, "inflate is 257, it must be between 1 and 256"),
        ({"inflate": 1.5}, "inflate is 1.5, it must be a whole number"),
        ({"inflate": 2, "runtime": "transformers"}, "inflate is for the runtimes native and llama"),
        ({"inflate": 2, "draft": "layers:0"}, "layers:0 skips layers, which inflate adds without effect"),
    ],
)
def test_what_cannot_be_inflated_is_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=says):
        outpace.load(folder, **options)
    with pytest.raises(UserError, match="not for one that is loaded already"):
        load_model(object(), inflate=2)
