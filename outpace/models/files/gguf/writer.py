"""Writes a model folder as a GGUF file of a given precision, for llama.cpp.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names and row orders are those read by
`models/files/gguf/config.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.cache import cache_folder, exclusive_lock, identity, new_file
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.gguf.config import LAYER_PARTS, OUTER_PARTS
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.tokenizer_fields import PREFIX, add_field
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TABLES = ("token_embd", "output")  # stored with 8 bits at least, as by llama.cpp's own converter
TABLE_KIND = "Q8_0"
MAX_NAME = 80  # characters of the model's name in the file's name


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
        if name.startswith("blk.") and len(entry.shape) == 2:
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
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    config = from_dict(checkpoint.config)
    writer = GGUFWriter(file, architecture)
    _add_fields(writer, config)
    for key, value in fields.items():
        add_field(writer, key, value)
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
