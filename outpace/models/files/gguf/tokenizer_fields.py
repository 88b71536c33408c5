"""Reads the fields tokenizer.* of a new GGUF file from another GGUF file, or from a folder with a byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError
from outpace.models.files import tokenizer_folder
from outpace.models.files.gguf.header import open_gguf_model
from outpace.models.files.gguf.tokenizer import (
    CONTROL,
    SPECIAL_IDS,
    SPLITS,
    TEMPLATE,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS,
    pre_tokenizer,
)
from outpace.models.files.reading import read_json, read_optional_json

PREFIX = "tokenizer."
TOKENS, TYPES = f"{PREFIX}ggml.tokens", f"{PREFIX}ggml.token_type"
NORMAL = 1  # a value of tokenizer.ggml.token_type


def read_fields(model: Path, rows: int) -> dict[str, Any]:
    """Return the tokenizer's fields for a model with `rows` embeddings, from a .gguf file or a model folder.

    Rows without a token get an unused one. UserError if there are more tokens than rows, or if a folder's tokenizer is
    not a byte-level BPE that llama.cpp knows.
    """
    if model.is_dir():
        fields = _of_folder(model)
    else:
        fields = {key: value for key, value in open_gguf_model(model).metadata.items() if key.startswith(PREFIX)}
    tokens, types = list(fields[TOKENS]), list(fields.get(TYPES) or [NORMAL] * len(fields[TOKENS]))
    if len(tokens) > rows:
        raise UserError(f"the tokenizer of {model} has {len(tokens)} tokens, the embedding has {rows} rows")
    padding = range(len(tokens), rows)
    fields[TOKENS], fields[TYPES] = [*tokens, *(f"[PAD{row}]" for row in padding)], [*types, *(UNUSED for _ in padding)]
    if (scores := fields.get(f"{PREFIX}ggml.scores")) is not None:
        fields[f"{PREFIX}ggml.scores"] = [*scores, *(0.0 for _ in padding)]
    return fields


def add_field(writer: Any, key: str, value: Any) -> None:
    """Add a field to a gguf.GGUFWriter with the type that llama.cpp expects; empty lists are left out."""
    from gguf import GGUFValueType

    kind = GGUFValueType.UINT32 if key.endswith("_token_id") else GGUFValueType.get_type(value)
    if value != []:
        writer.add_key_value(key, value, kind)


def _of_folder(folder: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder} has no tokenizer.json, without which llama.cpp cannot read text")
    settings = tokenizer_folder.read_settings(folder)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer_folder.set_prefix_space(tokenizer, settings, read_optional_json(folder / "config.json"))
    tokenizer_folder.add_tokens(folder, tokenizer, tokenizer_folder.read_added_tokens(folder, settings))
    written, model = json.loads(tokenizer.to_str()), read_json(file)["model"]
    name, has_prefix = _pre_name(folder, written, model)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    texts = {index: text for text, index in ids.items()}
    added = tokenizer.get_added_tokens_decoder()
    size = max(texts) + 1
    types = {index: CONTROL if token.special else USER_DEFINED for index, token in added.items()}
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": name,
        "ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(size)],
        "ggml.token_type": [types.get(index, NORMAL if index in texts else UNUSED) for index in range(size)],
        "ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "ggml.add_space_prefix": has_prefix,
    }
    for ours, theirs in SPECIAL_IDS.items():
        index = ids.get(tokenizer_folder.token_text(settings.get(f"{ours}_token")) or "")
        if index is not None:
            fields[f"ggml.{theirs}"] = index
    bos = fields.get("ggml.bos_token_id")
    fields["ggml.add_bos_token"] = bos is not None and tokenizer.encode("a").ids[:1] == [bos]
    templates = tokenizer_folder.read_templates(folder, settings)
    more = {f"{TEMPLATE}.{one}": text for one, text in templates.items() if one != "default"}
    more |= {TEMPLATE: templates["default"]} if "default" in templates else {}
    return {f"{PREFIX}{key}": value for key, value in fields.items()} | more


def _pre_name(folder: Path, written: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str, bool]:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer, and whether it puts a space before a text. UserError if
    llama.cpp does not know it."""
    if model.get("type") == "BPE" and not model.get("byte_fallback"):
        normalizer, ignores = (written["normalizer"] or {}).get("type"), bool(model.get("ignore_merges"))
        own = _steps(written["pre_tokenizer"])
        for name in ("smollm", "gpt-2", *SPLITS):
            for has_prefix in (False, True):
                is_same = own == _steps(json.loads(pre_tokenizer(name, has_prefix).__getstate__()))
                if is_same and ignores == (name in WHOLE_WORDS) and normalizer == ("NFC" if name == "qwen2" else None):
                    return name, has_prefix
    raise UserError(
        f"the tokenizer of {folder} cannot be written for llama.cpp: name the target as a .gguf file, whose"
        " tokenizer is copied"
    )


def _steps(written: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer without `trim_offsets`, which changes no tokens."""
    steps: Sequence[Mapping[str, Any]] = [] if written is None else written.get("pretokenizers", [written])
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
