"""Determines from config.json what kind of model it describes: decoder-only causal language models are accepted, and
those encoder-decoder models that the runtime transformers runs.

The config alone decides, so a wrong model is refused before its weights are downloaded. Unknown model types pass; the
runtimes refuse them later. Of checkpoints that also hold a vision model (Gemma 3 from 4B, Mistral Small from 3.1), only
the language model is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from outpace.core.errors import UserError

ACCEPTED = (
    "outpace takes decoder-only causal language models, such as Llama, Qwen and GPT-2, and T5, BART and Marian as"
    " safetensors"
)
CAUSAL = ("ForCausalLM", "LMHeadModel")  # suffixes of causal architectures' names
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
# model types that the runtime transformers runs, and suffixes of their architectures' names
ENCODER_DECODERS = ("bart", "longt5", "marian", "mbart", "mt5", "mvp", "pegasus", "plbart", "t5", "umt5")
TEXT_TO_TEXT = ("ForConditionalGeneration", "MTModel", "T5WithLMHeadModel")
KINDS = {model_type: kind for kind, listed in MODEL_TYPES.items() for model_type in listed.split()}
HEADS = {  # suffixes of other architectures' names
    "ForMaskedLM": ENCODER,
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForImageClassification": VISION,
    "ForObjectDetection": VISION,
}
OTHER_TASK = re.compile(r"For(?!CausalLM|ConditionalGeneration|Generation)[A-Z]\w+$")  # in an architecture's name


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of an encoder-decoder model that the runtime transformers runs."""
    listed = config.get("architectures") or ["ForConditionalGeneration"]
    is_known = config.get("model_type") in ENCODER_DECODERS and config.get("is_encoder_decoder") is not False
    return is_known and isinstance(listed, list) and str(listed[0]).endswith(TEXT_TO_TEXT)


def check_language_model(config: Mapping[str, Any], where: object) -> None:
    """Raise UserError, naming the kind, unless the config is that of a causal or an encoder-decoder model."""
    if not is_encoder_decoder(config):
        check_causal_lm(config, where)


def check_causal_lm(config: Mapping[str, Any], where: object) -> None:
    """Raise UserError, naming the kind, if the config is not that of a causal language model."""
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    kind = _kind(config, names)
    if kind is not None:
        name = names[0] if names else config.get("model_type") or config.get("_class_name")
        raise UserError(f"{where} is {kind} ({name!s:.80}): {ACCEPTED}")


def _kind(config: Mapping[str, Any], names: list[str]) -> str | None:
    """Return the kind of another model; None for a causal language model or an unknown type."""
    if config.get("is_encoder_decoder") is True:
        return SEQUENCE_TO_SEQUENCE
    model_type, is_causal = config.get("model_type"), any(name.endswith(CAUSAL) for name in names)
    kind = KINDS.get(model_type) if isinstance(model_type, str) else None
    may_continue = {SEQUENCE_TO_SEQUENCE: is_causal, ENCODER: config.get("is_decoder") is True}  # a decoder alone
    if kind is not None:
        return None if may_continue.get(kind) else kind
    if "_class_name" in config and model_type is None:  # of the library diffusers
        return "a part of a diffusion model"
    if is_causal:
        return None
    known = next((HEADS[end] for name in names for end in HEADS if name.endswith(end)), None)
    return known or ("a model for another task" if any(OTHER_TASK.search(name) for name in names) else None)


TEXT_ARCHITECTURES = {  # checkpoint's model_type: its language model's
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_unified": ("Gemma4ForCausalLM", "gemma4_text"),
    "lfm2_vl": ("Lfm2ForCausalLM", "lfm2"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
EMBEDDING = "embed_tokens.weight"  # the name's end; what precedes it is the prefix of the language model
# All tensors of a language model without a prefix; a head that drafts has others.
BACKBONE = ("embed_tokens.", "layers.", "norm.", "rotary_emb.", "lm_head.")
MTP = re.compile(r"(model\.)?mtp\.")  # beginning of the names of a layer for multi-token prediction
OUTER_FIELDS = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")


def has_language_model(config: Mapping[str, Any]) -> bool:
    """Return whether this is the config of a checkpoint that holds a language model along with a vision model."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in TEXT_ARCHITECTURES and "text_config" in config


def text_config(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return the language model's own config.json; settings of the whole checkpoint take precedence. Raises
    UserError."""
    inner = config["text_config"]
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: text_config is {inner!r:.80}, it must be an object")
    architecture, model_type = TEXT_ARCHITECTURES[config["model_type"]]
    outer = {name: config[name] for name in OUTER_FIELDS if config.get(name) is not None}
    return {"model_type": model_type, **inner, **outer, "architectures": [architecture]}


def check_text_model(config: Mapping[str, Any], where: object) -> None:
    """Apply `check_language_model` to the language model of the checkpoint."""
    check_language_model(text_config(config, where) if has_language_model(config) else config, where)


def language_model_names(stored: Collection[str], drops_others: bool = False) -> dict[str, str]:
    """Map tensor names, those of the language model as if it were stored alone, to the names in the file.

    It may be stored under any prefix, such as `language_model.model.`, or none. `drops_others`: its tensors only.
    """
    found = [name.removesuffix(EMBEDDING) for name in stored if f".{name}".endswith(f".{EMBEDDING}")]
    prefix = found[0] if len(found) == 1 else "model."
    if not prefix and not all(name.startswith(BACKBONE) for name in stored):
        prefix = "model."  # a head that drafts, with names of its own

    def own_name(name: str) -> str | None:
        if MTP.match(name):
            return name
        before, output, rest = name.partition("lm_head.")
        if output and prefix.startswith(before):
            return output + rest
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else None

    names = {name: own_name(name) for name in stored}
    return {own or name: name for name, own in names.items() if own is not None or not drops_others}
