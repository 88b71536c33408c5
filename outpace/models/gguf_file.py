"""Turns a GGUF file of a Llama model into a Hugging Face folder, once; later starts find the folder in the cache."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models import config as llama
from outpace.models import gguf_tokenizer
from outpace.models.checkpoint import SINGLE, Checkpoint, new_folder, temporary_prefix
from outpace.models.gguf_header import GgufHeader, open_gguf

Progress = Callable[[str, float], None]
FORMAT_VERSION = 1  # part of the folder's name: a change of what is written must raise it
ENDS_READ = 2**20  # bytes at each end of the file that go into its identity
LONGEST_NAME = 100  # characters of the file's own name in the folder's
CHUNK_VALUES = 2**22  # values dequantised at once: numpy needs several times their size for it
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Metadata that changes the arithmetic, with the values under which it changes nothing.
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.scale": (),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.finetuned": (False,),
}


def convert(path: Path, cache: Path, progress: Progress = lambda stage, fraction: None) -> Path:
    """The Hugging Face folder (float32 safetensors) for the GGUF file `path`, made under `cache` if it is not there.

    `progress(stage, fraction)` is called while it works, fraction from 0 to 1. Processes that convert the same file
    at once wait for the first. UserError: not a GGUF file, torn, not a plain Llama, or the disk refuses.
    """
    folder = cache / f"{path.stem[:LONGEST_NAME]}-{_identity(path)}-v{FORMAT_VERSION}"
    if _is_whole(folder):
        return folder
    with _only_one(folder, progress):
        if _is_whole(folder):
            return folder
        with open_gguf(path) as header:
            _write_folder(header, folder, progress)
    progress("done", 1.0)
    return folder


def _identity(path: Path) -> str:
    """A short name for this file's content, from its size, time and both ends: cheap, however large the file."""
    try:
        with path.open("rb") as stream:
            status = path.stat()
            digest = hashlib.sha256(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            digest.update(stream.read(ENDS_READ))
            stream.seek(max(0, status.st_size - ENDS_READ))
            digest.update(stream.read(ENDS_READ))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    """Whether a folder from an earlier conversion is there and nobody has taken files out of it or cut them."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.check_shapes(llama.tensor_shapes(llama.from_dict(checkpoint.config)))
    except UserError:
        return False
    return True


@contextmanager
def _only_one(folder: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock for `folder`; its holder clears away what killed conversions left. The system frees the lock."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = (folder.parent / f".{folder.name}.lock").open("wb")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    with stream:
        if _locked(stream, progress):
            for left in folder.parent.glob(glob.escape(temporary_prefix(folder)) + "*"):
                shutil.rmtree(left, ignore_errors=True)
            if folder.is_dir() and not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def _locked(stream: Any, progress: Progress) -> bool:
    """Waits for the lock; False where the system or the file system has none (then the rename decides)."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress("waiting for another conversion", 0.0)
        fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _write_folder(header: GgufHeader, folder: Path, progress: Progress) -> None:
    progress("reading", 0.0)
    settings = _config(header)
    config = _checked(header, settings)
    sources = _sources(header, config)
    tokenizer = gguf_tokenizer.build(header)
    if tokenizer.size > config.vocab_size:
        raise UserError(f"{header.path} names {tokenizer.size} tokens, its embedding has {config.vocab_size} rows")
    with new_folder(folder) as temporary:
        (temporary / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(), encoding="utf-8")
        _write_json(temporary / "config.json", settings | tokenizer.special_ids)
        _write_json(temporary / "generation_config.json", {"_from_model_config": True} | tokenizer.special_ids)
        _write_json(
            temporary / "tokenizer_config.json", tokenizer.settings | {"model_max_length": config.max_positions}
        )
        _write_weights(header, config, sources, temporary / SINGLE, progress)


def _config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of this file, as transformers writes one."""
    metadata, path = header.metadata, header.path
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path} has the architecture {architecture!r}, supported is 'llama'")
    own = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    for name, harmless in REFUSED_UNLESS.items():
        if name in own and own[name] not in harmless:
            raise UserError(f"{path}: llama.{name} {own[name]!r} is not supported")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{path} holds no tensor 'token_embd.weight'")
    eps, theta = own.get("attention.layer_norm_rms_epsilon"), own.get("rope.freq_base")
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": own.get("attention.head_count"),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own.get("attention.key_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(eps) if eps is not None else 1e-5,
        "rope_theta": _shortest(theta) if theta is not None else 10000.0,
        "max_position_embeddings": own.get("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "dtype": "float32",
    }
    return {name: value for name, value in settings.items() if value is not None}


def _shortest(value: Any) -> Any:
    """GGUF keeps float32: 1e-5 comes back as 9.99999975e-06, so the shortest decimal of the same float32 is meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _checked(header: GgufHeader, settings: Mapping[str, Any]) -> llama.LlamaConfig:
    if "max_position_embeddings" not in settings:
        raise UserError(f"{header.path}: llama.context_length is missing")
    try:
        config = llama.from_dict(settings)
    except UserError as error:
        raise UserError(f"{header.path}: {error}") from error
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if header.metadata.get(f"llama.{name}", config.head_dim) != config.head_dim:
            value = header.metadata[f"llama.{name}"]
            raise UserError(f"{header.path}: llama.{name} {value!r} is not supported, heads have {config.head_dim}")
    return config


def _sources(header: GgufHeader, config: llama.LlamaConfig) -> dict[str, str]:
    """Hugging Face name -> GGUF name; UserError if a tensor is missing, unknown or of another shape."""
    expected, sources = llama.tensor_shapes(config), {}
    for name, entry in header.tensors.items():
        target = _target_name(name)
        if target not in expected:
            raise UserError(f"{header.path}: tensor {name!r} is not supported")
        if entry.shape != expected[target]:
            shape = list(expected[target])
            raise UserError(f"{header.path}: tensor {name!r} has shape {list(entry.shape)}, expected {shape}")
        sources[target] = name
    for target in expected:
        if target not in sources:
            raise UserError(f"{header.path} holds no tensor for {target!r}")
    return sources


def _target_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_PARTS:
        return f"model.layers.{parts[1]}.{LAYER_PARTS[parts[2]]}.{parts[3]}"
    return f"{OUTER_PARTS.get(parts[0], '')}.{'.'.join(parts[1:])}"


def _write_weights(
    header: GgufHeader, config: llama.LlamaConfig, sources: Mapping[str, str], file: Path, progress: Progress
) -> None:
    """Writes one safetensors file a tensor at a time, so that memory holds one tensor and not the model."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for target, source in sources.items():
        shape = header.tensors[source].shape
        start, end = end, end + 4 * prod(shape)
        table[target] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for target, source in sources.items():
            stream.write(_weights(header, config, source).data.cast("B"))
            progress("converting", table[target]["data_offsets"][1] / end)


def _weights(header: GgufHeader, config: llama.LlamaConfig, name: str) -> np.ndarray:
    """One tensor in float32 and in the row order of Hugging Face."""
    values = _dequantised(header, name)
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part == "attn_q":
        values = half_rotary(values, config.num_heads)
    if part == "attn_k":
        values = half_rotary(values, config.num_kv_heads)
    return np.ascontiguousarray(values, np.float32)


def half_rotary(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from llama.cpp's order, rotary pairs side by side, to pairs half a head apart."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _dequantised(header: GgufHeader, name: str) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    entry = header.tensors[name]
    kind = GGMLQuantizationType(entry.kind)
    rows = prod(entry.shape[:-1])
    raw = header.raw(name).reshape(rows, -1)  # [rows, bytes]
    values = np.empty((rows, entry.shape[-1]), np.float32)
    step = max(1, CHUNK_VALUES // entry.shape[-1])
    for start in range(0, rows, step):
        try:
            values[start : start + step] = dequantize(raw[start : start + step], kind)
        except NotImplementedError:
            raise UserError(f"{header.path}: tensor {name!r} has the unsupported quantisation {kind.name}") from None
    if not np.isfinite(values).all():
        raise UserError(f"{header.path} is damaged: tensor {name!r} holds values that are not finite")
    return values.reshape(entry.shape)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
