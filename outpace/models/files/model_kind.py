"""What kind of model a config.json describes: all but decoder-only causal language models are refused by name.

By the config alone, so that nobody waits for weights that cannot be used. What no table here knows is left to the
runtimes, which refuse it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outpace.core.errors import UserError

TAKEN = "outpace takes decoder-only causal language models, such as Llama, Qwen and GPT-2"
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of architectures that continue a text end
SEQUENCE_TO_SEQUENCE, ENCODER = "a sequence-to-sequence model", "an encoder"
VISION, VISION_LANGUAGE = "a vision model", "a vision-language model"
MODEL_TYPES = {
    SEQUENCE_TO_SEQUENCE: "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100"
    " marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5",
    ENCODER: "albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm funnel ibert"
    " layoutlm longformer luke megatron-bert mobilebert modernbert mpnet nomic_bert nystromformer rembert roberta"
    " roberta-prelayernorm roformer squeezebert xlm-roberta xlm-roberta-xl xmod",
    VISION: "beit bit chinese_clip clip conditional_detr convnext convnextv2 data2vec-vision deformable_detr deit detr"
    " dinov2 dinov3_vit dpt efficientnet levit mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 regnet resnet segformer"
    " siglip siglip2 swin swinv2 timm_wrapper videomae vit vit_mae vit_msn yolos",
    VISION_LANGUAGE: "aya_vision blip blip-2 florence2 idefics idefics2 idefics3 instructblip internvl kosmos-2 llava"
    " llava_next llava_onevision mistral3 paligemma qwen2_5_vl qwen2_vl qwen3_vl smolvlm",
}
KINDS = {model_type: kind for kind, listed in MODEL_TYPES.items() for model_type in listed.split()}
HEADS = {  # how other architectures' names end
    "ForMaskedLM": ENCODER,
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForImageClassification": VISION,
    "ForObjectDetection": VISION,
}


def check_kind(config: Mapping[str, Any], where: object) -> None:
    """UserError for the config of a model that does not continue a text token by token, with its kind and its name."""
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    kind = _kind(config, names)
    if kind is not None:
        raise UserError(f"{where} is {kind} ({names[0] if names else config.get('model_type')}): {TAKEN}")


def _kind(config: Mapping[str, Any], names: list[str]) -> str | None:
    """None for a causal language model, and for what is not known."""
    if config.get("is_encoder_decoder") is True:
        return SEQUENCE_TO_SEQUENCE
    model_type, is_causal = config.get("model_type"), any(name.endswith(CAUSAL) for name in names)
    kind = KINDS.get(model_type) if isinstance(model_type, str) else None
    may_continue = {SEQUENCE_TO_SEQUENCE: is_causal, ENCODER: config.get("is_decoder") is True}  # as a decoder alone
    if kind is not None:
        return None if may_continue.get(kind) else kind
    return None if is_causal else next((HEADS[end] for name in names for end in HEADS if name.endswith(end)), None)


ALONE = {  # by the whole's model_type the architecture of the language model alone, and its model_type
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "mistral3": ("MistralForCausalLM", "mistral"),
}
PREFIXES = {  # of tensors in the file, and of the same ones of a language model alone
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in ALONE and "text_config" in config


def text_config(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The config.json of the language model alone; what the whole says holds for it. UserError where it is none."""
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: text_config is {inner!r:.80}, it must be an object")
    architecture, model_type = ALONE[config["model_type"]]
    outer = {name: config[name] for name in OUTER if config.get(name) is not None}
    return {"model_type": model_type, **inner, **outer, "architectures": [architecture]}


def check_kind_of_text(config: Mapping[str, Any], where: object) -> None:
    """As `check_kind`, of the language model alone where there is more."""
    check_kind(text_config(config, where) if has_text_part(config) else config, where)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The language model's tensors: their names if it were alone, and those in the file."""
    found = {}
    for name in stored:
        for prefix, own in PREFIXES.items():
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
                break
    return found
