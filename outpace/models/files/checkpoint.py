"""Opens a model folder (config.json and safetensors files) lazily, and checks it before anything is computed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.fused_experts import FusedExperts, split_experts
from outpace.models.files.model_kind import has_language_model, language_model_names, text_config
from outpace.models.files.mxfp4 import MXFP4
from outpace.models.files.reading import (
    DTYPES,
    RawTensor,
    SafetensorsEntry,
    SafetensorsFile,
    read_json,
    read_optional_json,
)
from outpace.models.files.tokenizer_folder import read_templates
from outpace.models.llama.config.families import FAMILIES, ties_embeddings
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.weight_sources import FLOATS, StoredMatrix, StoredSize

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MEDUSA = "medusa_lm_head.safetensors"  # Medusa's heads
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_FORMATS = {  # of weights, by suffix
    ".onnx": "ONNX",
    ".xml": "OpenVINO",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".mlpackage": "Core ML",
    ".tflite": "LiteRT",
    ".litertlm": "LiteRT",
    ".engine": "TensorRT",
    ".nemo": "NeMo",
}
OTHER_RUNTIME = "`--runtime transformers`"
ORIGINAL = "name the original checkpoint or a GGUF file"
OTHER_COPIES = ("consolidated", "adapter")  # beginnings of the names of other weight files
EMBEDDING, OF_TARGET = "embedding", "target"  # config.json's outpace.embedding of a packed draft
NOTICES = "notices"  # config.json's outpace.notices: sentences about a GGUF file that was converted
EMBEDDING_NAME, OUTPUT_NAME = "model.embed_tokens.weight", "lm_head.weight"
TIED = "tie_word_embeddings"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
LAYER_FIELDS = ("full_attention_interval", "full_attn_idxs")  # which say where recurrent layers are
MIXERS = (".linear_attn.", ".conv.", ".self_attn.")  # in the names of tensors
OWN_PARTS = ("model.", "lm_head.")  # beginnings of the names of a language model's tensors
UNUSED = re.compile(r"\.rotary_emb\.|(^|\.)mtp")  # tables that are computed, and layers for multi-token prediction
LAYER = re.compile(r"model\.layers\.(\d+)\.")
COMPARED_ROWS = 4096


class UnsupportedFiles(UnsupportedModel):
    """The weights are stored in a way that no runtime of our own reads, although others may."""


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An open model folder. Tensors returned before keep their file mapped."""

    def __init__(self, path: Path, target: Any = None) -> None:
        """`target`: the open target of a draft, from which a packed draft takes what its own files leave out."""
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        self.path = path
        self.config = read_json(path / "config.json")
        has_more = has_language_model(self.config)  # the files hold other models too
        if has_more:
            self.config = text_config(self.config, path / "config.json")
        self._check_quantisation()
        files = _open_files(path)
        family = FAMILIES.get(str(self.config.get("model_type")))
        stored_names = language_model_names(files, has_more)
        names = {family.own_name(name) if family else name: stored for name, stored in stored_names.items()}
        self._places: dict[str, tuple[SafetensorsFile | TargetTensors | FusedExperts, str]]
        places = {name: (files[stored], stored) for name, stored in names.items()}
        self._places = split_experts(places, self.config.get("model_type") == "gpt_oss")
        self.target = target if lacks_embedding(self.config) else None
        if self.target is not None:
            self._add_target_tensors(self.target)
        ours = self.config.get("outpace")
        self.notices: list[str] = [*ours.get(NOTICES, ())] if isinstance(ours, Mapping) else []
        left = {name for name in {*files} - {*names.values()} if not UNUSED.search(name)}
        if others := sorted({name.removeprefix("model.").partition(".")[0] for name in left}):
            self.notices.append(f"tensors of other models in the files were ignored: {', '.join(others)}")
        if self._is_tied and self._has_other_output():  # which transformers uses too
            self.config[TIED] = False
            self.notices.append(f"{TIED} is true, and {OUTPUT_NAME} is not the embedding: it is used")
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(self._places):  # checked before anything enumerates layers
            announced = f"{path / 'config.json'}: num_hidden_layers is {layers!r:.50}"
            raise UserError(f"{announced}, but the weight files hold {len(self._places)} tensors")

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open the folder `path` and read the headers of its weight files; UserError if one is missing or damaged."""
        return cls(Path(path))

    def __exit__(self, *error: object) -> None:
        """Do nothing: a mapping is released with its last array."""

    @property
    def has_chat_template(self) -> bool:
        return bool(read_templates(self.path, read_optional_json(self.path / "tokenizer_config.json")))

    def vocabulary(self) -> dict[int, str]:
        """Return the tokens by id as tokenizer.json lists them, without building the tokenizer; empty if it lists
        none."""
        found = read_optional_json(self.path / "tokenizer.json")
        vocab, added = (found.get("model") or {}).get("vocab"), found.get("added_tokens") or ()
        tokens = {index: token for token, index in vocab.items()} if isinstance(vocab, dict) else {}
        return tokens | {entry["id"]: entry["content"] for entry in added if tokens}

    def names(self) -> list[str]:
        return sorted(self._places)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor; UserError if there is no such tensor."""
        return self._place(name)[0].path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header alone."""
        return self._entry(name).shape

    def held(self, name: str) -> StoredSize:
        entry = self._entry(name)
        return StoredSize(entry.kind, entry.end - entry.start)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored type, mapped from the file.

        Raises UserError if there is no such tensor, or if it holds nan or infinity, which no valid model does.
        """
        file, stored = self._place(name)
        value = file.tensor(stored)
        if value.is_floating_point() and value.itemsize > 1 and value.numel():  # one pass without extra memory
            self._check_finite(name, bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()))
        return value

    def array(self, name: str) -> np.ndarray:
        """Return one tensor as float32 without torch, mapped if it is stored as float32. Raises as `tensor`."""
        return self.raw(name).float32()

    def raw(self, name: str) -> RawTensor:
        """Return one tensor in its stored type without torch, mapped from the file. Raises as `tensor`."""
        value = self._mapped(name)
        self._check_finite(name, value.is_finite())
        return value

    def rounded(self, name: str, kind: str) -> RawTensor:
        """Return one tensor rounded to a type in DTYPES. Raises as `tensor`."""
        return self.raw(name).to(kind)

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as stored, with values unchecked; anything else as `array`."""
        kind, (file, stored) = self.held(name).kind, self._place(name)
        if len(self.shape(name)) != 2 or kind not in (*FLOATS, MXFP4):
            return self.array(name)
        rows, columns = self.shape(name)
        if isinstance(file, FusedExperts) and kind == MXFP4:
            data = file.blocks(stored)
        else:
            data = file.raw(stored).values.view(np.uint8)
        order = np.arange(rows, dtype=np.int32)
        read, forget = partial(self.array, name), partial(self._forget, name)
        return StoredMatrix(self.file_of(name), name, kind, data, order, columns, read, forget)

    def read_config(self) -> LlamaConfig:
        """Return the configuration of the model in this folder.

        Raises UserError unless the files hold exactly its tensors, in its shapes; tensors that change no text may be
        there too.
        """
        try:
            config = from_dict(self.config)
        except UserError as error:
            raise type(error)(f"{self.path}: {error}") from error
        shapes, others = tensor_shapes(config), set[str]()
        self.check_shapes(shapes)
        for name in self.names():
            if name in shapes or name == OUTPUT_NAME or UNUSED.search(name):
                continue
            if not name.startswith(OWN_PARTS):
                others.add(name.partition(".")[0])
            elif not name.endswith(".bias") or self.array(name).any():
                said = f"a model with {self._label(name)} does not use it; {OTHER_RUNTIME} ignores it"
                raise UserError(f"{self.file_of(name)} holds the tensor {name!r}, and {said}")
        if others:
            self.notices.append(f"tensors of other models in the files were ignored: {', '.join(sorted(others))}")
        return config

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every tensor of `shapes` exists with that shape and a floating-point type."""
        for name, expected in shapes.items():
            entry, where = self._entry(name), f"{self.file_of(name)}: tensor {name!r}"
            if entry.shape != tuple(expected):
                fields = [field for field in SIZES if field in self.config]
                if any(mixer in name for mixer in MIXERS):
                    fields += [field for field in self.config if field.startswith(("linear_", "conv_L"))]
                said = ", ".join(f"{field} {self.config[field]!r:.20}" for field in fields)
                reason = self._other_parts(name) or f" ({said})"
                raise UserError(f"{where} has shape {list(entry.shape)}, expected {list(expected)}{reason}")
            if entry.kind not in (*DTYPES, MXFP4):
                allowed, parts = f"allowed are {', '.join(sorted(DTYPES))}", self._other_parts(name)
                scaled = f"; weights of 8 bits and fewer go with scales, which {OTHER_RUNTIME} may know to apply"
                kind = UserError if parts else UnsupportedFiles  # transformers ignores scales that config.json hides
                raise kind(f"{where} has type {entry.kind}, {allowed}{parts or scaled}")

    def _add_target_tensors(self, target: Any) -> None:
        """Take embedding and output layer from the target; UserError, naming both, if they cannot serve the draft."""
        own, theirs = from_dict(self.config), from_dict(target.config)
        for name in ("hidden_size", "vocab_size", "tie_embeddings"):
            here, there = getattr(own, name), getattr(theirs, name)
            if here != there:
                reason = f"cannot share embeddings with {target.path} ({name} {there})"
                raise UserError(f"the draft {self.path} ({name} {here}) {reason}")
        kind = next(iter(file.entries[stored].kind for file, stored in self._places.values()))
        names = [name for name in (EMBEDDING_NAME, OUTPUT_NAME) if name in tensor_shapes(own)]
        self._places |= {name: (TargetTensors(target, names, kind), name) for name in names}

    @property
    def _is_tied(self) -> bool:
        return ties_embeddings(self.config)

    def _has_other_output(self) -> bool:
        """Return whether there is an output layer with other values than the embedding."""
        if OUTPUT_NAME not in self.names() or EMBEDDING_NAME not in self._places:
            return False
        names = (EMBEDDING_NAME, OUTPUT_NAME)
        entries = [self._entry(name) for name in names if name in self._places]
        if len({entry.shape for entry in entries}) + len(entries) != 3 or not all(e.kind in DTYPES for e in entries):
            return True
        pair = [self._mapped(name) for name in names]
        for start in range(0, len(pair[0].values), COMPARED_ROWS):
            one, other = (held._replace(values=held.values[start : start + COMPARED_ROWS]).float32() for held in pair)
            if not np.array_equal(one, other):
                return True
        self._forget(*names)
        return False

    def _label(self, name: str) -> str:
        """Return the field of config.json, with its value, that decides whether a model has this tensor."""
        layer, count = LAYER.match(name), self.config.get("num_hidden_layers")
        family = FAMILIES.get(str(self.config.get("model_type")))
        is_known = layer is None or any(other.startswith(layer[0]) for other in self._places)
        field = TIED if name == OUTPUT_NAME else "model_type"
        if layer and not (is_known and isinstance(count, int) and int(layer[1]) < count):
            field = "num_hidden_layers"
        elif layer and name.endswith(".bias") and family:
            place, fixed = ("mlp", family.mlp_bias) if ".mlp." in name else ("attention", family.qkv_bias)
            field = f"{place}_bias" if fixed is None else field
        elif layer and family and family.recurrence and any(mixer in name for mixer in MIXERS):
            kinds = self.config.get("layer_types")
            if isinstance(kinds, list):  # as long as there are layers
                return f"layer_types[{layer[1]}] {kinds[int(layer[1])]!r:.80}"
            field = next((one for one in LAYER_FIELDS if one in self.config), field)
        return f"{field} {self.config.get(field)!r:.80}"

    def _other_parts(self, name: str) -> str:
        """Return a phrase about tensors next to a weight that is quantised or adapted; "" if there are none."""
        stem = name.removesuffix("weight")
        found = [other.removeprefix(stem) for other in sorted(self._places) if other.startswith(stem)]
        parts = ", ".join(part for part in found if part not in ("", "weight", "bias"))
        said = f"; there are {parts:.100} of it, so it is quantised or adapted, which config.json does not say"
        return f"{said}: {ORIGINAL}" if parts and name.endswith(".weight") else ""

    def _mapped(self, name: str) -> RawTensor:
        file, stored = self._place(name)
        return file.raw(stored)

    def _forget(self, *names: str) -> None:
        """Release the memory of tensors that were read as arrays."""
        for name in names:
            file, stored = self._place(name)
            file.forget(stored)

    def _check_finite(self, name: str, is_finite: bool) -> None:
        if not is_finite:
            raise UserError(f"{self.file_of(name)} is damaged: tensor {name!r} holds values that are not finite")

    def _entry(self, name: str) -> SafetensorsEntry:
        file, stored = self._place(name)
        return file.entries[stored]

    def _place(self, name: str) -> tuple[SafetensorsFile | TargetTensors | FusedExperts, str]:
        """Return the file that holds a tensor, and its name there; of two tied tensors, the files may hold either."""
        if name == EMBEDDING_NAME and name not in self._places and OUTPUT_NAME in self._places and self._is_tied:
            name = OUTPUT_NAME
        if name not in self._places:
            reason = self._other_parts(name) or f", which a model with {self._label(name)} has"
            if lacks_embedding(self.config):
                reason = "; the target has it: load this folder as its draft"
            raise UserError(f"{self.path} holds no tensor {name!r}{reason}")
        return self._places[name]

    def _check_quantisation(self) -> None:
        """Raise UnsupportedFiles for a quantised model, other than by MXFP4, which the tensors themselves show."""
        given = self.config.get("quantization_config")
        if isinstance(given, Mapping) and given.get("quant_method") == MXFP4.lower():
            del self.config["quantization_config"]
        for name in ("quantization_config", "compression_config"):
            found = self.config.get(name)
            if found:
                method = found.get("quant_method") if isinstance(found, Mapping) else found
                form = found.get("format") if isinstance(found, Mapping) else None
                said = f"{name} {method!r:.50}" + (f", format {form!r:.50}" if form else "")
                raise UnsupportedFiles(f"{self.path} is quantised ({said}): {OTHER_RUNTIME} may run it, or {ORIGINAL}")


class TargetTensors:
    """Tensors of an open target, rounded to the type `kind` of its packed draft, whose file they are missing in."""

    def __init__(self, target: Any, names: Sequence[str], kind: str) -> None:
        self.path, self._target, self._kind = target.path, target, kind
        shapes = {name: target.shape(name) for name in names}
        size = np.dtype(DTYPES[kind]).itemsize
        self.entries = {name: SafetensorsEntry(kind, shape, 0, size * prod(shape)) for name, shape in shapes.items()}
        self._rounded: dict[str, RawTensor] = {}

    def raw(self, name: str) -> RawTensor:
        if name not in self._rounded:  # an embedding is read again as the output layer
            self._rounded[name] = self._target.rounded(name, self._kind)
        return self._rounded[name]

    def tensor(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(np.require(self.raw(name).values, requirements="W"))
        return tensor.view(torch.bfloat16) if self._kind == "BF16" else tensor

    def forget(self, name: str) -> None:
        """Do nothing: what was read is released with this object."""


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """Open the folder's weight files; return the file of each tensor."""
    for name in (SINGLE, MEDUSA):
        if os.path.lexists(path / name):
            file = SafetensorsFile(path / name)
            return dict.fromkeys(file.entries, file)
    if not os.path.lexists(path / INDEX):
        is_adapted = (path / "adapter_config.json").is_file()  # transformers may load its model and merge it
        found = folder_contents(path) or "only safetensors weights can be read: download them"
        found += f"; {OTHER_RUNTIME} may do so" if is_adapted else ""
        raise (UnsupportedFiles if is_adapted else UserError)(f"{path} holds neither {SINGLE} nor {INDEX}; {found}")
    shards = read_index(path / INDEX)
    if missing := sorted(shard for shard in set(shards.values()) if not os.path.lexists(path / shard)):
        raise UserError(f"{path / missing[0]} does not exist, although {INDEX} names it: download it too")
    files = {shard: SafetensorsFile(path / shard) for shard in sorted(set(shards.values()))}
    tensors = {name: file for file in files.values() for name in file.entries}
    for name, shard in shards.items():  # which decide between files that hold the same tensor
        if name not in files[shard].entries:
            raise UserError(f"{path / shard} holds no tensor {name!r}, although {INDEX} says so")
        tensors[name] = files[shard]
    return tensors


def lacks_embedding(config: Mapping[str, Any]) -> bool:
    """Return whether this is the config of a packed draft, which uses its target's embeddings."""
    ours = config.get("outpace")
    return isinstance(ours, Mapping) and ours.get(EMBEDDING) == OF_TARGET


def weight_files(path: Path) -> list[Path]:
    """List the files with the weights of a folder's model: other copies of them are left out."""
    found = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith(OTHER_COPIES)]
    return [file for file in found if file.name == SINGLE] or found


def folder_contents(path: Path) -> str | None:
    """Describe a folder as `other_contents`; name the file or folder in it that may be meant."""
    found = sorted(file for place in ("*", "*/*", "snapshots/*/*") for file in path.glob(place))
    if gguf := [file for file in found if file.parent == path and file.suffix == ".gguf"]:
        return f"name its GGUF file itself, {gguf[0]}"
    base = None
    with suppress(UserError):
        base = read_optional_json(path / "adapter_config.json").get("base_model_name_or_path")
    if contents := other_contents([file.relative_to(path).as_posix() for file in found], base):
        return contents
    inside = [file.parent for file in found if file.name == "config.json" and file.parent != path]
    return f"name the folder of the model itself, {inside[0]}" if inside and path / "config.json" not in found else None


def other_contents(names: Sequence[str], base: object = None) -> str | None:
    """Describe what files without a readable model hold instead, with advice; None if that is unknown. `base`: the
    model of an adapter."""
    top = sorted(name for name in names if "/" not in name)
    if "adapter_config.json" in top:
        merged = f"merge it into its model{f' ({base!s:.100})' if base else ''}, and name the result"
        return f"it holds an adapter and no model: {merged}"
    if "model_index.json" in top:
        return "it holds a diffusion model, which outpace does not run"
    if "config.json" in top and (named := [name for name in top if name.endswith(".safetensors")]):
        return f"its weights must be named {SINGLE}, or be listed in {INDEX}, and {named[0]} is not"
    if other := [name for name in names if PurePosixPath(name).suffix in OTHER_FORMATS]:
        kind = OTHER_FORMATS[PurePosixPath(other[0]).suffix]
        return f"it holds weights for {kind} ({other[0]}), which outpace does not read: {ORIGINAL}"
    if pickled := [name for name in top if name.endswith(PICKLED)]:
        rule = "reading them can run any code and nothing is executed from a file; save the model as safetensors"
        return f"it holds pickled weights only ({pickled[0]}): {rule}"
    return None


def read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor from an index of several weight files; UserError if it is invalid."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{file} has no weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{file}: weight_map names {shard!r:.100} for {name!r:.100}, it must be a file next to it")
    return shards
