"""Checkpoints that hold a vision model too: the language model inside, as transformers computes it, and its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distill_files import check_draft, make_draft, settings
from files import TEMPLATE, folder_of, set_fields, write_gguf
from safetensors.torch import load_file, save_file

from outpace.core.errors import UserError
from outpace.distill.draft_shape import DraftShape, draft_config
from outpace.distill.report import provenance
from outpace.models.base import chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.load import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LOOK: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"sliding_window": 24, "query_pre_attn_scalar": 16},
        {"image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4",
        {"sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 4.0},
        {"head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16},
        {"audio_config": None},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
}
WORDS = [5, 90, 17, 200, 33, 61, 120, 7, 44, 250, 19, 70, 3, 8, 155, 21] * 3


def whole(folder: Path, name: str) -> Any:
    """A random model of transformers with its eyes, saved with a tokenizer."""
    family, text, look, more = KINDS[name]
    torch.manual_seed(3)
    config = getattr(transformers, family + "Config")(text_config=SIZES | text, vision_config=LOOK | look, **more)
    model = getattr(transformers, family + "ForConditionalGeneration")._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.save_pretrained(folder / "model")
    for file in folder_of(write_gguf(folder / "a.gguf"), folder / "tokenizer").iterdir():
        file.replace(folder / "model" / file.name)
    return model.eval()


@pytest.mark.parametrize("runtime", ["llama", "native"])
@pytest.mark.parametrize("name", KINDS)
def test_the_language_model_scores_as_it_does_in_the_whole(name: str, runtime: str, tmp_path: Path) -> None:
    theirs = whole(tmp_path, name)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([WORDS]), use_cache=False).logits[0].float()
    loaded = load_model(str(tmp_path / "model"), runtime=runtime, dtype="float32" if runtime == "llama" else "int8")
    session = loaded.model.open(len(WORDS), 1)
    got = torch.as_tensor(loaded.model.score([chain(session, WORDS, range(len(WORDS)))]))
    assert expected.std() > 0.1
    assert (got - expected).norm() < (0.2 if runtime == "native" else 1e-4) * expected.norm()
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert all(named.startswith(("model.", "lm_head.")) for named in checkpoint.names())
        assert not any("vision" in named for named in checkpoint.names())


@pytest.mark.parametrize("name", KINDS)
def test_names_as_the_hub_has_them(name: str, tmp_path: Path) -> None:
    """Published before transformers named tensors anew."""
    whole(tmp_path, name)
    file = tmp_path / "model" / "model.safetensors"
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        expected = {named: checkpoint.tensor(named).clone() for named in checkpoint.names()}
    old = {}
    for named, value in load_file(file).items():
        for prefix in ("model.language_model.", "language_model.model."):
            if named.startswith(prefix):
                old["language_model.model." + named.removeprefix(prefix)] = value
        if "lm_head." in named:
            old["language_model.lm_head.weight"] = value
    save_file(old | {"vision_tower.a.weight": torch.ones(1)}, file, {"format": "pt"})
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.names() == sorted(expected)
        assert all(torch.equal(checkpoint.tensor(named), value) for named, value in expected.items())


def test_fields_outside_text_config_apply_and_missing_sizes_are_those_of_transformers(tmp_path: Path) -> None:
    """Such as the ends of an answer; Gemma 3 4B's config.json on the hub leaves out sizes."""
    whole(tmp_path, "gemma3")
    place = tmp_path / "model" / "config.json"
    config = json.loads(place.read_text())
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar"):
        del config["text_config"][name]
    place.write_text(json.dumps(config | {"eos_token_id": [1, 106]}))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.config["eos_token_id"] == [1, 106]
        assert checkpoint.config["architectures"] == ["Gemma3ForCausalLM"]
        sizes = from_dict(checkpoint.config)
        draft = draft_config(checkpoint.config, DraftShape("1", vocab=2))
    assert (sizes.vocab_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (262208, 8, 4, 256)
    (tmp_path / "config.json").write_text(json.dumps(draft))
    assert provenance({}, tmp_path, [])["tokens that it writes"] == "2 of 262,208"
    place.write_text(json.dumps(config | {"text_config": 7}))
    with pytest.raises(UserError, match=r"text_config is 7, it must be an object"):
        Checkpoint.open(tmp_path / "model")


@pytest.mark.parametrize("runtime", ["auto", "transformers"])
def test_a_language_model_of_an_unknown_kind_is_refused(runtime: str, tmp_path: Path) -> None:
    whole(tmp_path, "mistral3")
    place = tmp_path / "model" / "config.json"
    config = json.loads(place.read_text())
    config["text_config"]["model_type"] = "ministral3"
    place.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model is a vision-language model \(Mistral3ForConditionalGeneration\)"):
        load_model(tmp_path / "model", runtime=runtime)


def test_a_draft_is_trained_for_it(tmp_path: Path) -> None:
    whole(tmp_path, "gemma3")
    target = tmp_path / "model"
    set_fields(target, chat_template=TEMPLATE)
    check_draft(target, make_draft(settings(target, tmp_path / "run", tokens=600)))
