"""Models that are no decoder-only causal language models: refused by name, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from files import write_gguf

from outpace.core.errors import UserError
from outpace.models.files import model_kind
from outpace.models.files.gguf.source import convert
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.load import load_model

TAKEN = f": {model_kind.ACCEPTED}$"
ENCODER_DECODER = {"is_encoder_decoder": True}


@pytest.mark.parametrize("runtime", ["auto", "llama", "native", "transformers"])
@pytest.mark.parametrize(
    ("model_type", "architecture", "more", "kind"),
    [
        ("led", None, {}, "a sequence-to-sequence model"),
        ("led", "LEDForConditionalGeneration", ENCODER_DECODER, "a sequence-to-sequence model"),
        ("t5", "T5EncoderModel", ENCODER_DECODER, "a sequence-to-sequence model"),
        ("whisper", None, ENCODER_DECODER, "a sequence-to-sequence model"),
        ("bart", "BartModel", {}, "a sequence-to-sequence model"),
        ("bert", "BertForMaskedLM", {}, "an encoder"),
        ("bert", "BertLMHeadModel", {}, "an encoder"),
        ("own_bert", "OwnForMaskedLM", {}, "an encoder"),
        ("vit", None, {}, "a vision model"),
        ("own", "OwnForImageClassification", {}, "a vision model"),
        ("qwen2_vl", None, {}, "a vision-language model"),
        ("llama", "LlamaForSequenceClassification", {}, "a classifier"),
    ],
)
def test_they_are_refused_by_name_without_weights(
    tmp_path: Path, model_type: str, architecture: str | None, more: dict[str, Any], kind: str, runtime: str
) -> None:
    pytest.importorskip("transformers")
    named = {"architectures": [architecture]} if architecture else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **named, **more}))
    with pytest.raises(UserError, match=rf"{tmp_path.name} is {kind} \({architecture or model_type}\){TAKEN}"):
        load_model(tmp_path, runtime=runtime)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "bart", "architectures": ["BartForCausalLM"]},
        {"model_type": ["bert"], "architectures": "BertModel"},  # senseless, for others to say so
        {"model_type": None, "architectures": [None]},
    ],
    ids=str,
)
def test_what_may_be_one_is_left_to_the_runtimes(config: dict[str, Any]) -> None:
    check_causal_lm(config, "a model")


@pytest.mark.parametrize(("architecture", "says"), [("bert", "an encoder"), ("t5", "a sequence-to-sequence model")])
def test_a_gguf_file_of_another_kind_is_refused_by_name(tmp_path: Path, architecture: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"tiny.gguf is {says} \({architecture}\){TAKEN}"):
        convert(write_gguf(tmp_path / "tiny.gguf", architecture=architecture), tmp_path / "cache")


def test_a_loaded_model_of_another_kind_is_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    module = transformers.T5ForQuestionAnswering(transformers.T5Config(**sizes))
    says = rf"the loaded model is a sequence-to-sequence model \(T5ForQuestionAnswering\){TAKEN}"
    with pytest.raises(UserError, match=says):
        load_model(module, tokenizer=object())


def test_the_tables_are_those_of_transformers() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    listed = {name: set(types.split()) for name, types in model_kind.MODEL_TYPES.items()}
    assert listed[model_kind.SEQUENCE_TO_SEQUENCE] <= set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert listed[model_kind.ENCODER] <= set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    others = listed[model_kind.VISION] | listed[model_kind.VISION_LANGUAGE]
    assert others <= set(auto.CONFIG_MAPPING_NAMES)
    assert not others & set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "a model that runs is refused"
