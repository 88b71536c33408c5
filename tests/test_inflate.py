"""An inflated model: the shape of a larger one, and the logits and texts of its own, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import ARCHITECTURES, model_folder, smollm2_file, weights, write_gguf
from passes import fresh, text
from turns import in_turn, one_of

import outpace
from outpace.core.errors import UserError
from outpace.models import devices
from outpace.models.llama import inflation
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.llama.inflation import inflated_config
from outpace.models.load import load_draft, load_model
from outpace.models.options import SHAPES, Shape

RUNTIMES: dict[str, dict[str, Any]] = {
    "torch": {"runtime": "llama"},
    "captured": {"runtime": "llama", "graphs": "eager"},
    "bfloat16": {"runtime": "llama", "dtype": "bfloat16"},
    "native": {"runtime": "native"},
}
FLOATS, NATIVE = 1e-4, 0.05  # tolerances, of the logits' spread: an int8 activation may round the other way
EXACT = Shape(256, 256, 9, 256, 128)  # four times as wide, so all factors are powers of two and no bit changes
ODD = Shape(192, 320, 9, 384, 128)  # three query heads for each key head where the model has two
KINDS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},  # wider than its places
}


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the shapes small. The real ones need gigabytes."""
    for size, shape in {"1B": EXACT, "3B": ODD, "8B": Shape(512, 512, 12, 512, 256)}.items():
        monkeypatch.setitem(SHAPES, size, shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


def check_equal(own: Any, wide: Any, tolerance: float) -> None:
    tokens = text(own, 40)
    got, expected = fresh(wide, tokens), fresh(own, tokens)
    assert (got - expected).abs().max() <= tolerance * expected.std()
    assert wide.weight_bytes > 4 * own.weight_bytes


@pytest.mark.parametrize("size", ["1B", "3B"])
@pytest.mark.parametrize(("kind", "runtime"), in_turn(list(KINDS), ["torch", "captured", "native"]))
def test_logits_stay_and_the_shape_is_the_larger_one(kind: str, runtime: str, size: str, tmp_path: Path) -> None:
    path, options = model_folder(tmp_path, **KINDS[kind]), RUNTIMES[runtime]
    own, wide = (load_model(path, inflate=inflate, **options).model for inflate in (None, size))
    shape, config = SHAPES[size], wide.config
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == shape[:3]
    assert (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim) == shape[3:]
    assert wide.token_bytes > 4 * own.token_bytes
    check_equal(own, wide, NATIVE if runtime == "native" else FLOATS)


def test_no_bit_changes_if_all_factors_are_powers_of_two(folder: Path) -> None:
    for options in RUNTIMES.values():
        own, wide = (load_model(folder, inflate=size, **options).model for size in (None, "1B"))
        tokens = text(own, 40)
        assert torch.equal(fresh(wide, tokens), fresh(own, tokens))


@pytest.mark.parametrize("size", ["1B", "3B"])
@pytest.mark.parametrize("kind", one_of(2, ["Q4_1", "Q8_0", "F16", "Q4_0"]))
def test_blocks_of_a_file_are_kept(kind: str, size: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind=kind, tensors=weights())
    own, wide = (load_model(path, inflate=inflate).model for inflate in (None, size))
    assert wide.precision == own.precision
    check_equal(own, wide, NATIVE)


def test_a_block_that_would_be_cut_is_not_kept() -> None:
    columns = np.concatenate([np.arange(32), np.full(32, -1), np.arange(32, 48), np.full(16, -1)])
    assert inflation._whole_blocks(columns, 32) is None
    assert inflation._whole_blocks(columns[:64], 32).tolist() == [0, -1]
    assert inflation._whole_blocks(columns, 16).tolist() == [0, 1, -1, -1, 2, -1]
    assert inflation._whole_blocks(columns[:48], 32) is None


@pytest.mark.parametrize(("runtime", "asking"), in_turn(list(RUNTIMES), [{}, {"temperature": 0.9, "seed": 4}]), ids=str)
def test_every_method_writes_the_models_own_text(folder: Path, runtime: str, asking: dict[str, Any]) -> None:
    texts = set()
    for size, method in ((None, "autoregressive"), ("1B", "autoregressive"), ("1B", "speculative"), ("1B", "card")):
        draft = None if method == "autoregressive" else "layers:0"
        with outpace.load(folder, draft, inflate=size, method=method, **RUNTIMES[runtime]) as llm:
            texts.add(llm.generate(["hello world 12 hello world"], max_tokens=40, **asking)[0].tokens)
            assert llm.draft is None or llm.draft.model.config.hidden_size == 64
    assert len(texts) == 1


def test_it_is_labelled_and_stays_inflated_in_another_process(folder: Path) -> None:
    loaded = load_model(folder, inflate="8B")
    assert (loaded.name, loaded.inflate, loaded.model.inflate) == (f"{folder} (cost of 8B)", "8B", "8B")
    assert "a pass costs as much as one of a model of 8B" in loaded.notice
    assert load_model(folder).name == str(folder)
    assert loaded.again is not None
    assert loaded.again().inflate == "8B"
    assert load_draft(folder, loaded).inflate is None


@pytest.mark.parametrize("size", ["8B", "32B", "70B"])
def test_the_shapes_are_those_of_real_models(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights but the embeddings, in billions."""
    monkeypatch.undo()
    config = inflated_config(from_dict({**reference_config(), "num_hidden_layers": 30}), size)
    layers = sum(np.prod(shape) for name, shape in tensor_shapes(config).items() if ".layers." in name)
    assert layers / 1e9 == pytest.approx({"8B": 6.98, "32B": 31.2, "70B": 68.5}[size], rel=0.01)


def reference_config() -> dict[str, Any]:
    """The sizes of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    return {**sizes, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inflate": 8}, "unknown inflate '8', allowed are 1B, 3B, 8B, 32B, 70B; the nearest are 8B and 3B"),
        ({"inflate": "8b"}, "unknown inflate '8b', allowed are 1B, 3B, 8B, 32B, 70B"),
        ({"inflate": "8B", "runtime": "transformers"}, "inflate 8B is for the runtimes native and llama"),
    ],
)
def test_what_cannot_be_inflated_is_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=says):
        outpace.load(folder, **options)
    with pytest.raises(UserError, match="not for one that is loaded already"):
        load_model(object(), inflate="8B")


def test_a_size_below_the_models_own_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for smaller in (ODD._replace(hidden=32), ODD._replace(layers=1), ODD._replace(keys=16), ODD._replace(middle=64)):
        monkeypatch.setitem(SHAPES, "3B", smaller)
        with pytest.raises(UserError, match=r"inflate is 3B, the model is larger in some dimension; it fits into .*1B"):
            load_model(folder, inflate="3B")


@pytest.mark.parametrize("runtime", ["native", "llama"])
def test_the_sizes_that_fit_into_memory_are_named_before_anything_is_loaded(
    folder: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda device: 30 << 20)
    monkeypatch.setattr(inflation, "inflated_source", lambda *_: pytest.fail("it began to load"))
    for size in ("32B", "70B"):
        with pytest.raises(UserError, match=r"needs .* GiB of memory.*; inflate 1B and 3B( and 8B)? would fit"):
            load_model(folder, inflate=size, runtime=runtime)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(UserError, match=r"; no size of inflate would fit"):
        load_model(folder, inflate="70B", runtime=runtime)


@pytest.mark.long
@pytest.mark.smollm2
def test_the_shipped_model_at_the_cost_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the logits are equal up to rounding. With the file's weights some int8 activations round differently,
    but the error against float32 is no larger than without inflation."""
    monkeypatch.undo()
    file, options = smollm2_file(), {"dtype": "float32", "runtime": "llama"}
    exact, wide = (load_model(file, inflate=size, **options).model for size in (None, "1B"))
    check_equal(exact, wide, FLOATS)
    del wide
    tokens = text(exact, 40)
    errors = [
        (fresh(load_model(file, inflate=size).model, tokens) - fresh(exact, tokens)).square().mean().sqrt()
        for size in (None, "1B")
    ]
    assert errors[1] < 1.2 * errors[0]
