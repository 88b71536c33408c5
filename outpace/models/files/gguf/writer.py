"""Writes a model folder as a GGUF file of a given precision, for llama.cpp, and the fields of its tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names and row orders are those read by
`models/files/gguf/config.py`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files import tokenizer_folder
from outpace.models.files.cache import cache_folder, exclusive_lock, identity, new_file
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.gguf.config import LAYER_PARTS, OUTER_PARTS
from outpace.models.files.gguf.header import open_gguf, open_gguf_model
from outpace.models.files.gguf.tokenizer import (
    COMPOSING,
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
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TABLES = ("token_embd", "output")  # stored with 8 bits at least, as by llama.cpp's own converter
TABLE_KIND = "Q8_0"
MAX_NAME = 80  # characters of the model's name in the file's name
PREFIX = "tokenizer."
TOKENS, TYPES = f"{PREFIX}ggml.tokens", f"{PREFIX}ggml.token_type"
NORMAL = 1  # a value of tokenizer.ggml.token_type


def gguf_file(spec: str | Path | None, kind: str = "") -> Path:
    """Return a GGUF file of the model with matrices of type `kind`, as Q8_0, Q4_1 or F32; without `kind`, of its own
    type, or of Q8_0 if the model is not a GGUF file.

    It is the file that `spec` names if it has that type, else one converted to the cache folder, once and without a
    vocabulary. UserError for a model that cannot be converted, or if writing fails.
    """
    own = shipped_model() if spec is None else Path(spec).expanduser()
    if own.is_file() and kind in ("", main_kind(own)):
        return own
    kind = kind or "Q8_0"
    folder = resolve(None if spec is None else str(spec))
    sources = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    file = cache_folder() / "gguf" / f"{folder.name[:MAX_NAME]}-{identity(sources)}-{kind}.gguf"
    if not file.is_file():
        with exclusive_lock(file):
            if not file.is_file():
                with Checkpoint.open(folder) as checkpoint:
                    write_file(checkpoint, kind, file)
    return file


def main_kind(file: Path) -> str:
    """Return the type of most of the layers' matrices, by their size."""
    from gguf.constants import GGMLQuantizationType

    counts: Counter[int] = Counter()
    for name, entry in open_gguf(file).tensors.items():
        if name.startswith("blk.") and len(entry.shape) > 1:
            counts[entry.kind] += math.prod(entry.shape)
    return GGMLQuantizationType(counts.most_common(1)[0][0]).name if counts else ""


def write_file(checkpoint: Checkpoint, kind: str, file: Path, fields: Mapping[str, Any] | None = None) -> None:
    """Write an open model folder as a GGUF file, atomically: it gets its name once it is complete.

    `fields`: the file's name and tokenizer; None: no vocabulary. UserError as `gguf_file`.
    """
    architecture = _architecture(checkpoint)
    with new_file(file) as part:
        _write(checkpoint, architecture, kind, part, fields or {f"{PREFIX}ggml.model": "no_vocab"})


def _architecture(checkpoint: Checkpoint) -> str:
    """Return llama.cpp's name of the architecture; UserError for a model that it would compute differently."""
    config = checkpoint.read_config()
    model_type = str(checkpoint.config.get("model_type", "llama"))
    is_plain = config.rope_scaling is None and all(window is None for window in config.windows)
    if model_type not in ARCHITECTURES or not is_plain or not all(config.rotary_layers):
        allowed = f"{', '.join(ARCHITECTURES)} without scaled positions and windows; or name a GGUF file of that type"
        raise UserError(f"{checkpoint.path} cannot be written for llama.cpp, allowed are {allowed}")
    return ARCHITECTURES[model_type]


def _write(checkpoint: Checkpoint, architecture: str, kind: str, file: Path, fields: Mapping[str, Any]) -> None:
    """Write all tensors, with one of them in memory at a time."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    config = from_dict(checkpoint.config)
    writer = GGUFWriter(file, architecture)
    _add_fields(writer, config)
    for key, value in fields.items():
        value_type = GGUFValueType.UINT32 if key.endswith("_token_id") else GGUFValueType.get_type(value)
        if value != []:  # a file has no empty lists
            writer.add_key_value(key, value, value_type)
    kinds = {}
    for name, shape in tensor_shapes(config).items():
        kinds[name] = GGMLQuantizationType[_kind_of(name, shape, kind)]
        size = quant_shape_to_byte_shape(shape, kinds[name])
        writer.add_tensor_info(gguf_name(name), size, np.dtype(np.uint8), math.prod(size), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, quantisation in kinds.items():
        values = checkpoint.array(name)
        if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            # the rows i and i + d/2 of a head rotate together and become neighbours: [heads, 2, head_dim / 2, ...]
            halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.write_tensor_data(np.ascontiguousarray(quantize(values, quantisation)))
    writer.close()


def _add_fields(writer: Any, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(2)


def gguf_name(name: str) -> str:
    """Convert a tensor's Hugging Face name to its GGUF name."""
    names = {theirs: ours for ours, theirs in (OUTER_PARTS | LAYER_PARTS).items()}
    stem, _, end = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{end}"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{names[part]}.{end}"


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return a tensor's type: float32 for norms, biases and rows that are not a whole number of blocks."""
    if len(shape) < 2 or shape[-1] % 32:
        return "F32"
    is_table = gguf_name(name).partition(".")[0] in TABLES
    return TABLE_KIND if is_table and kind.startswith("Q") else kind


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
                if (
                    is_same
                    and ignores == (name in WHOLE_WORDS)
                    and normalizer == ("NFC" if name in COMPOSING else None)
                ):
                    return name, has_prefix
    raise UserError(
        f"the tokenizer of {folder} cannot be written for llama.cpp: name the target as a .gguf file, whose"
        " tokenizer is copied"
    )


def _steps(written: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer without `trim_offsets`, which changes no tokens."""
    steps: Sequence[Mapping[str, Any]] = [] if written is None else written.get("pretokenizers", [written])
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
