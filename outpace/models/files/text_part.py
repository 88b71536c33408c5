"""The language model inside a checkpoint that also has a vision model: its config.json, and the names of its tensors.

Gemma 3 from 4 billion weights on and Mistral Small from 3.1 on are published so. Nothing else of such a folder is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outpace.core.errors import UserError
from outpace.models.files.kind import check_kind

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
