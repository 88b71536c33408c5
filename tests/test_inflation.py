"""bench/inflation.py: the shape of a larger model, and the logits and texts of the model's own, up to rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import ARCHITECTURES, model_folder
from passes import fresh, text

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gpu
from inflation import inflate, inflated_config

import outpace
from outpace.core.errors import UserError
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.load import load_draft, load_model

EXACT = (9, 256, 256, 16, 8, 16)  # four times as wide, so all factors are powers of two and no bit changes
ODD = (9, 192, 320, 24, 8, 16)  # three query heads for each key head where the model has two
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": ARCHITECTURES["qwen2"],
    "biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},  # wider than its places
}
CAPTURED: dict[str, Any] = {"runtime": "llama", "graphs": "eager"}


@pytest.mark.parametrize("shape", [EXACT, ODD])
@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_stay_and_the_shape_is_the_larger_one(kind: str, shape: Any, tmp_path: Path) -> None:
    loaded = load_model(model_folder(tmp_path, **KINDS[kind]), **CAPTURED)
    own, wide = loaded.model, inflate(loaded, "8B", shape).model
    layers, hidden, middle, heads, key_heads, width = shape
    config = wide.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, middle)
    assert (config.num_heads, config.num_kv_heads) == (
        heads * width // config.head_dim,
        key_heads * width // config.head_dim,
    )
    assert wide.weight_bytes > 4 * own.weight_bytes
    tokens = text(own, 40)
    got, expected = fresh(wide, tokens), fresh(own, tokens)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_changes_if_all_factors_are_powers_of_two(tmp_path: Path, dtype: str) -> None:
    loaded = load_model(model_folder(tmp_path), dtype=dtype, **CAPTURED)
    wide, tokens = inflate(loaded, "8B", EXACT), text(loaded.model, 40)
    assert torch.equal(fresh(wide.model, tokens), fresh(loaded.model, tokens))


def test_every_method_writes_the_models_own_text(tmp_path: Path) -> None:
    loaded = load_model(model_folder(tmp_path), **CAPTURED)
    wide, texts = inflate(loaded, "8B", EXACT), set()
    assert wide.name == f"{loaded.name} (cost of 8B)"
    draft = load_draft("layers:0", loaded)
    assert load_draft("layers:0", wide).model.config == draft.model.config
    for target, method in ((loaded, "autoregressive"), (wide, "autoregressive"), (wide, "speculative"), (wide, "card")):
        with outpace.LLM(target, None if method == "autoregressive" else draft, method=method, profile=False) as llm:
            texts.add(llm.generate(["hello world 12 hello world"], max_tokens=40)[0].tokens)
    assert len(texts) == 1


@pytest.mark.parametrize(("size", "billions"), [("8B", 6.98), ("32B", 31.2)])
def test_the_shapes_are_those_of_real_models(size: str, billions: float) -> None:
    """All weights but the embeddings, in billions, from the sizes of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    smollm2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152}
    config = inflated_config(from_dict({**sizes, **smollm2, "num_hidden_layers": 30}), gpu.SHAPES[size])
    layers = sum(np.prod(shape) for name, shape in tensor_shapes(config).items() if ".layers." in name)
    assert layers / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_cannot_be_inflated_is_refused(tmp_path: Path) -> None:
    own = load_model(model_folder(tmp_path / "llama"), **CAPTURED).model.config
    for smaller in ((1, *EXACT[1:]), (9, 32, *EXACT[2:]), (9, 256, 64, 16, 8, 16), (9, 256, 256, 16, 1, 16)):
        with pytest.raises(UserError, match=r"larger than .* in some dimension"):
            inflated_config(own, smaller)
    for kind in ("qwen3", "phi3"):
        other = load_model(model_folder(tmp_path / kind, **ARCHITECTURES[kind]), **CAPTURED).model.config
        with pytest.raises(UserError, match="are not widened"):
            inflated_config(other, EXACT)
