"""A config.json that contradicts the tensors: what transformers does with the files, or a refusal that names both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from files import model_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.base import chain
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.load import load_model

WORDS = [5, 90, 17, 200, 33, 61, 120, 7, 44, 250]
Tensors = dict[str, Tensor]
BIAS = "model.layers.1.self_attn.o_proj.bias"


def changed(where: Path, change: Callable[[Tensors], Tensors], said: dict[str, Any], **config: Any) -> Path:
    """A tiny model's folder with other tensors, and with fields `said` in its config.json."""
    folder = model_folder(where, **config)
    tensors = change(load_file(folder / SINGLE))
    save_file({name: value.clone() for name, value in tensors.items()}, folder / SINGLE, {"format": "pt"})
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | said))
    return folder


def scores(folder: Path, **options: Any) -> tuple[Tensor, Any]:
    loaded = load_model(folder, **options)
    session = loaded.model.open(len(WORDS), 1)
    return torch.as_tensor(loaded.model.score([chain(session, WORDS, range(len(WORDS)))])), loaded


def reference(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([WORDS])).logits[0]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def with_output(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": noise(272, 64)}


def with_equal_output(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


def with_output_alone(tensors: Tensors) -> Tensors:
    return {name.replace("model.embed_tokens", "lm_head"): value for name, value in tensors.items()}


def with_zero_biases(tensors: Tensors) -> Tensors:
    """As AutoGPTQ writes them."""
    found = {name[:-6] + "bias": torch.zeros(len(value)) for name, value in tensors.items() if "proj" in name}
    return tensors | found


def with_tables(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.mtp.norm.weight": noise(64)}


def with_value_head(tensors: Tensors) -> Tensors:
    return tensors | {"v_head.summary.weight": noise(1, 64)}


OTHER_OUTPUT = "tie_word_embeddings is true, and lm_head.weight is not the embedding: it is used"
WITHOUT_OUTPUT = {"architectures": ["LlamaModel"]}
HONOURED: list[tuple[Callable[[Tensors], Tensors], dict[str, Any], str | None]] = [
    (with_output, {}, OTHER_OUTPUT),
    (with_equal_output, {}, None),
    (with_output_alone, {}, None),
    (with_zero_biases, {}, None),
    (with_tables, {}, None),
    (with_value_head, {}, "tensors of other models in the files were ignored: v_head"),
    (dict, WITHOUT_OUTPUT, None),
    (dict, {"torch_dtype": "bfloat16"}, None),
    *((lambda found: {name.removeprefix("model."): value for name, value in found.items()}, {}, None),),
    (lambda found: {n.removeprefix("model."): v for n, v in with_output(found).items()}, {}, OTHER_OUTPUT),
]


@pytest.mark.parametrize(("change", "said", "notice"), HONOURED, ids=range(len(HONOURED)))
def test_logits_are_those_of_transformers(tmp_path: Path, change: Any, said: dict[str, Any], notice: Any) -> None:
    folder = changed(tmp_path, change, said)
    expected = reference(folder)
    got, loaded = scores(folder, runtime="llama", dtype="float32")
    assert expected.std() > 0.1
    assert (got - expected).norm() < 1e-4 * expected.norm()
    assert loaded.notice == notice
    native, _ = scores(folder)
    assert (native - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("prefix", ["language_model.", "base_model.model.", "_orig_mod.", "text."])
@pytest.mark.parametrize("has_output", [True, False])
def test_a_language_model_under_any_prefix(tmp_path: Path, prefix: str, has_output: bool) -> None:
    """transformers would initialise its weights randomly."""
    plain = changed(tmp_path / "plain", with_output if has_output else dict, {"tie_word_embeddings": not has_output})
    folder = changed(
        tmp_path / "other",
        lambda tensors: {
            prefix + name: value for name, value in (with_output if has_output else dict)(tensors).items()
        },
        {"tie_word_embeddings": not has_output},
    )
    assert torch.equal(scores(folder)[0], scores(plain)[0])
    with Checkpoint.open(folder) as one, Checkpoint.open(plain) as other:
        assert one.names() == other.names()


def test_names_of_a_head_that_drafts_stay(tmp_path: Path) -> None:
    names = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight", "fc.weight"]
    folder = changed(tmp_path, lambda tensors: {name: noise(4, 4) for name in names}, {"num_hidden_layers": 1})
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.names() == sorted(names)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def extra(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: noise(*shape)}


NORM = "model.layers.0.self_attn.q_norm.weight"
SCALED = "model.layers.0.mlp.up_proj."
REFUSED: list[tuple[Callable[[Tensors], Tensors], dict[str, Any], dict[str, Any], str]] = [
    (extra(BIAS, 64), {}, {}, f"{BIAS}', and a model with attention_bias None does not use it"),
    (dict, {"mlp_bias": False}, {"mlp_bias": True}, r"mlp.down_proj.bias', and a model with mlp_bias False does not"),
    (extra("lm_head.bias", 272), {}, {}, "lm_head.bias', and a model with model_type 'llama'"),
    (extra(NORM, 16), {}, {}, "q_norm.weight', and a model with model_type 'llama' does not use it"),
    (extra("model.layers.1.mlp.gate.weight", 4, 64), {}, {}, "mlp.gate.weight', and a model with model_type 'llama'"),
    (extra("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 64), {}, {}, "lora_A.weight', and a model with"),
    (dict, {"num_hidden_layers": 1}, {}, r"holds the tensor 'model.layers.1\..*, and a model with num_hidden_layers 1"),
    (dict, {"num_hidden_layers": 3}, {}, r"no tensor 'model.layers.2\..*, which a model with num_hidden_layers 3 has"),
    (dict, {"tie_word_embeddings": False}, {}, "'lm_head.weight', which a model with tie_word_embeddings False has"),
    (dict, {"attention_bias": True}, {}, "q_proj.bias', which a model with attention_bias True has"),
    (without("o_proj"), {}, {}, "o_proj.weight', which a model with model_type 'llama' has"),
    (dict, {"vocab_size": 280}, {}, r"has shape \[272, 64\], expected \[280, 64\] \(vocab_size 280, hidden_size 64"),
    (dict, {"num_key_value_heads": 4}, {}, r"k_proj.weight' has shape \[32, 64\], .*num_key_value_heads 4"),
    (dict, {"head_dim": 32}, {}, r"q_proj.weight' has shape \[64, 64\], .*head_dim 32"),
    (dict, {"intermediate_size": 128}, {}, r"gate_proj.weight' has shape \[96, 64\], .*intermediate_size 128"),
]


@pytest.mark.parametrize(("change", "said", "config", "words"), REFUSED, ids=range(len(REFUSED)))
def test_both_values_are_named(tmp_path: Path, change: Any, said: Any, config: Any, words: str) -> None:
    folder = changed(tmp_path, change, said, **config)
    with pytest.raises(UserError, match=words):
        load_model(folder)


def quantised(*parts: str, keeps: Any = None) -> Callable[[Tensors], Tensors]:
    """Replace a weight by the parts of a quantised one; `keeps` makes what stays in its place."""

    def change(tensors: Tensors) -> Tensors:
        weight = tensors.pop(SCALED + "weight")
        kept = {} if keeps is None else {SCALED + "weight": keeps(weight)}
        return tensors | kept | {SCALED + part: torch.ones(4, 4) for part in parts}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantised("qweight", "qzeros", "scales"), r"holds no tensor .* there are qweight, qzeros, scales of it"),
        (quantised("scales", "biases", keeps=lambda w: w[:, :8].int()), "has shape .* there are biases, scales of it"),
        (
            quantised("weight_scale", keeps=lambda w: w.to(torch.float8_e4m3fn)),
            "has type F8_E4M3.* there are weight_scale of it",
        ),
        (quantised("base_layer.weight", "lora_A.default.weight"), "there are base_layer.weight, lora_A.default.weight"),
    ],
)
def test_quantised_weights_that_the_config_does_not_mention(tmp_path: Path, change: Any, words: str) -> None:
    """transformers would read the 8-bit weights without their scales."""
    folder = changed(tmp_path, change, {})
    with pytest.raises(UserError, match=f"{words}.*which config.json does not say: name the original checkpoint"):
        load_model(folder)


@pytest.mark.parametrize("runtime", ["auto", "transformers"])
def test_scales_that_transformers_would_ignore(tmp_path: Path, runtime: str) -> None:
    change = quantised("weight_scale", keeps=lambda weight: weight.to(torch.float8_e4m3fn))
    folder = changed(tmp_path, change, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    with pytest.raises(UserError, match=r"transformers does not know: it would ignore 1 tensors.*up_proj.weight_scale"):
        load_model(folder, runtime=runtime)
