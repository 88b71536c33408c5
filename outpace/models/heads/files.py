"""Opens the files of a head; its tensors have the same names in every layout.

A head is a folder with config.json and safetensors or a pickle of tensors, a .gguf file of the architecture eagle3 or
dflash, or an MTP layer in the files of its target. Layer 0 is called `midlayer` in EAGLE-3's own files and `layers.0`
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError, require
from outpace.models.files.checkpoint import INDEX, MEDUSA, SINGLE, Checkpoint
from outpace.models.files.gguf.config import (
    EXPERT_PARTS,
    HARMLESS,
    NEUTRAL,
    SHARED_GATE,
    expert_entry,
    expert_names,
    read_model,
    read_scaling,
    shortest_decimal,
    unknown_metadata,
)
from outpace.models.files.gguf.header import GgufHeader, TensorEntry, ggml_type, open_gguf_model
from outpace.models.files.gguf.source import can_read, deinterleave_rope, dequantise
from outpace.models.files.reading import DTYPES, check_file, read_json, read_optional_json
from outpace.models.heads.config import DFLASH, EAGLE3, MIMO_MTP, QWEN_MTP, head_kind, kind_of_mtp, verifier_of
from outpace.models.heads.fields import agreed
from outpace.models.llama.config.fields import FULL, SLIDING, ReadFields, size
from outpace.models.llama.weight_sources import StoredMatrix

GGUF_KINDS = {"eagle3": EAGLE3, "dflash": DFLASH}  # by general.architecture
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
INTEGERS = ("I64", "I32", "BOOL")
INTEGER_TENSORS = ("d2t",)  # all others are floats
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # used in training only
GGUF_NAMES = {
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"eagle3": "input_norm", "dflash": "hidden_norm"}  # the meaning of enc.output_norm, by architecture
INTERLEAVED = ("attn_q", "attn_k")  # in eagle3, the two rows of a rotary pair are neighbours
MTP_NAMES = {MIMO_MTP: "mtp_layers.", QWEN_MTP: "mtp."}  # beginnings of names, after "model." or nothing
GGUF_MTP_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "embed_norm",
    "nextn.hnorm": "hidden_norm",
    "nextn.shared_head_norm": "norm",
    "nextn.shared_head_head": "lm_head",
    "nextn.embed_tokens": "embed_tokens",
}
MEDUSA_HEADS = "medusa_head."
BLOCK_OF_MEDUSA = re.compile(r"^(\d+)\.(\d+)\.linear\.")  # numbers of head and block
OUTPUT_OF_MEDUSA = re.compile(r"^(\d+)\.\d+\.(?=weight$)")
RENAMED = {  # the first that a name begins with counts
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
    "mtp_layers.0.input_proj.": "fc.",
    "mtp_layers.0.token_layernorm.": "embed_norm.",
    "mtp_layers.0.hidden_layernorm.": "hidden_norm.",
    "mtp_layers.0.final_layernorm.": "norm.",
    "mtp_layers.0.": "layers.0.",
    "mtp.pre_fc_norm_embedding.": "embed_norm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.": "",
    "embed_layernorm.": "embed_norm.",
    "post_embedding_layernorm.": "embed_norm.",
    "embedding_layernorm.": "embed_norm.",  # this and the next three by speculators
    "pre_lm_head_layernorm.": "norm.",
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
}


def kind_of_head(path: Path) -> str | None:
    """Return the kind of head in a folder or .gguf file; None if it holds something else."""
    if path.suffix.lower() == ".gguf":
        return GGUF_KINDS.get(str(open_gguf_model(path).metadata.get("general.architecture")))
    config = read_optional_json(path / "config.json")
    kind = head_kind(config)
    may_be_older = config.get("num_hidden_layers") == 1 and "outpace" not in config  # known by its tensors only
    return kind or (head_kind(config, open_head(path).tensors) if may_be_older else None)


def target_of_head(path: Path) -> str | None:
    """Return the target that a head in the format of speculators names; None if it names none."""
    try:
        return verifier_of(read_optional_json(path / "config.json")) if path.is_dir() else None
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error


class HeadTensor(NamedTuple):
    """A tensor of a file. `kind`: its type; `read` returns its values as float32 or integers, `weight` a matrix as the
    file stores it."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]
    weight: Callable[[], StoredMatrix | np.ndarray]


class HeadFiles:
    """A head's config.json fields and tensors. `is_gguf`: they are those of a .gguf file, whose `d2t` holds token ids
    instead of offsets. `notices`: sentences for users about how the file was read."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: Mapping[str, HeadTensor],
        is_gguf: bool = False,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.path, self.config, self.is_gguf, self.notices = path, config, is_gguf, notices
        self.tensors: dict[str, HeadTensor] = {}
        names: dict[str, str] = {}
        for name, tensor in tensors.items():
            canonical = _canonical_name(name)
            if canonical in names:
                raise UserError(f"{path} holds both {names[canonical]!r} and {name!r}, two names of one tensor")
            names[canonical], self.tensors[canonical] = name, tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as float32, or as integers if it is stored so."""
        return self._tensor(name).read()

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as the file stores it, anything else as `array`."""
        return self._tensor(name).weight()

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the file holds exactly these tensors; those for training only may be there too."""
        for name, expected in shapes.items():
            file, found, kind, *_ = self._tensor(name)
            if found != expected:
                raise UserError(f"{file}: tensor {name!r} has shape {list(found)}, expected {list(expected)}")
            if (kind in INTEGERS) != (name in INTEGER_TENSORS):
                raise UserError(f"{file}: tensor {name!r} has type {kind}, which is not supported")
        if unknown := sorted(self.tensors.keys() - shapes.keys() - set(UNUSED)):
            raise UserError(f"{self.path} holds the tensor {unknown[0]!r}, which its config.json does not call for")

    def _tensor(self, name: str) -> HeadTensor:
        if name not in self.tensors:
            raise UserError(f"{self.path} holds no tensor {name!r}")
        return self.tensors[name]


def open_head(path: Path) -> HeadFiles:
    """Open a head's folder or .gguf file; UserError if it is missing, damaged or of an unreadable format."""
    if path.suffix.lower() == ".gguf":
        return _open_gguf(open_gguf_model(path))
    pickled = next((path / name for name in PICKLES if (path / name).exists()), None)
    if pickled and not any((path / name).exists() for name in (SINGLE, INDEX, MEDUSA)):
        return HeadFiles(path, read_json(path / "config.json"), _read_pickle(pickled))
    checkpoint = Checkpoint.open(path)
    config, names = checkpoint.config, list(checkpoint.names())
    if any(name.startswith(MEDUSA_HEADS) for name in names):  # the file also holds the whole target
        names = [name for name in names if name.startswith(MEDUSA_HEADS)]
    return HeadFiles(path, config, {name: _folder_tensor(checkpoint, name) for name in names})


def open_mtp(path: Path) -> HeadFiles:
    """Open the MTP layer in a target's files; the result has no tensors if there is none. Its norms have their whole
    weights, which a checkpoint of Qwen3.5 stores minus one."""
    if path.suffix.lower() == ".gguf":
        header = open_gguf_model(path)
        model = read_model(header)
        start = f"blk.{model.config.num_layers}."
        tensors = {
            inner: _gguf_tensor(name, expert_entry(entry, inner, model.config), model.config.head_dim, ())
            for name, entry in header.tensors.items()
            if name.startswith(start)
            for inner in _canonical_mtp_names(name.removeprefix(start), entry)
        }
        gate = f"layers.0.mlp.{SHARED_GATE}"  # llama.cpp's has one dimension less
        if gate in tensors:
            tensors[gate] = _as_row(tensors[gate])
        return HeadFiles(path, _mtp_config(model.settings), tensors, True)
    checkpoint = Checkpoint.open(path)
    kind = kind_of_mtp(checkpoint.config)
    names = [name for name in checkpoint.names() if kind and name.removeprefix("model.").startswith(MTP_NAMES[kind])]
    tensors = {name: _folder_tensor(checkpoint, name) for name in names}
    if kind == QWEN_MTP:
        tensors = {name: _plus_one(one) if len(one.shape) == 1 else one for name, one in tensors.items()}
    return HeadFiles(path, _mtp_config(checkpoint.config), tensors)


def _mtp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json fields of a target's MTP layer."""
    kind = kind_of_mtp(config)
    types = {"layer_types": [FULL]} if kind == QWEN_MTP else {}
    return {**config, **types, "architectures": [kind], "num_hidden_layers": 1, "mlp_only_layers": None}


def _plus_one(tensor: HeadTensor) -> HeadTensor:
    def read() -> np.ndarray:
        return tensor.read() + np.float32(1)

    return tensor._replace(read=read, weight=read)


def _as_row(tensor: HeadTensor) -> HeadTensor:
    def read() -> np.ndarray:
        return tensor.read()[None]

    return tensor._replace(shape=(1, *tensor.shape), read=read, weight=read)


def _canonical_mtp_names(name: str, entry: TensorEntry) -> list[str]:
    """Translate the name of a tensor in llama.cpp's block of an MTP layer, which may hold matrices of all experts."""
    stem, _, kind = name.rpartition(".")
    if outer := GGUF_MTP_NAMES.get(stem):
        return [f"{outer}.{kind}"]
    inner = expert_names(name, entry) or [f"{(EXPERT_PARTS | GGUF_NAMES).get(stem, stem)}.{kind}"]
    return [f"layers.0.{one}" for one in inner]


def _canonical_name(name: str) -> str:
    name = name.removeprefix("model.").removeprefix(MEDUSA_HEADS)
    name = OUTPUT_OF_MEDUSA.sub(r"lm_heads.\1.", BLOCK_OF_MEDUSA.sub(r"blocks.\1.layers.\2.", name))
    for other, ours in RENAMED.items():
        if name.startswith(other):
            return ours + name.removeprefix(other)
    return name


def _folder_tensor(checkpoint: Checkpoint, name: str) -> HeadTensor:
    kind = checkpoint.held(name).kind

    def read() -> np.ndarray:
        if kind not in (*DTYPES, *INTEGERS):
            raise UserError(f"{checkpoint.file_of(name)}: tensor {name!r} has type {kind}, which is not supported")
        return checkpoint.raw(name).values if kind in INTEGERS else checkpoint.array(name)

    weight = partial(checkpoint.weight, name) if kind in DTYPES else read
    return HeadTensor(checkpoint.file_of(name), checkpoint.shape(name), kind, read, weight)


def _read_pickle(file: Path) -> dict[str, HeadTensor]:
    """Read a pickle of tensors by `torch.load(weights_only=True)`, which runs no code and refuses other objects."""
    require(f"reading {file.name}, which is a pickle,", "torch")
    import torch

    check_file(file)
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zipfile or torch
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{file} is damaged or holds other objects than tensors (no code in it was run): {reason:.200}"
        ) from error
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise UserError(f"{file} is not a state dict: it must map names to tensors")

    def values(name: str, tensor: torch.Tensor) -> np.ndarray:
        found = (tensor.float() if tensor.is_floating_point() else tensor).detach().contiguous().numpy()
        if not np.isfinite(found).all():
            raise UserError(f"{file} is damaged: tensor {name!r} holds values that are not finite")
        return found

    tensors = {}
    for name, tensor in held.items():
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not is_plain or tensor.is_quantized or tensor.is_complex():
            form = f"{str(tensor.layout).removeprefix('torch.')} {str(tensor.dtype).removeprefix('torch.')}"
            raise UserError(f"{file}: tensor {name!r} is stored as {form} ({tensor.device}), which is not supported")
        read, kind = partial(values, name, tensor), "F32" if tensor.is_floating_point() else INTEGERS[0]
        tensors[str(name)] = HeadTensor(file, tuple(tensor.shape), kind, read, read)
    return tensors


def _open_gguf(header: GgufHeader) -> HeadFiles:
    """Open a .gguf file as llama.cpp's converter writes it: d2t holds token ids, and rotary pairs are interleaved."""
    kind = str(header.metadata.get("general.architecture"))
    own = ReadFields(
        {key.removeprefix(f"{kind}."): value for key, value in header.metadata.items() if key.startswith(f"{kind}.")}
    )
    try:
        width, heads, _ = [
            size(own, name) for name in ("embedding_length", "attention.head_count", "feed_forward_length")
        ]
        head_dim = size(own, "attention.key_length", max(width // heads, 1))
        for name in ("attention.value_length", "rope.dimension_count"):
            if size(own, name, head_dim) != head_dim:
                raise UserError(f"{name} is {own[name]}, it must be attention.key_length, {head_dim}")
        taps = agreed(own, ("target_layers", "extract_layers"), lambda fields, name: fields[name])
    except UserError as error:
        raise UserError(f"{header.path}: {kind}.{error}") from error
    vocabulary = header.metadata.get("tokenizer.ggml.tokens")
    notices: tuple[str, ...] = ()
    names = {name: _canonical_gguf_name(name, kind) for name in header.tensors}
    metadata = {"attention.key_length": head_dim, "context_length": 2048, **own}
    scaling = read_scaling(header, ReadFields(metadata, own.asked))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if "layers.0.self_attn.q_norm.weight" in names.values() else "llama",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": own.get("block_count", 1),
        "rms_norm_eps": shortest_decimal(own.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": shortest_decimal(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": scaling,
        "vocab_size": own.get("vocab_size", len(vocabulary) if isinstance(vocabulary, Sized) else None),
        "target_hidden_size": own.get("target_hidden_size"),
        "norm_before_residual": own.get("norm_before_residual"),
        "norm_before_fc": own.get("norm_before_fc"),
        "eagle_aux_hidden_state_layer_ids": taps and taps[1],
    }
    if (window := own.get("attention.sliding_window")) and isinstance(
        pattern := own.get("attention.sliding_window_pattern"), list
    ):
        config |= {"sliding_window": window, "layer_types": [SLIDING if slides else FULL for slides in pattern]}
    elif window:
        raise UserError(f"{header.path}: {kind}.attention.sliding_window {window!r:.50} needs a pattern of its layers")
    if kind == "dflash":
        place, older = "tokenizer.ggml.mask_token_id", own.get("mask_token_id")
        mask = header.metadata.get(place, older)
        if older not in (None, mask):
            raise UserError(f"{header.path}: {place} is {mask!r:.50}, but {kind}.mask_token_id is {older!r:.50}")
        if taps and place not in header.metadata:  # files of the first converter count layers from 0
            config["target_layer_ids"] = config.pop("eagle_aux_hidden_state_layer_ids")
            notices = (f"without {place}, {kind}.{taps[0]} was read as outputs of layers that are counted from 0",)
        config |= {
            "architectures": ["DSparkDraftModel" if "markov_w1.weight" in header.tensors else "DFlashDraftModel"],
            "mask_token_id": mask,
            "is_causal": own.get("attention.causal"),
            **{name: own.get(name) for name in ("block_size", "sample_from_anchor", "markov_rank")},
        }
    neutral = {name: values for name, values in NEUTRAL.items() if name not in own.asked}
    ignored = unknown_metadata(header, kind, own, own.asked | {*HARMLESS, "context_length"}, neutral)
    config |= {name: header.metadata[name] for name in ignored}  # for the reader's notice
    if "d2t" in header.tensors:
        config["draft_vocab_size"] = header.tensors["d2t"].shape[0]
    rotated = INTERLEAVED if kind == "eagle3" else ()
    tensors = {names[name]: _gguf_tensor(name, entry, head_dim, rotated) for name, entry in header.tensors.items()}
    tensors.pop("rope_freqs.weight", None)  # in `scaling`
    return HeadFiles(header.path, config, tensors, True, notices)


def _canonical_gguf_name(name: str, architecture: str) -> str:
    """Translate a tensor name of llama.cpp."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        known = GGUF_NAMES | {"enc.output_norm": NORMS[architecture]}
        return f"{known.get(stem, stem)}.{kind}" if stem else name
    number, _, part = stem.removeprefix("blk.").partition(".")
    return f"layers.{number}.{GGUF_NAMES.get(part, part)}.{kind}"


def _gguf_tensor(name: str, entry: TensorEntry, head_dim: int, rotated: Sequence[str]) -> HeadTensor:
    kind = ggml_type(entry.kind).name
    if kind in INTEGERS:
        return HeadTensor(entry.path, entry.shape, kind, lambda: _integers(entry, kind), lambda: _integers(entry, kind))
    is_rotated = any(f".{part}." in name for part in rotated)

    def read() -> np.ndarray:
        if not can_read(entry.kind):
            raise UserError(f"{entry.path}: tensor {name!r} has type {kind}, which is not supported")
        found = dequantise(entry.kind, entry.raw().reshape(entry.shape[0] if len(entry.shape) > 1 else 1, -1))
        if not found.is_finite():
            raise UserError(f"{entry.path} is damaged: tensor {name!r} holds values that are not finite")
        values = found.float32().reshape(entry.shape)
        return np.ascontiguousarray(deinterleave_rope(values, len(values) // head_dim)) if is_rotated else values

    def weight() -> StoredMatrix | np.ndarray:
        if len(entry.shape) != 2 or not can_read(entry.kind):
            return read()
        rows, columns = entry.shape
        order = np.arange(rows, dtype=np.int32)
        order = deinterleave_rope(order, rows // head_dim) if is_rotated else order
        return StoredMatrix(entry.path, name, kind, entry.raw().reshape(rows, -1), order, columns, read, entry.forget)

    return HeadTensor(entry.path, entry.shape, kind, read, weight)


def _integers(entry: TensorEntry, kind: str) -> np.ndarray:
    return entry.raw().view({"I64": "<i8", "I32": "<i4"}[kind]).reshape(entry.shape)
