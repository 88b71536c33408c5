"""Opens a model folder (config.json and safetensors files) lazily, and checks it before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files.model_kind import has_language_model, language_model_names, text_config
from outpace.models.files.reading import (
    DTYPES,
    RawTensor,
    SafetensorsEntry,
    SafetensorsFile,
    read_json,
    read_optional_json,
)
from outpace.models.files.tokenizer_folder import read_templates
from outpace.models.llama.config.footprint import FLOATS, StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MEDUSA = "medusa_lm_head.safetensors"  # Medusa's heads
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_RUNTIME = "`--runtime transformers`"
EMBEDDING, OF_TARGET = "embedding", "target"  # config.json's outpace.embedding of a packed draft


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An open model folder. Tensors returned before keep their file mapped."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        self.path = path
        self.config = read_json(path / "config.json")
        has_more = has_language_model(self.config)  # the files hold other models too
        if has_more:
            self.config = text_config(self.config, path / "config.json")
        self._check_quantisation()
        files = _open_files(path)
        names = language_model_names(files) if has_more else {name: name for name in files}
        self._places = {name: (files[stored], stored) for name, stored in names.items()}
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

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as stored, with values unchecked; anything else as `array`."""
        if len(self.shape(name)) != 2 or self.held(name).kind not in FLOATS:
            return self.array(name)
        kind, values = self._mapped(name)
        rows, columns = values.shape
        order, data = np.arange(rows, dtype=np.int32), values.view(np.uint8)
        read, forget = partial(self.array, name), partial(self._forget, name)
        return StoredMatrix(self.file_of(name), name, kind, data, order, columns, read, forget)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every tensor of `shapes` exists with that shape and a floating-point type."""
        for name, expected in shapes.items():
            entry, where = self._entry(name), f"{self.file_of(name)}: tensor {name!r}"
            if entry.shape != tuple(expected):
                raise UserError(f"{where} has shape {list(entry.shape)}, expected {list(expected)}")
            if entry.kind not in DTYPES:
                allowed = f"allowed are {', '.join(sorted(DTYPES))}"
                scaled = f"; weights of 8 bits and fewer go with scales, which {OTHER_RUNTIME} may know to apply"
                raise UnsupportedModel(f"{where} has type {entry.kind}, {allowed}{scaled}")

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

    def _place(self, name: str) -> tuple[SafetensorsFile, str]:
        """Return the file that holds a tensor, and its name there."""
        if name not in self._places:
            packed = "; the target has it: load this folder as its draft, or see `outpace distill --unpack`"
            raise UserError(f"{self.path} holds no tensor {name!r}{packed if lacks_embedding(self.config) else ''}")
        return self._places[name]

    def _check_quantisation(self) -> None:
        """Raise UnsupportedModel for a quantised model."""
        for name in ("quantization_config", "compression_config"):
            found = self.config.get(name)
            if found:
                method = found.get("quant_method") if isinstance(found, Mapping) else found
                reason = f"is quantised ({name} {method!r:.50})"
                raise UnsupportedModel(f"{self.path} {reason}: {OTHER_RUNTIME} runs it, this runtime cannot")


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """Open the folder's weight files; return the file of each tensor."""
    for name in (SINGLE, MEDUSA):
        if os.path.lexists(path / name):
            file = SafetensorsFile(path / name)
            return dict.fromkeys(file.entries, file)
    if not os.path.lexists(path / INDEX):
        raise _without_weights(path)
    shards = read_index(path / INDEX)
    files = {shard: SafetensorsFile(path / shard) for shard in sorted(set(shards.values()))}
    tensors = {name: file for file in files.values() for name in file.entries}
    for name, shard in shards.items():
        if tensors.get(name) is not files[shard]:
            raise UserError(f"{path / shard} holds no tensor {name!r}, although {INDEX} says so")
    return tensors


def lacks_embedding(config: Mapping[str, Any]) -> bool:
    """Return whether this is the config of a packed draft, which uses its target's embeddings (see packed.py)."""
    ours = config.get("outpace")
    return isinstance(ours, Mapping) and ours.get(EMBEDDING) == OF_TARGET


def _without_weights(path: Path) -> UserError:
    """Return the error for a folder without safetensors, which depends on what it holds instead."""
    names = sorted(file.name for file in path.iterdir())
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return UserError(f"{path} holds no {SINGLE}; to run its GGUF file, name the file itself: {path / gguf[0]}")
    if "adapter_config.json" in names:
        advice = f"merge it into its model first, or use {OTHER_RUNTIME}"
        return UnsupportedModel(f"{path} holds an adapter and no model: {advice}")
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        rule = "reading them can run any code and nothing is executed from a file; save the model as safetensors"
        return UserError(f"{path} holds pickled weights only ({pickled[0]}): {rule}")
    return UserError(f"{path} holds neither {SINGLE} nor {INDEX}, only safetensors weights can be read")


def read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor from an index of several weight files; UserError if it is invalid."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{file} has no weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(f"{file}: weight_map names {shard!r:.100} for {name!r:.100}, it must be a file next to it")
    return shards
