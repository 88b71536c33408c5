"""Models that are no decoder-only causal language models: refused by name, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from files import write_gguf

from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.models.files import model_kind
from outpace.models.files.gguf.source import convert
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.load import load_model

TAKEN = r": outpace takes decoder-only causal language models, such as Llama, Qwen and GPT-2$"
OTHERS = [
    ({"model_type": "t5"}, r"a sequence-to-sequence model \(t5\)"),
    (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        r"a sequence-to-sequence model \(T5ForConditionalGeneration\)",
    ),
    ({"model_type": "whisper", "is_encoder_decoder": True}, r"a sequence-to-sequence model \(whisper\)"),
    ({"model_type": "bart", "architectures": ["BartModel"]}, r"a sequence-to-sequence model \(BartModel\)"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"an encoder \(BertForMaskedLM\)"),
    ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, r"an encoder \(BertLMHeadModel\)"),
    ({"model_type": "own_bert", "architectures": ["OwnForMaskedLM"]}, r"an encoder \(OwnForMaskedLM\)"),
    ({"model_type": "vit"}, r"a vision model \(vit\)"),
    (
        {"model_type": "own", "architectures": ["OwnForImageClassification"]},
        r"a vision model \(OwnForImageClassification\)",
    ),
    ({"model_type": "qwen2_vl"}, r"a vision-language model \(qwen2_vl\)"),
    (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        r"a classifier \(LlamaForSequenceClassification\)",
    ),
]


@pytest.mark.parametrize("runtime", ["auto", "llama", "native", "transformers"])
@pytest.mark.parametrize(("config", "says"), OTHERS, ids=[str(config["model_type"]) for config, _ in OTHERS])
def test_they_are_refused_by_name_without_weights(
    tmp_path: Path, config: dict[str, Any], says: str, runtime: str
) -> None:
    pytest.importorskip("transformers")
    if runtime == "native":
        pytest.importorskip("outpace_kernels")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{tmp_path.name} is {says}{TAKEN}"):
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


def test_the_command_line_says_it_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit) as end:
        main(["generate", "hello", "--target", str(tmp_path)])
    assert end.value.code == 2
    assert "is an encoder (bert): outpace takes decoder-only causal" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("architecture", "says"), [("bert", "an encoder"), ("t5", "a sequence-to-sequence model")])
def test_a_gguf_file_of_another_kind_is_refused_by_name(tmp_path: Path, architecture: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"tiny.gguf is {says} \({architecture}\){TAKEN}"):
        convert(write_gguf(tmp_path / "tiny.gguf", architecture=architecture), tmp_path / "cache")


def test_a_loaded_model_of_another_kind_is_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    says = rf"the loaded model is a sequence-to-sequence model \(T5ForConditionalGeneration\){TAKEN}"
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
