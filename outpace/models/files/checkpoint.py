"""Opens a model folder (config.json and safetensors files) lazily, and checks it before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files import reading
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.model_kind import has_language_model, language_model_names, text_config
from outpace.models.files.reading import check_file, read_json, write_json
from outpace.models.llama.config.footprint import FLOATS, StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes per value
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_RUNTIME = "`--runtime transformers`"
EMBEDDING, OF_TARGET = "embedding", "target"  # config.json's outpace.embedding of a packed draft


@dataclass
class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An open model folder. `close` (or `with`) releases the files; tensors returned before stay valid."""

    path: Path
    config: dict[str, Any]
    _files: dict[str, Any] = field(default_factory=dict, repr=False)  # tensor name -> open safetensors file
    _shards: dict[str, str] = field(default_factory=dict, repr=False)  # tensor name -> file name
    _stored: dict[str, str] = field(default_factory=dict, repr=False)  # tensor name -> name in the file
    _others: dict[tuple[str, str], Any] = field(
        default_factory=dict, repr=False
    )  # (file name, way) -> file opened in that way
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open the folder `path` and read the headers of its weight files; UserError if one is missing or damaged."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        config = read_json(path / "config.json")
        has_more = has_language_model(config)
        config = text_config(config, path / "config.json") if has_more else config
        cls._check_config(path, config)
        checkpoint = cls(path, config)
        try:
            checkpoint._open_files()
            checkpoint._name_tensors(has_more)
            checkpoint._check_layers()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the weight files; a second call does nothing."""
        self._files.clear()
        self._others.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """List the names of all tensors, sorted."""
        return sorted(self._shards)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor; UserError if there is no such tensor."""
        self._file(name)
        return self.path / self._shards[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header alone."""
        return tuple(self._slice(name).get_shape())

    def held(self, name: str) -> StoredSize:
        """Return a tensor's type and its number of bytes in the file."""
        part = self._slice(name)
        return StoredSize(part.get_dtype(), prod(part.get_shape()) * DTYPE_BYTES.get(part.get_dtype(), 1))

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored type, mapped from the file.

        Raises UserError if there is no such tensor, or if it holds nan or infinity, which no valid model does.
        """
        return self._read(name, _as_tensor, is_finite_tensor)

    def array(self, name: str) -> np.ndarray:
        """Return one tensor as float32 without torch, mapped if it is stored as float32. Raises as `tensor`."""
        return self.raw(name).float32()

    def raw(self, name: str) -> reading.RawTensor:
        """Return one tensor in its stored type without torch, mapped from the file. Raises as `tensor`."""
        return self._read(name, _as_raw, reading.RawTensor.is_finite)

    def _read(self, name: str, way: Callable[[Checkpoint, str, str], Any], is_sound: Callable[[Any], bool]) -> Any:
        value = self._find(name, way)
        if not is_sound(value):
            raise UserError(f"{self.file_of(name)} is damaged: tensor {name!r} holds values that are not finite")
        return value

    def _find(self, name: str, way: Callable[[Checkpoint, str, str], Any]) -> Any:
        file = self.file_of(name)
        try:
            return way(self, file.name, name)
        except Exception as error:
            raise UserError(f"{file}: tensor {name!r} cannot be read ({error!s:.200})") from error

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as stored, with values unchecked; anything else as `array`."""
        if len(self.shape(name)) != 2 or self.held(name).kind not in FLOATS:
            return self.array(name)
        kind, values = self._mapped(name)
        rows, columns = values.shape
        order, data = np.arange(rows, dtype=np.int32), values.view(np.uint8)
        read, forget = partial(self.array, name), partial(self._forget, name)
        return StoredMatrix(self.file_of(name), name, kind, data, order, columns, read, forget)

    def _mapped(self, name: str) -> reading.RawTensor:
        """Return a tensor as stored, mapped from the file, with values unchecked."""
        found: reading.RawTensor = self._find(name, _as_raw)
        return found

    def _forget(self, *names: str) -> None:
        """Release the memory of tensors that were read as arrays."""
        for name in names:
            _open_arrays(self, self._shards[name]).forget(self._stored[name])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every tensor of `shapes` exists with that shape and a floating-point type."""
        for name, expected in shapes.items():
            part = self._slice(name)
            where = self.path / self._shards[name]
            if tuple(part.get_shape()) != tuple(expected):
                raise UserError(f"{where}: tensor {name!r} has shape {part.get_shape()}, expected {list(expected)}")
            if part.get_dtype() not in DTYPE_BYTES:
                allowed = f"allowed are {', '.join(sorted(DTYPE_BYTES))}"
                scaled = f"; weights of 8 bits and fewer go with scales, which {OTHER_RUNTIME} may know to apply"
                raise UnsupportedModel(f"{where}: tensor {name!r} has type {part.get_dtype()}, {allowed}{scaled}")

    def once(self, shard: str, way: str, make: Callable[[ExitStack], Any]) -> Any:
        """Return the file opened by `make`, which is called at the first use of this shard and `way`."""
        if (shard, way) not in self._others:
            self._others[shard, way] = make(self._stack)
        return self._others[shard, way]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._stored[name])

    def _file(self, name: str) -> Any:
        if name not in self._shards:
            packed = "; the target has it: load this folder as its draft, or see `outpace distill --unpack`"
            raise UserError(f"{self.path} holds no tensor {name!r}{packed if lacks_embedding(self.config) else ''}")
        if name not in self._files:
            raise RuntimeError(f"{self.path} is closed")
        return self._files[name]

    @staticmethod
    def _check_config(path: Path, config: Mapping[str, Any]) -> None:
        """Raise UnsupportedModel for a quantised model."""
        for name in ("quantization_config", "compression_config"):
            found = config.get(name)
            if found:
                method = found.get("quant_method") if isinstance(found, Mapping) else found
                reason = f"is quantised ({name} {method!r:.50})"
                raise UnsupportedModel(f"{path} {reason}: {OTHER_RUNTIME} runs it, this runtime cannot")

    def _open_files(self) -> None:
        if os.path.lexists(self.path / SINGLE):
            self._add_file(SINGLE)
            return
        if not os.path.lexists(self.path / INDEX):
            raise _without_weights(self.path)
        shards = read_index(self.path / INDEX)
        for shard in sorted(set(shards.values())):
            self._add_file(shard)
        for name, shard in shards.items():
            if self._shards.get(name) != shard:
                raise UserError(f"{self.path / shard} holds no tensor {name!r}, although {INDEX} says so")

    def _add_file(self, shard: str) -> None:
        from safetensors import safe_open

        file = self.path / shard
        check_file(file)
        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="np"))
            names = list(opened.keys())
        # safetensors raises its own error, OSError or a bare Exception
        except Exception as error:
            raise UserError(f"{file} is not a whole safetensors file ({error!s:.200})") from error
        for name in names:
            self._files[name], self._shards[name] = opened, shard

    def _name_tensors(self, has_more: bool) -> None:
        """Name the tensors as if the language model were stored alone; `has_more`: the files hold other models too."""
        self._stored = language_model_names(self._shards) if has_more else {name: name for name in self._shards}
        self._shards = {name: self._shards[stored] for name, stored in self._stored.items()}
        self._files = {name: self._files[stored] for name, stored in self._stored.items()}

    def _check_layers(self) -> None:
        """Check the announced layer count before anything enumerates layers: each layer has tensors of its own."""
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(self._shards):
            announced = f"{self.path / 'config.json'}: num_hidden_layers is {layers!r:.50}"
            raise UserError(f"{announced}, but the weight files hold {len(self._shards)} tensors")


def _as_tensor(checkpoint: Checkpoint, shard: str, name: str) -> torch.Tensor:
    from safetensors import safe_open

    file = str(checkpoint.path / shard)
    opened = checkpoint.once(shard, "tensors", lambda stack: stack.enter_context(safe_open(file, framework="pt")))
    value: torch.Tensor = opened.get_tensor(checkpoint._stored[name])
    return value


def _as_raw(checkpoint: Checkpoint, shard: str, name: str) -> reading.RawTensor:
    return _open_arrays(checkpoint, shard).raw(checkpoint._stored[name])


def _open_arrays(checkpoint: Checkpoint, shard: str) -> reading.SafetensorsFile:
    file: reading.SafetensorsFile = checkpoint.once(
        shard, "arrays", lambda _: reading.SafetensorsFile(checkpoint.path / shard)
    )
    return file


def lacks_embedding(config: Mapping[str, Any]) -> bool:
    """Return whether this is the config of a packed draft, which uses its target's embeddings (see packed.py)."""
    ours = config.get("outpace")
    return isinstance(ours, Mapping) and ours.get(EMBEDDING) == OF_TARGET


def is_finite_tensor(value: torch.Tensor) -> bool:
    """Return whether no element is nan or infinite, in one pass without extra memory."""
    if not value.is_floating_point() or value.itemsize == 1 or not value.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(value))).all())


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new model folder at `path`, whole or not at all; UserError if it exists or cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if path.exists():
        raise UserError(f"{path} already exists")
    with new_folder(path) as folder:
        write_json(folder / "config.json", config)
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, folder / SINGLE, {"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{path} cannot be written ({error})") from error


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
            raise UserError(
                f"{file}: weight_map names {shard!r:.100} for {name!r:.100}, it must be a file in the same folder"
            )
    return shards
